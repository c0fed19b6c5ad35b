"""The console script `job-reaper`: words in, exit code out. Each command imports only what it runs.

argparse, not click: a CronJob starts this every minute, and click costs as much to import as the rest of
our own code. Exit codes: 0 done or skipped; 1 a table, a row, the database or a check failed; 2 wrong
configuration or usage; 3 a brake kept a table unchanged.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from reconciler import __version__
from reconciler.errors import ReaperError, UsageError

if TYPE_CHECKING:
    from reconciler.config import Settings

Command = Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command and exit with its code."""
    sys.exit(run(argv))


def run(argv: Sequence[str] | None = None) -> int:
    """Run one command; errors of ours become a sentence on stderr and their exit code."""
    arguments = _parser().parse_args(argv)
    command: Command = arguments.command
    try:
        return command(arguments)
    except ReaperError as error:
        print(f"job-reaper: {error.message}", file=sys.stderr)  # noqa: T201 - a person is waiting for it
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="job-reaper",
        description="Makes sure no job stays stuck: finds jobs whose worker is gone, queues them again"
        " or fails them with the cause, and writes an event for each.",
        epilog="Configuration: DATABASE_URL, REAPER_CONFIG (a YAML file), the environment."
        " All keys: docs/reference/configuration.md",
    )
    parser.add_argument("--version", action="version", version=f"job-reaper {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    once = commands.add_parser("once", help="one pass over all tables, then exit (for a CronJob)")
    _dry_run(once, "say what would be done, change nothing")
    _output(once)
    once.set_defaults(command=_once)

    loop = commands.add_parser("run", help="a pass every REAPER_INTERVAL_SEC, with /metrics and /healthz")
    _dry_run(loop, "say what would be done, change nothing")
    loop.set_defaults(command=_run)

    migrate = commands.add_parser("migrate", help="bring the database to the schema the reaper needs")
    _dry_run(migrate, "print the SQL, change nothing")
    migrate.add_argument(
        "--heartbeats",
        choices=["default", "hot"],
        help="index set: the documents' (default) or one that keeps beats HOT; without it: what is there",
    )
    _output(migrate)
    migrate.set_defaults(command=_migrate)

    config = commands.add_parser(
        "config", help="show the effective configuration and where each value is from"
    )
    _output(config)
    config.set_defaults(command=_config)

    demo = commands.add_parser(
        "demo", help="watch workers die and their jobs come back, on a private Postgres"
    )
    demo.add_argument("--keep", action="store_true", help="leave the database running and print its DSN")
    demo.add_argument("--dsn", help="use this database instead of a private one (it will be written to)")
    demo.add_argument("--fast", action="store_true", help="a shorter play, for tests")
    demo.add_argument("--seed", type=int, help="the same accidents again")
    demo.set_defaults(command=_demo)
    return parser


def _output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", choices=["text", "json"], default="text", help="default: text")


def _dry_run(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("--dry-run", action="store_true", help=text)


def _settings(arguments: argparse.Namespace) -> Settings:
    """Configuration, logging and warnings, in that order: the same way in for every command."""
    from reconciler.config import load  # noqa: PLC0415 - see the module docstring
    from reconciler.logs import say, to_stderr  # noqa: PLC0415

    overrides: dict[str, object] = {"dryRun": True} if getattr(arguments, "dry_run", False) else {}
    settings = load(overrides=overrides)
    to_stderr(settings.log_level)
    for warning in settings.warnings:
        say("configuration", level=30, fields={"warning": warning})
    return settings


def _once(arguments: argparse.Namespace) -> int:
    from reconciler.once import run_once  # noqa: PLC0415

    return run_once(_settings(arguments), output=arguments.output)


def _run(arguments: argparse.Namespace) -> int:
    from reconciler.run_loop import run_loop  # noqa: PLC0415

    return run_loop(_settings(arguments))


def _migrate(arguments: argparse.Namespace) -> int:
    from reconciler.migrate import migrate  # noqa: PLC0415

    settings = _settings(arguments)
    as_json = arguments.output == "json"
    report = migrate(
        settings.dsn,
        settings.table_specs(),
        default_max_attempts=settings.policy().max_attempts,
        state_schema=settings.state_schema,
        state_table=settings.state_table,
        heartbeats=arguments.heartbeats,
        dry_run=settings.dry_run,
        say=(lambda _: None) if as_json else _line,
    )
    if as_json:
        _line(
            json.dumps(
                {
                    "ok": True,
                    "dry_run": settings.dry_run,
                    "planned": report.planned,
                    "applied": report.applied,
                    "skipped": [{"step": step, "why": why} for step, why in report.skipped],
                    "sql": report.sql,
                    "warnings": report.warnings,
                }
            )
        )
        return 0
    for statement in report.sql:
        _line(statement.rstrip().rstrip(";") + ";")
    for warning in report.warnings:
        _line(f"warning: {warning}")
    what = "would be applied" if settings.dry_run else "applied"
    count = len(report.planned if settings.dry_run else report.applied)
    _line(f"{count} step{'s' if count != 1 else ''} {what}, {len(report.skipped)} already there")
    return 0


def _config(arguments: argparse.Namespace) -> int:
    from reconciler.config import describe  # noqa: PLC0415

    settings = _settings(arguments)
    rows: list[dict[str, Any]] = describe(settings)
    if arguments.output == "json":
        _line(
            json.dumps(
                {"checksum": settings.checksum, "warnings": settings.warnings, "values": rows}, default=str
            )
        )
        return 0
    width = max(len(row["key"]) for row in rows)
    values = max(len(str(row["value"])) for row in rows)
    for row in rows:
        _line(f"{row['key']:<{width}}  {row['value']!s:<{min(values, 40)}}  {row['source']}")
    _line(f"checksum {settings.checksum}")
    return 0


def _demo(arguments: argparse.Namespace) -> int:
    try:
        from reconciler.demo.run import main as demo  # noqa: PLC0415
    except ImportError as error:
        raise UsageError(f"the demo needs an extra ({error}): pip install 'job-reaper[demo]'") from error
    return demo(keep=arguments.keep, dsn=arguments.dsn, fast=arguments.fast, seed=arguments.seed)


def _line(text: str) -> None:
    print(text)  # noqa: T201 - this is the command's output
