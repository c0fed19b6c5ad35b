"""A machine within the machine: its own network, mounts, processes and control groups, without Docker.

Everything a node does to its host (links, nft tables, mounts, processes) happens in namespaces that belong
to one process, and the kernel takes them back when that process ends, however it ends. On the machine
itself there are only one directory, a control group, and that process. Several nodes can live side by side,
with the same addresses.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.cluster import cgroups, traces
from tests.cluster.process import ClusterError, Process, log_tail, wait_until

HERE = Path(__file__).parent
STATE_FILE = "sandbox.json"
# The node's first process, and the `unshare` that waits for it and is known a moment earlier.
NODE_PIDS = {"node", "unshare"}
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass
class Pid:
    """A process of ours, with its start stamp: a number alone may by now be somebody else's."""

    number: int
    started: str

    @classmethod
    def of(cls, number: int) -> Pid:
        return cls(number, _start_stamp(number) or "")

    @property
    def alive(self) -> bool:
        return _start_stamp(self.number) == self.started

    def end(self, *, grace: float = 20.0) -> None:
        """SIGTERM, then SIGKILL; returns when it is gone."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if not self.alive:
                return
            os.kill(self.number, number)
            with contextlib.suppress(ClusterError):
                wait_until(lambda: not self.alive, timeout=grace, what=f"pid {self.number} to end")
        if self.alive:
            raise ClusterError(f"pid {self.number} does not end")


@dataclass
class SandboxState:
    """What another process (make cluster-down) needs to end a sandbox."""

    directory: str
    group: str
    owner: Pid
    pids: dict[str, Pid] = field(default_factory=dict)

    def save(self) -> None:
        target = Path(self.directory) / STATE_FILE
        written = target.with_suffix(".part")
        written.write_text(json.dumps(asdict(self)))
        os.replace(written, target)

    @classmethod
    def load(cls, directory: Path) -> SandboxState:
        raw = json.loads((directory / STATE_FILE).read_text())
        pids = {name: Pid(**value) for name, value in raw["pids"].items()}
        return cls(raw["directory"], raw["group"], Pid(**raw["owner"]), pids)

    @property
    def abandoned(self) -> bool:
        """Neither the node nor its maker lives: what is left is a killed run's directory and group."""
        return not self.owner.alive and not any(self.pids[name].alive for name in NODE_PIDS & set(self.pids))

    def destroy(self) -> None:
        """End the processes by pid, then remove groups and directory. Safe to repeat."""
        # The forwarders first, then the first process of the node, whose end is the end of all the others.
        for name in sorted(self.pids, key=lambda name: (name in NODE_PIDS, name)):
            self.pids[name].end()
        cgroups.remove(self.group)
        if Path(self.directory).exists():
            shutil.rmtree(self.directory)


class Sandbox:
    """Start, use and end one such machine."""

    def __init__(self, *, outlive_parent: bool = False) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix=cgroups.PREFIX))
        self.directory.chmod(0o755)
        self.outlive_parent = outlive_parent
        self.namespaces: frozenset[str] = frozenset()
        self.state = SandboxState(str(self.directory), self.directory.name, Pid.of(os.getpid()))
        # From here on a killed run leaves something, which `sweep` can find.
        self.state.save()
        self._unshare: Process | None = None
        self._forwarders: list[Process] = []

    def start(self) -> None:
        """Make the namespaces and start their first process; returns when it takes commands."""
        for hidden in ("/run", "/var/lib", "/var/log"):
            if self.directory.is_relative_to(hidden):
                raise ClusterError(
                    f"{self.directory} lies below {hidden}, which the node hides; set TMPDIR elsewhere"
                )
        for name in ("var-lib", "var-log", "sysctl", "logs"):
            (self.directory / name).mkdir()
        (self.directory / "hosts").write_text("127.0.0.1 localhost\n::1 localhost\n")
        cgroups.create(self.state.group)
        namespaces = ["--mount", "--net", "--pid", "--uts", "--ipc", "--fork", "--kill-child", "--mount-proc"]
        supervisor = [sys.executable, "-I", str(HERE / "supervisor.py"), str(self.directory)]
        log = self.directory / "logs" / "supervisor.log"
        argv = ["unshare", *namespaces, "--propagation", "private", *supervisor]
        self._unshare = Process("node", argv, log, outlive_parent=self.outlive_parent)
        self._unshare.start()
        # At once: a node that outlives us must be found by `down`, also when we are killed right now.
        self.state.pids["unshare"] = Pid.of(self._unshare.pid)
        self.state.save()
        control = self.directory / "control"
        self._unshare.wait_ready(control.exists, timeout=20, what="the node's first process")
        self.state.pids["node"] = Pid.of(self._first_pid())
        self.state.save()
        self.namespaces = traces.namespaces_of(self.pid)

    def destroy(self) -> None:
        """End it and leave nothing: processes, mounts, links, tables, groups, directory."""
        for forwarder in self._forwarders:
            forwarder.stop()
        if "node" in self.state.pids:
            self.state.pids["node"].end()
        if self._unshare is not None:
            self._unshare.stop()
        self.state.destroy()

    def run(self, *argv: str, timeout: float = 120.0, stdin: bytes | None = None) -> str:
        """Run a command inside and return what it printed."""
        entered = [
            "nsenter",
            f"--target={self.pid}",
            "--mount",
            "--net",
            "--pid",
            "--uts",
            "--ipc",
            "--",
            *argv,
        ]
        environment = {"PATH": PATH}
        answer = subprocess.run(
            entered, capture_output=True, timeout=timeout, input=stdin, env=environment, check=False
        )
        if answer.returncode != 0:
            raise ClusterError(
                f"{' '.join(argv)} failed in the node: {answer.stderr.decode(errors='replace')}"
            )
        return answer.stdout.decode()

    def start_daemon(self, name: str, argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> None:
        """Start a daemon of the node; its output goes to logs/NAME.log."""
        environment = {"PATH": PATH, **(env or {})}
        self._command(do="start", name=name, argv=list(argv), log=str(self.log(name)), env=environment)

    def stop_daemon(self, name: str, *, grace: float = 15.0) -> None:
        """Ask it to end; after the grace it is made to."""
        self._command(do="stop", name=name, grace=grace)

    def signal_daemon(self, name: str, number: signal.Signals) -> None:
        self._command(do="signal", name=name, number=int(number))

    def daemons(self) -> dict[str, int]:
        """Names and (inner) pids of the daemons that run now."""
        return dict(self._command(do="status")["pids"])

    def log(self, name: str) -> Path:
        return self.directory / "logs" / f"{name}.log"

    def expose(self, name: str, *, inner_address: str, inner_port: int, host_port: int) -> int:
        """Let the node's pods reach a port of the machine's loopback; returns the port inside."""
        return self._forward(
            name, [str(self.pid), inner_address, str(inner_port), "host", "127.0.0.1", str(host_port)]
        )

    def reach(self, name: str, *, inner_address: str, inner_port: int) -> int:
        """Let the tests reach an address inside; returns the port on the machine's loopback."""
        return self._forward(name, ["host", "127.0.0.1", "0", str(self.pid), inner_address, str(inner_port)])

    @property
    def pid(self) -> int:
        """The first process of the node, as the machine numbers it."""
        return self.state.pids["node"].number

    def _forward(self, name: str, ends: list[str]) -> int:
        ready = self.directory / f"forward-{name}.port"
        argv = [sys.executable, "-I", str(HERE / "port_forward.py"), *ends, str(self.pid), str(ready)]
        forwarder = Process(
            f"forward-{name}", argv, self.log(f"forward-{name}"), outlive_parent=self.outlive_parent
        )
        forwarder.start()
        self._forwarders.append(forwarder)
        self.state.pids[f"forward-{name}"] = Pid.of(forwarder.pid)
        self.state.save()
        forwarder.wait_ready(ready.exists, timeout=20, what=f"port forward {name}")
        return int(ready.read_text())

    def _first_pid(self) -> int:
        assert self._unshare is not None
        parent = self._unshare.pid
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        return int(children[0])

    def _command(self, **command: Any) -> dict[str, Any]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(60)
            connection.connect(str(self.directory / "control"))
            with connection.makefile("rwb") as stream:
                stream.write(json.dumps(command).encode() + b"\n")
                stream.flush()
                reply: dict[str, Any] = json.loads(stream.readline())
        if "error" in reply:
            raise ClusterError(
                f"{command['do']} {command.get('name')}: {reply['error']}\n{self._last_words(command)}"
            )
        return reply

    def _last_words(self, command: Mapping[str, Any]) -> str:
        return log_tail(self.log(str(command["name"]))) if "name" in command else ""


def sweep() -> list[str]:
    """Remove what killed runs have left, a directory and a control group each; not the living."""
    removed = []
    for found in Path(tempfile.gettempdir()).glob(f"{cgroups.PREFIX}*/{STATE_FILE}"):
        state = SandboxState.load(found.parent)
        if state.abandoned:
            state.destroy()
            removed.append(state.directory)
    return removed


def _start_stamp(number: int) -> str | None:
    """When the kernel started this pid (field 22 of its stat); None when there is none or only a zombie."""
    try:
        after_name = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if after_name[0] in ("Z", "X") else after_name[19]
