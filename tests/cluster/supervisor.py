"""The first process of a node: starts its daemons, reaps its orphans, takes everything with it at its end.

Runs as pid 1 of a pid namespace that `unshare` made, so the kernel itself ends every process of the node,
containers and their shims included, when this one ends. It also lays the mounts that make the node private:
its own /run, /var/lib, /var/log and /etc/hosts, and read-only stand-ins for the kernel settings that a
kubelet would otherwise change for the whole machine.

Standard library only, one thread: it is started with `python -I` and must not depend on the tests'
environment. Commands come as one JSON object per connection on a unix socket: start, stop, signal, status.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

# What kubelet insists on (it writes these machine-wide settings when they differ). It reads them back from
# these stand-ins, finds them as it wants them, and leaves the machine's own alone.
KERNEL_SETTINGS = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}
ASKER_SECONDS = 5.0


class Supervisor:
    """The daemons of one node, by name."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.pids: dict[str, int] = {}
        self.exits: dict[str, int] = {}
        self.ending = False

    def prepare(self) -> None:
        """Lay the private mounts; nothing of this is visible outside our mount namespace."""
        # Below a shared root, as kubelet wants it for volumes; `unshare` has cut it off from the machine's
        # mounts.
        _mount("--make-rshared", "/")
        _mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", "/run")
        for name in ("lib", "log"):
            _mount("--bind", str(self.directory / f"var-{name}"), f"/var/{name}")
        _mount("--bind", str(self.directory / "hosts"), "/etc/hosts")
        for name, value in KERNEL_SETTINGS.items():
            real = Path("/proc/sys") / name
            if real.exists():
                stand_in = self.directory / "sysctl" / name.replace("/", "-")
                stand_in.write_text(f"{value}\n")
                _mount("--bind", str(stand_in), str(real))

    def serve(self) -> None:
        """Answer commands until SIGTERM; then end, and the namespace with us."""
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "ending", True))
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(self.directory / "control.part"))
        listener.listen()
        # Renamed when it listens: whoever sees the name can connect.
        (self.directory / "control.part").rename(self.directory / "control")
        with selectors.DefaultSelector() as ready:
            ready.register(listener, selectors.EVENT_READ)
            ready.register(wake_read, selectors.EVENT_READ)
            while not self.ending:
                for key, _ in ready.select():
                    if key.fileobj is listener:
                        self.answer(listener)
                    else:
                        with contextlib.suppress(BlockingIOError):
                            os.read(wake_read, 4096)
                self.reap()

    def answer(self, listener: socket.socket) -> None:
        """One command, one answer; a bad command is answered with its error and harms nobody."""
        connection, _ = listener.accept()
        # Whoever connects and says nothing must not hold up the node.
        connection.settimeout(ASKER_SECONDS)
        with connection, connection.makefile("rwb") as stream:
            try:
                reply = self.obey(json.loads(stream.readline()))
            except Exception as error:  # noqa: BLE001 - the asker gets it; pid 1 must live on
                reply = {"error": f"{type(error).__name__}: {error}"}
            with contextlib.suppress(BrokenPipeError, TimeoutError):
                stream.write(json.dumps(reply).encode() + b"\n")

    def obey(self, command: dict[str, Any]) -> dict[str, Any]:
        verb = command["do"]
        if verb == "status":
            return {"pids": self.pids, "exits": self.exits}
        name = str(command["name"])
        if verb == "start":
            return {"pid": self.start(name, command["argv"], command["log"], command["env"])}
        if verb == "signal":
            os.kill(self.pids[name], int(command["number"]))
            return {}
        if verb == "stop":
            self.stop(name, grace=float(command["grace"]))
            return {}
        raise ValueError(f"unknown command {verb}")

    def start(self, name: str, argv: list[str], log: str, env: dict[str, str]) -> int:
        if name in self.pids:
            raise ValueError(f"{name} already runs as {self.pids[name]}")
        self.exits.pop(name, None)
        with open(log, "ab") as output:
            child = os.fork()
            if child == 0:
                try:
                    os.setsid()
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    signal.signal(signal.SIGTERM, signal.SIG_DFL)
                    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                    os.dup2(output.fileno(), 1)
                    os.dup2(output.fileno(), 2)
                    os.execvpe(argv[0], argv, env)
                except OSError as error:
                    os.write(2, f"cannot start {argv[0]}: {error}\n".encode())
                finally:
                    os._exit(127)
        self.pids[name] = child
        return child

    def stop(self, name: str, *, grace: float) -> None:
        """Ask it to end, make it after the grace; returns when it is gone."""
        pid = self.pids.get(name)
        if pid is None:
            return
        os.kill(pid, signal.SIGCONT)
        os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + grace
        while name in self.pids:
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
                deadline = float("inf")
            time.sleep(0.02)
            self.reap()

    def reap(self) -> None:
        """Collect whatever has ended: our daemons, and the orphans that pid 1 inherits."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for name, known in list(self.pids.items()):
                if known == pid:
                    del self.pids[name]
                    self.exits[name] = os.waitstatus_to_exitcode(status)


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


def main() -> None:
    supervisor = Supervisor(Path(sys.argv[1]))
    supervisor.prepare()
    supervisor.serve()


if __name__ == "__main__":
    main()
