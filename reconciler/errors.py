"""Every error job-reaper raises on purpose.

    ReaperError
    ├── ConfigError            exit 2   wrong file, variable or flag: `problems` lists all of them at once
    ├── UsageError             exit 2   a command asked for something that cannot be (missing extra, bad id)
    ├── DatabaseError          exit 1   the database cannot be reached or refuses us; `code` says which
    │   └── TransientError              the same statement may succeed when tried again
    ├── TableError             exit 1   one table cannot be served (missing column, wrong type, no rights)
    ├── RowError               exit 1   one row cannot be written (a trigger raised, a value does not fit)
    └── MigrationError         exit 1   a migration could not be applied; nothing half-done is left

An error carries its data and says what to do. `code` is a word for machines (JSON output, metrics);
it never changes once released.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class ReaperError(Exception):
    """Root of the tree. `exit_code` is what a command returns when nothing handles it."""

    exit_code = 1
    code = "error"

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        if code is not None:
            self.code = code


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with the configuration, in the four parts a reader needs."""

    key: str
    value: str
    allowed: str
    hint: str = ""
    source: str = ""

    def __str__(self) -> str:
        where = f" (from {self.source})" if self.source else ""
        hint = f". {self.hint}" if self.hint else ""
        return f"{self.key}={self.value}{where}: {self.allowed}{hint}"


class ConfigError(ReaperError):
    """The configuration is wrong. All problems are collected before this is raised."""

    exit_code = 2
    code = "config"

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        lines = "\n".join(f"  - {problem}" for problem in self.problems)
        count = len(self.problems)
        super().__init__(f"{count} problem{'s' if count != 1 else ''} in the configuration:\n{lines}")


class UsageError(ReaperError):
    """The command line asks for something that cannot be done."""

    exit_code = 2
    code = "usage"


class DatabaseError(ReaperError):
    """The database cannot be reached, or refuses us as a whole."""

    code = "database"


class TransientError(DatabaseError):
    """Serialization failure, deadlock, lost connection, failover: worth another try."""

    code = "transient"


class TableError(ReaperError):
    """One table cannot be served; the other tables still are."""

    code = "table"


class RowError(ReaperError):
    """A statement failed because of what is in a row, not because of the server."""

    code = "row"


class MigrationError(ReaperError):
    """A migration could not be applied."""

    code = "migration"
