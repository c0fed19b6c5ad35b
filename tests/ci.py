"""One meaning of CI for every test and script: whatever cannot run there is a failure and not a skip."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest

NO = ("", "0", "false")


def in_ci() -> bool:
    """Does CI say yes? Its value differs between services: everything but nothing, 0 and false is a yes."""
    return os.environ.get("CI", "").strip().lower() not in NO


def cannot_run(reason: str) -> NoReturn:
    """Skip with the reason, or fail with it where a skip would hide that nothing was tested."""
    if in_ci():
        pytest.fail(f"{reason} (CI turns this skip into a failure)", pytrace=False)
    pytest.skip(reason)
