"""What every test directory shares: the choice of Postgres majors and the servers themselves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.postgres import Server, ServerPool, installations_for


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--postgres",
        default=None,
        metavar="all|newest|MAJOR",
        help="servers to test on; default: the newest, and every major for tests marked every_postgres",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "every_postgres: run this test on every major of Postgres found")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "pg_server" not in metafunc.fixturenames:
        return
    installations = installations_for(
        metafunc.config.getoption("--postgres"),
        every_major=metafunc.definition.get_closest_marker("every_postgres") is not None,
    )
    names = [f"pg{installation.major}" for installation in installations]
    metafunc.parametrize("pg_server", installations, indirect=True, ids=names, scope="session")


@pytest.fixture(scope="session")
def _server_pool() -> Iterator[ServerPool]:
    pool = ServerPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def pg_server(request: pytest.FixtureRequest, _server_pool: ServerPool) -> Server:
    """A running server of the major this test was parametrised with."""
    return _server_pool.get(request.param)
