"""What is shown: every value with its source, no secret, a document that loads again, a page that is true."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from reconciler.config import Settings, describe, document, load, masked_dsn
from reconciler.config.grammar import Grammar
from reconciler.config.reference import renewed
from reconciler.config.setting import dotted, undotted, walk
from reconciler.errors import ConfigError

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "configuration.md"


@pytest.mark.parametrize(
    ("dsn", "shown"),
    [
        ("postgresql://u:pw@h:5432/d", "postgresql://u:***@h:5432/d"),
        ("postgres://u@h/d", "postgres://u@h/d"),
        ("postgresql://h:5432/d", "postgresql://h:5432/d"),
        ("postgresql:///d?host=/tmp&user=u&password=pw", "postgresql:///d?host=/tmp&user=u&password=***"),
        ("postgresql://h/d?password=pw&sslmode=require", "postgresql://h/d?password=***&sslmode=require"),
        ("postgresql://h/d?sslpassword=pw#x", "postgresql://h/d?sslpassword=***"),
        ("postgresql://h/d?pass%77ord=pw", "postgresql://h/d?pass%77ord=***"),
        ("postgresql://u:p@ss:w@rd@h/d", "postgresql://u:***@h/d"),
        ("postgresql://u:p/w?x#y@h/d", "postgresql://u:***@h/d"),
        ("postgresql://u:@h/d", "postgresql://u:***@h/d"),
        ("postgresql://u:pw@[::1]:5432/d", "postgresql://u:***@[::1]:5432/d"),
        ("host=h user=u password=pw dbname=d", "host=h user=u password=*** dbname=d"),
        ("password = 'p w' host=h", "password = *** host=h"),
        (r"password='it\'s pw' host=h", "password=*** host=h"),
        (r"password=p\ w host=h", "password=*** host=h"),
        ("password='never closed host=h", "password=***"),
        ("PASSWORD=pw sslpassword=pw2", "PASSWORD=*** sslpassword=***"),
        ("password=x://y:z@w host=h", "password=*** host=h"),
        ("host=h dbname='postgresql://u:pw@h/d'", "host=h dbname='postgresql://u:***@h/d'"),
        ("host=h dbname=d", "host=h dbname=d"),
        (None, "(libpq's PG* variables)"),
    ],
)
def test_passwords_are_masked_and_the_rest_is_not(dsn: str | None, shown: str) -> None:
    assert masked_dsn(dsn) == shown


SECRET = st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), min_size=1).map(
    lambda text: f"QX{text}XQ"
)


@given(SECRET.filter(lambda text: "&" not in text))
@example("QX@:/?#[]XQ")
@example("QX\\'XQ")
def test_no_password_survives_in_any_form(password: str) -> None:
    quoted = password.replace("\\", "\\\\").replace("'", "\\'")
    for dsn in (
        f"postgresql://user:{password}@host/db",
        f"postgresql://host/db?password={password}&sslmode=disable",
        f"host=h password='{quoted}' dbname=d",
    ):
        shown = masked_dsn(dsn)
        assert "QX" not in shown
        assert "XQ" not in shown


def test_describe_gives_every_key_once_with_its_source() -> None:
    env = {
        "REAPER_TABLES": "jobs",
        "QUEUE_VISIBILITY_SEC": "600",
        "DATABASE_URL": "postgresql://u:hunter2@h/d",
        "REAPER_PUSHGATEWAY_URL": "http://u:hunter2@push",
    }
    rows = describe(load(env=env))
    keys = [row["key"] for row in rows]
    expected = [
        key.replace("<name>", name)
        for path, _, _ in walk(Settings)
        for key in (".".join(path),)
        for name in {"tables": ["jobs"], "stages": ["clip", "asr", "burnin"]}.get(path[0], [""])
        if "causes" not in path
    ]
    assert sorted(keys) == sorted(expected)
    by_key = {row["key"]: row for row in rows}
    assert by_key["lease.defaultSec"] == {
        "key": "lease.defaultSec",
        "value": 600,
        "source": "env QUEUE_VISIBILITY_SEC",
    }
    assert by_key["database.url"]["value"] == "postgresql://u:***@h/d"
    assert "hunter2" not in json.dumps(rows)
    assert "hunter2" not in json.dumps(document(load(env=env)))
    assert "url" not in document(load(env=env))["database"], "the file must not hold it, masked or not"


def test_the_checksum_follows_the_values_not_their_source_or_spelling(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("batch: {size: 7}\nstages: {dub: 2.50, asr: 12.0}\n", encoding="utf-8")
    first = load(env={}, path=str(path))
    path.write_text("stages: {asr: {factor: 12}, dub: {factor: 2.5}}\n", encoding="utf-8")
    second = load(env={"REAPER_BATCH_SIZE": "7"}, path=str(path))
    assert first.checksum == second.checksum
    assert re.fullmatch(r"[0-9a-f]{64}", first.checksum)
    assert load(env={"REAPER_BATCH_SIZE": "8"}, path=str(path)).checksum != first.checksum
    assert load(env={"REAPER_TABLES": "asr_jobs,jobs"}).checksum != load(env={}).checksum


def test_the_checksum_does_not_depend_on_secrets() -> None:
    urls = ("postgresql://u:one@h/d", "postgresql://u:two@h/d")
    assert len({load(env={"DATABASE_URL": url}).checksum for url in urls}) == 1
    urls = ("http://u:one@push", "http://u:two@push")
    assert len({load(env={"REAPER_PUSHGATEWAY_URL": url}).checksum for url in urls}) == 1
    assert load(env={}).checksum != load(env={"REAPER_PUSHGATEWAY_URL": urls[0]}).checksum


def test_the_checksum_is_the_same_in_another_process() -> None:
    code = "from reconciler.config import load; print(load(env={'REAPER_TABLES': 'a,b'}).checksum)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == load(env={"REAPER_TABLES": "a,b"}).checksum


def test_the_default_document_loads_as_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(document(load(env={})), sort_keys=False), encoding="utf-8")
    assert load(env={}, path=str(path)).checksum == load(env={}).checksum


def test_every_default_is_one_that_could_be_written() -> None:
    for path, field, setting in walk(Settings):
        if path != ("stages", "<name>", "factor"):
            assert setting.parse(field.default) == field.default, path


@given(st.lists(st.text(), min_size=1).map(tuple))
def test_a_dotted_key_leads_back_to_its_path(path: tuple[str, ...]) -> None:
    if all(part.isprintable() and len(part) <= 130 for part in path):
        assert undotted(dotted(path)) == path


# ── The reference page ──────────────────────────────────────────────────────────────────────────────


def test_the_reference_page_is_what_the_schema_says() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert renewed(page) == page, f"run: python -m reconciler.config.reference {PAGE.name}"


def test_the_pages_example_is_the_defaults(tmp_path: Path) -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    path = tmp_path / "config.yaml"
    path.write_text(block, encoding="utf-8")
    settings = load(env={}, path=str(path))
    assert settings.checksum == load(env={}).checksum
    assert settings.warnings == ()
    written = {key for key, source in settings.sources.items() if source != "default"}
    missing = {
        row["key"]
        for row in describe(settings)
        if row["value"] is not None and not row["key"].startswith("tables.")
    } - written
    assert missing == set(), "every key with a default belongs into the example"


def test_the_pages_error_is_the_real_one() -> None:
    page = PAGE.read_text(encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load(env={"REAPER_BATCH_SIZE": "-1", "HEARTBEAT_SEC": "60s"})
    assert f"\n{caught.value}\n```" in page


def test_every_grammar_says_what_it_allows() -> None:
    grammars: list[Grammar] = [setting.grammar for _, _, setting in walk(Settings)]
    assert all(len(grammar.allowed) > 5 for grammar in grammars)


# ── What a start pays ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "unwanted",
    ["yaml", "pydantic_settings", "psycopg", "kopf", "kubernetes", "click", "prometheus_client", "difflib"],
)
def test_a_start_without_a_file_does_not_import_what_it_does_not_need(unwanted: str) -> None:
    code = (
        "import sys; from reconciler.config import load, describe; load(env={'REAPER_BATCH_SIZE': '5'});"
        f"sys.exit({unwanted!r} in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
