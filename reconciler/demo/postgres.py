"""A private Postgres: started in about a second, reachable through a socket only we can open, gone with us.

    with EmbeddedPostgres() as server:
        psycopg.connect(server.dsn)

Postgres refuses to run as root, so root's servers run as `nobody`; binaries that `nobody` cannot reach
(below a 0700 home) are copied beside the data first. Over the unix socket everybody who can open it is
trusted, and the socket lies in a 0700 directory; over TCP beyond the loopback a random password is asked.

Defaults suit tests: nothing is flushed to disk. `durable=True` leaves Postgres' own settings, for the
benchmark. A watchdog process ends the server when we are killed; `detach()` sends it home (`--keep`).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Self
from urllib.parse import quote

from reconciler.demo import watchdog
from reconciler.demo.installations import (
    Installation,
    find_installations,
    newest_of_each_major,
    preferred_installation,
)
from reconciler.demo.server_user import (
    hand_over,
    private_directory,
    process_arguments,
    reachable,
    server_identity,
)
from reconciler.errors import DatabaseError

__all__ = [
    "EmbeddedPostgres",
    "Installation",
    "find_installations",
    "newest_of_each_major",
    "preferred_installation",
    "server_identity",
]

START_SEC = 60.0
STOP_SEC = 30.0
SUPERUSER = "postgres"
LOOPBACK = ("127.0.0.1", "::1", "localhost")
# synchronous_commit stays on: kill() must not lose what was committed, and without fsync it costs nothing.
NOT_DURABLE = MappingProxyType({"fsync": "off", "full_page_writes": "off"})


class EmbeddedPostgres:
    """One server. Entering the context starts it; leaving stops it and removes what it wrote."""

    def __init__(
        self,
        installation: Installation | None = None,
        *,
        data_dir: Path | None = None,
        listen: Sequence[str] = (),
        port: int | None = None,
        settings: Mapping[str, str] = MappingProxyType({}),
        durable: bool = False,
    ) -> None:
        self.installation = installation or preferred_installation()
        self.listen = tuple(listen)
        self.port = port or (_free_port(self.listen) if self.listen else 5432)
        self.password = secrets.token_urlsafe(16)
        self._settings = {**({} if durable else NOT_DURABLE), **settings}
        self._given_data_dir = data_dir
        self._base: Path | None = None
        self._bin_dir = self.installation.bin_dir
        self._process: subprocess.Popen[bytes] | None = None
        self._watchdog: subprocess.Popen[bytes] | None = None

    # ── where it is ─────────────────────────────────────────────────────────────────────────────────

    @property
    def base(self) -> Path:
        """The private directory: socket, log, and the data unless it was put elsewhere."""
        if self._base is None:
            raise DatabaseError("this embedded Postgres was not started: call start() or use `with`")
        return self._base

    @property
    def data_dir(self) -> Path:
        return self._given_data_dir or self.base / "data"

    @property
    def log_path(self) -> Path:
        return self.base / "postgres.log"

    @property
    def pid(self) -> int:
        if self._process is None:
            raise DatabaseError("this embedded Postgres is not running: call start()")
        return self._process.pid

    @property
    def dsn(self) -> str:
        """The superuser's URL over the unix socket."""
        return self.dsn_for("postgres")

    def dsn_for(self, dbname: str, user: str = SUPERUSER) -> str:
        return (
            f"postgresql://{quote(user, safe='')}@/{quote(dbname, safe='')}"
            f"?host={quote(str(self.base))}&port={self.port}"
        )

    def url_for(self, host: str, dbname: str = "postgres") -> str:
        """The superuser's URL over TCP, for one of the addresses asked for in `listen`."""
        shown = f"[{host}]" if ":" in host else host
        return f"postgresql://{SUPERUSER}:{self.password}@{shown}:{self.port}/{quote(dbname, safe='')}"

    # ── its life ────────────────────────────────────────────────────────────────────────────────────

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Create the cluster on the first call, start the server, return once it accepts connections."""
        if self._process is not None:
            raise DatabaseError(f"this embedded Postgres already runs (pid {self.pid})")
        try:
            if self._base is None:
                self._base = private_directory()
                self._bin_dir = reachable(self.installation, self._base)
            if not (self.data_dir / "PG_VERSION").exists():
                self._initialise()
            self._launch()
        except BaseException:
            self.close()
            raise

    def stop(self) -> None:
        """Fast shutdown: open transactions are rolled back, the data stays. Harmless when stopped."""
        self._end(signal.SIGINT)

    def kill(self) -> None:
        """SIGKILL, as a lost machine would look to clients. The data stays; `start()` recovers it."""
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        """Stop, then start with the same data, socket and port."""
        self.stop()
        self.start()

    def close(self) -> None:
        """Stop and remove everything except a data directory that was given to us."""
        self.stop()
        if self._base is not None:
            shutil.rmtree(self._base, ignore_errors=True)
            self._base = None

    def detach(self) -> None:
        """Let the server outlive us. What remains to stop it: `kill -INT <pid>`."""
        self._dismiss_watchdog()
        if self._process is not None:
            # Popen would warn at exit about a child that still runs: here that is the intention.
            self._process.returncode = 0
            self._process = None
        self._base = None

    # ── how ─────────────────────────────────────────────────────────────────────────────────────────

    def _initialise(self) -> None:
        password_file = self.base / "password"
        password_file.write_text(self.password)
        self.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        hand_over(password_file)
        hand_over(self.data_dir)
        command = [
            str(self._bin_dir / "initdb"),
            *("-D", str(self.data_dir), "-U", SUPERUSER, "--encoding=UTF8", "--locale=C", "--no-sync"),
            *("--auth=trust", "--auth-host=scram-sha-256", f"--pwfile={password_file}"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False, **process_arguments())  # noqa: S603
        password_file.unlink()
        if done.returncode != 0:
            raise DatabaseError(f"initdb failed: {done.stderr.strip() or done.stdout.strip()}", code="initdb")
        if any(address not in LOOPBACK for address in self.listen):
            with (self.data_dir / "pg_hba.conf").open("a") as rules:
                rules.write("host all all all scram-sha-256\n")

    def _launch(self) -> None:
        settings = {
            "listen_addresses": ",".join(self.listen),
            "port": str(self.port),
            "unix_socket_directories": str(self.base),
            "logging_collector": "off",
            **self._settings,
        }
        command = [str(self._bin_dir / "postgres"), "-D", str(self.data_dir)]
        command += [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        deadline = time.monotonic() + START_SEC
        while not self._launched(command, deadline):
            # Only seen after kill(): the dead server's children hold its memory for some milliseconds.
            time.sleep(0.05)
        self._watch()

    def _launched(self, command: list[str], deadline: float) -> bool:
        """Start once; False when a predecessor's children are still leaving, worth another try."""
        with self.log_path.open("ab") as log:
            begin = log.tell()
            process = subprocess.Popen(  # noqa: S603 - the command is ours
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C at the terminal is ours to handle, not the server's
                **process_arguments(),
            )
        while process.poll() is None:
            if self._is_ready(process.pid):
                self._process = process
                return True
            if time.monotonic() > deadline:
                process.kill()
                process.wait()
                break
            time.sleep(0.01)
        said = self.log_path.read_bytes()[begin:].decode(errors="replace").strip()
        if "shared memory block" in said and "still in use" in said and time.monotonic() < deadline:
            return False
        raise DatabaseError(
            f"Postgres {self.installation.major} did not start:\n{said}", code="embedded_start"
        )

    def _is_ready(self, pid: int) -> bool:
        # The eighth line of postmaster.pid is what `pg_ctl --wait` reads, too.
        with contextlib.suppress(FileNotFoundError):
            lines = (self.data_dir / "postmaster.pid").read_text().split("\n")
            return lines[0] == str(pid) and len(lines) > 7 and lines[7].strip() == "ready"
        return False

    def _watch(self) -> None:
        watchdog_command = [sys.executable, "-I", "-S", watchdog.__file__]
        self._watchdog = subprocess.Popen(  # noqa: S603 - ours
            [*watchdog_command, str(os.getpid()), str(self.pid), str(self.data_dir), str(self.base)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _dismiss_watchdog(self) -> None:
        if self._watchdog is None:
            return
        # Popen's own communicate() copes with a watchdog that is already gone.
        self._watchdog.communicate(b"x", timeout=STOP_SEC)
        self._watchdog = None

    def _end(self, how: signal.Signals) -> None:
        if self._process is None:
            return
        self._process.send_signal(how)
        try:
            self._process.wait(STOP_SEC)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None
        self._dismiss_watchdog()


def _free_port(addresses: Sequence[str]) -> int:
    """A TCP port free on every address: the first one's choice, tried on the others."""
    for _ in range(50):
        with contextlib.ExitStack() as held:
            port = 0
            try:
                for address in addresses:
                    family = socket.AF_INET6 if ":" in address else socket.AF_INET
                    probe = held.enter_context(socket.socket(family, socket.SOCK_STREAM))
                    probe.bind(("" if address == "*" else address, port))
                    port = probe.getsockname()[1]
            except OSError:
                continue
            return port
    raise DatabaseError(f"no free TCP port on {', '.join(addresses)}", code="no_port")
