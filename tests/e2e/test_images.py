"""The images' cache stays small, and an image is made anew when what it is made of changes."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import assets, images
from tests.cluster.plugin import unavailable
from tests.cluster.preflight import node_tier_lacks

pytestmark = pytest.mark.own_cluster


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache of our own; buildah's storage holds other mounts and owners, so root removes it."""
    reasons = node_tier_lacks()
    if reasons:
        unavailable("node tier", "; ".join(reasons))
    monkeypatch.setenv("JOB_REAPER_CACHE", str(tmp_path / "cache"))
    # On another disk, by a link: what lies behind it counts.
    for made in ("cache", "storage"):
        (tmp_path / made).mkdir()
    (tmp_path / "cache" / "buildah").symlink_to(tmp_path / "storage")
    yield tmp_path / "cache"
    subprocess.run(["rm", "-rf", str(tmp_path / "cache"), str(tmp_path / "storage")], check=True)


def an_image(tag: str, content: Path) -> None:
    """Tag a new image, so that the one which had the tag before has none; leave the container behind."""
    images._buildah_script(
        'c=$(buildah from scratch); buildah copy --quiet "$c" "$1" /content; '
        'buildah commit --quiet "$c" "$2"',
        str(content),
        tag,
    )


def listed(kind: str, tmp_path: Path) -> int:
    images._buildah_script(f'buildah {kind} --quiet > "$1"', str(tmp_path / "listed"))
    return len((tmp_path / "listed").read_text().split())


def test_a_storage_over_its_limit_loses_what_no_image_uses(cache: Path, tmp_path: Path) -> None:
    content = tmp_path / "content"
    for _ in range(3):
        content.write_bytes(os.urandom(4_000_000))
        an_image("localhost/kept:1", content)
    assert (listed("containers", tmp_path), listed("images --all", tmp_path)) == (3, 3)

    images.prune(limit=100_000_000)
    assert (listed("containers", tmp_path), listed("images --all", tmp_path)) == (0, 3)

    images.prune(limit=8_000_000)
    assert listed("images --all", tmp_path) == 1
    assert images._storage_size() < 8_000_000

    images.prune(limit=1_000_000)
    assert list((tmp_path / "storage").iterdir()) == []


def test_old_archives_go_together_with_their_checksums(tmp_path: Path) -> None:
    for number in range(4):
        made = tmp_path / "made"
        made.write_text(str(number))
        assets.keep(made, tmp_path / f"job-reaper-{number}.tar")
        os.utime(tmp_path / f"job-reaper-{number}.tar", (number, number))
    (tmp_path / "job-reaper-9.tar.sha256").write_text("its archive is gone")

    images.drop_old_archives(tmp_path)

    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [f"job-reaper-{n}.tar{end}" for n in (2, 3) for end in ("", ".sha256")]


def test_another_base_is_another_image(tmp_path: Path) -> None:
    keys = set()
    for content in ("one", "two"):
        for name in ("base.tar", "build-base.tar"):
            (tmp_path / "made").write_text(content)
            assets.keep(tmp_path / "made", tmp_path / name)
        keys.add(images._inputs((tmp_path / "base.tar", tmp_path / "build-base.tar")))

    assert len(keys) == 2
