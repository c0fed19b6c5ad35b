"""Log lines that say which worker and which job: the document's text format, and JSON.

    [2026-11-18T08:00:00.123Z] [Worker host1234] [Job abc-123] [AI] message

The tag is the logger's last name (`logging.getLogger("AI")`), or `extra={"tag": …}`. Paths of the machine
stay out of the text: see `redact`.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from datetime import UTC, datetime
from typing import Any, TextIO

from reconciler.worker.context import current_job
from reconciler.worker.identity import short_id

# What hides too much is the safe mistake: a path may hold spaces, so words up to a later slash belong to it,
# and a quoted one ends at its quote. The slashes of https://host/path begin no path; one after a colon does.
_BEGIN = r"(?:(?<![\w.:/])(?:file:/+|/+)|(?<=:)/(?!/))"
_PART = r"[^\s/'\"`<>|:;,]+"
_PATH = re.compile(
    rf"(?<=')/[^'\n]+(?=')|(?<=\")/[^\"\n]+(?=\")|(?<=`)/[^`\n]+(?=`)"
    rf"|{_BEGIN}{_PART}(?:(?: {_PART})*/+{_PART})*/*"
)
_USUAL = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "tag", "taskName"}


def redact(text: str, scratch_root: str | None = None) -> str:
    """Hide absolute paths; what lies in the scratch directory is told relative to it."""

    def hide(match: re.Match[str]) -> str:
        path = match.group()
        if scratch_root and (path == scratch_root or path.startswith(scratch_root.rstrip("/") + "/")):
            return "<scratch>" + path[len(scratch_root.rstrip("/")) :]
        return "<path>"

    return _PATH.sub(hide, text)


class TextFormatter(logging.Formatter):
    """The document's format."""

    def __init__(self, scratch_root: str | None = None) -> None:
        super().__init__()
        self._scratch_root = scratch_root

    def format(self, record: logging.LogRecord) -> str:
        parts = [f"[{_stamp(record)}]", f"[Worker {short_id()}]"]
        job_id = _job_id(record)
        if job_id is not None:
            parts.append(f"[Job {job_id}]")
        parts.append(f"[{_tag(record)}]")
        text = record.getMessage()
        fields = " ".join(f"{key}={value}" for key, value in _fields(record).items() if key != "job_id")
        lines = [text, fields] if fields else [text]
        if record.exc_info:
            lines.append("\n" + self.formatException(record.exc_info))
        return " ".join((*parts, redact(" ".join(lines), self._scratch_root)))


class JsonFormatter(logging.Formatter):
    """One object per line."""

    def __init__(self, scratch_root: str | None = None) -> None:
        super().__init__()
        self._scratch_root = scratch_root

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "at": _stamp(record),
            "level": record.levelname.lower(),
            "worker": short_id(),
            "job_id": _job_id(record),
            "tag": _tag(record),
            "message": redact(record.getMessage(), self._scratch_root),
        }
        for key, value in _fields(record).items():
            if key != "job_id":
                line[key] = redact(value, self._scratch_root) if isinstance(value, str) else value
        if record.exc_info:
            line["traceback"] = redact(self.formatException(record.exc_info), self._scratch_root)
        return json.dumps({key: value for key, value in line.items() if value is not None}, default=str)


def set_up_logging(
    *, form: str = "text", level: str = "INFO", ai_level: str | None = None, scratch_root: str | None = None,
    stream: TextIO | None = None,
) -> None:  # fmt: skip
    """Send all logs to stderr in one of the two forms; the `AI` tag has a level of its own.

    Without `ai_level` that is the setting log.aiLevel, which AI_LOG_LEVEL overrides; "warn" by default.
    """
    if ai_level is None:
        from reconciler.config import load  # noqa: PLC0415 - costs more than the rest of the SDK together

        ai_level = load().ai_log_level
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(JsonFormatter(scratch_root) if form == "json" else TextFormatter(scratch_root))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.getLogger("AI").setLevel(ai_level.upper())


def _stamp(record: logging.LogRecord) -> str:
    return (
        datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    )


def _job_id(record: logging.LogRecord) -> str | None:
    given = getattr(record, "job_id", None)
    if given is not None:
        return str(given)
    job = current_job()
    return None if job is None else str(job.job_id)


def _tag(record: logging.LogRecord) -> str:
    return str(getattr(record, "tag", None) or record.name.rpartition(".")[2])


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return {key: value for key, value in vars(record).items() if key not in _USUAL}
