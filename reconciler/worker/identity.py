"""Identity: the name a worker writes into `locked_by`, precise enough to be looked up as a pod.

    k8s://<cluster>/<namespace>/<pod>/<uid>/<container>#<boot_unix_ms>

The uid tells a pod from a later one of the same name, the boot stamp one process of a container from the
next. Both come from outside: the Downward API (see docs/how-to/worker.md for the snippet) and the clock at
process start. HOSTNAME is never taken for a pod's name: it is cut to 63 characters, and with hostNetwork it
is the node's.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Mapping

from reconciler.worker.errors import ArgumentError

BOOT_UNIX_MS = int(time.time() * 1000)
"""Taken once, when the SDK is first imported: a process must not change its name while it holds jobs."""

_DOWNWARD = ("POD_NAMESPACE", "POD_NAME", "POD_UID")
_log = logging.getLogger(__name__)


def worker_identity(env: Mapping[str, str] | None = None, *, boot_unix_ms: int = BOOT_UNIX_MS) -> str:
    """This process's name: the pod's where the Downward API tells it, else the host's."""
    env = os.environ if env is None else env
    given = {key: env.get(key, "").strip() for key in _DOWNWARD}
    if all(given.values()):
        parts = [
            _part(key, env.get(key, "").strip())
            for key in ("CLUSTER_NAME", "POD_NAMESPACE", "POD_NAME", "POD_UID", "CONTAINER_NAME")
        ]
        return f"k8s://{'/'.join(parts)}#{boot_unix_ms}"
    if any(given.values()):
        missing = ", ".join(key for key, value in given.items() if not value)
        _log.warning(
            "identity: %s not set, so this worker cannot be looked up as a pod; "
            "pass metadata.namespace, metadata.name and metadata.uid by the Downward API",
            missing,
        )
    return f"host://{_part('hostname', socket.gethostname())}/{os.getpid()}#{boot_unix_ms}"


def short_id(hostname: str | None = None, pid: int | None = None) -> str:
    """The name in log lines: four characters of the host, four digits of the process, at most eight."""
    host = (socket.gethostname() if hostname is None else hostname)[:4]
    return f"{host}{(os.getpid() if pid is None else pid) % 10_000:04d}"


def _part(key: str, value: str) -> str:
    if any(sign in value for sign in "/#\x00") or any(sign.isspace() for sign in value):
        raise ArgumentError(key, value, "no '/', '#' or white space", "they separate the parts of locked_by")
    return value
