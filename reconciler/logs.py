"""JSON lines on stderr, as `kubectl logs` shows them: the message is fixed text, the data goes in fields."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, TextIO

LOGGER = logging.getLogger("job_reaper")


class JsonFormatter(logging.Formatter):
    """One object per line. Fields come through `extra={"fields": {...}}`, see say()."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "msg": record.getMessage(),
        }
        line.update(getattr(record, "fields", {}))
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def say(message: str, *, level: int = logging.INFO, fields: Mapping[str, Any] | None = None) -> None:
    """Write one line: fixed text and its data."""
    LOGGER.log(level, message, extra={"fields": dict(fields or {})})


def to_stderr(level: str, stream: TextIO | None = None) -> None:
    """Send our lines to stderr. Only our logger: an application that embeds us keeps its own."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter())
    LOGGER.handlers = [handler]
    LOGGER.propagate = False
    LOGGER.setLevel(level.upper())
