"""A proxy before the API server that answers as bad networks do: late, wrong, half, or not at all.

It ends TLS with a certificate of the cluster's own authority and speaks HTTP/1.1, one request per
connection. Bearer tokens pass through it, client certificates cannot: use it with a ServiceAccount's token,
as the product does.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import re
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

from tests.cluster.certificates import Authority
from tests.cluster.kube_api import Endpoint

HEAD_END = b"\r\n\r\n"
PIECE = 65536
LIBC = ctypes.CDLL(None, use_errno=True)
REASONS = {401: "Unauthorized", 403: "Forbidden", 410: "Expired", 429: "TooManyRequests", 504: "Timeout"}


@dataclass(frozen=True)
class Fault:
    """What to do to the requests it matches; several effects may be combined, `delay` comes first.

    match: regular expression searched in "METHOD /path?query".
    times: how many requests it hits before it is used up; None is until clear().
    delay: seconds to wait before going on.
    status: answer with this code and a Kubernetes Status body; retry_after adds the header.
    watch_error: answer 200 and one ERROR event with this code, as the server does in the middle of a watch.
    cut_after: let so many bytes of the answer's body pass, then reset the connection.
    reset: reset the connection before any answer.
    hang: never answer, until clear().
    """

    match: str = ""
    times: int | None = None
    delay: float = 0.0
    status: int | None = None
    retry_after: int | None = None
    watch_error: int | None = None
    cut_after: int | None = None
    reset: bool = False
    hang: bool = False


class FaultProxy:
    """Listens on loopback in front of one API server. Without faults it is only a little slower."""

    def __init__(self, upstream: Endpoint, authority: Authority) -> None:
        self._upstream = upstream
        target = urlsplit(upstream.server)
        assert target.hostname is not None
        self._address = (target.hostname, target.port or 443)
        pair = authority.issue("fault-proxy", "fault-proxy", hosts=("127.0.0.1", "localhost"))
        self._serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._serving.load_cert_chain(pair.cert, pair.key)
        self._asking = ssl.create_default_context(cafile=str(upstream.ca))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._guard = threading.Lock()
        self._faults: list[Fault] = []
        self._requests: list[str] = []
        self._open: set[socket.socket] = set()
        self._lifted = threading.Event()
        self._threads: list[threading.Thread] = []
        self._closed = False
        self._accepted = 0
        self._acceptor = threading.Thread(target=self._accept, name="fault-proxy", daemon=True)

    def __enter__(self) -> Self:
        self._acceptor.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def server(self) -> str:
        """The URL to use instead of the API server's."""
        return f"https://127.0.0.1:{self._listener.getsockname()[1]}"

    def endpoint(self, token: str) -> Endpoint:
        """The way through the proxy as the owner of a token."""
        return Endpoint(self.server, self._upstream.ca, token=token)

    def inject(self, fault: Fault) -> None:
        """Add a fault; the first that matches a request is taken."""
        with self._guard:
            self._faults.append(fault)

    def clear(self) -> None:
        """Lift all faults; what hangs is reset."""
        with self._guard:
            self._faults.clear()
            lifted, self._lifted = self._lifted, threading.Event()
        lifted.set()

    def requests(self, match: str = "") -> list[str]:
        """The requests seen so far ("METHOD /path?query"), for tests that count calls."""
        with self._guard:
            return [line for line in self._requests if re.search(match, line)]

    @property
    def served(self) -> int:
        """How many connections were accepted so far."""
        return self._accepted

    @property
    def busy(self) -> bool:
        """Is any connection being served now?"""
        return any(thread.is_alive() for thread in self._threads)

    def sever(self) -> None:
        """Reset every connection that is open now, watches included."""
        # Under the guard, because a descriptor closed meanwhile may by then be another's.
        with self._guard:
            for victim in self._open:
                _reset(victim)

    def close(self) -> None:
        """End it, and every connection with it."""
        self._closed = True
        self.clear()
        with contextlib.suppress(OSError):
            # Wakes accept(); close() alone would not.
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._acceptor.join(10)
        self.sever()
        for thread in self._threads:
            thread.join(10)

    def _accept(self) -> None:
        while not self._closed:
            try:
                raw, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(
                target=self._serve, args=(raw,), name="fault-proxy-connection", daemon=True
            )
            self._threads = [known for known in self._threads if known.is_alive()] + [thread]
            thread.start()
            self._accepted += 1

    def _serve(self, raw: socket.socket) -> None:
        raw.settimeout(120)
        # A small piece that waits for an acknowledgement would be lost in the reset that follows it.
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A peer that goes away is the ordinary end of a connection here, not a failure of the proxy.
        with (
            contextlib.suppress(OSError),
            self._tracked(raw),
            self._serving.wrap_socket(raw, server_side=True) as client,
        ):
            request = _read_request(client)
            if request is None:
                return
            line = b" ".join(request.split(b"\r\n", 1)[0].split(b" ")[:2]).decode()
            fault, lifted = self._choose(line)
            lifted.wait(fault.delay)
            if fault.hang:
                lifted.wait()
            if fault.reset or fault.hang:
                _reset(client)
            elif fault.status is not None:
                client.sendall(_status_answer(fault.status, fault.retry_after))
            elif fault.watch_error is not None:
                client.sendall(_watch_answer(fault.watch_error))
            else:
                self._relay(client, request, fault.cut_after)

    def _choose(self, line: str) -> tuple[Fault, threading.Event]:
        with self._guard:
            self._requests.append(line)
            for index, fault in enumerate(self._faults):
                if re.search(fault.match, line):
                    if fault.times is not None:
                        left = fault.times - 1
                        self._faults[index : index + 1] = [replace(fault, times=left)] if left else []
                    return fault, self._lifted
            return Fault(), self._lifted

    def _relay(self, client: ssl.SSLSocket, request: bytes, cut_after: int | None) -> None:
        host = self._address[0]
        with (
            socket.create_connection(self._address, timeout=10) as raw,
            self._tracked(raw),
            self._asking.wrap_socket(raw, server_hostname=host) as server,
        ):
            server.settimeout(120)
            server.sendall(request)
            head = True
            buffered = b""
            passed = 0
            while piece := server.recv(PIECE):
                if head:
                    buffered += piece
                    if HEAD_END not in buffered:
                        continue
                    head = False
                    start, _, piece = buffered.partition(HEAD_END)
                    client.sendall(start + HEAD_END)
                if cut_after is not None and passed + len(piece) >= cut_after:
                    client.sendall(piece[: cut_after - passed])
                    _reset(client)
                    return
                client.sendall(piece)
                passed += len(piece)

    @contextlib.contextmanager
    def _tracked(self, connection: socket.socket) -> Iterator[None]:
        # wrap_socket() detaches what it is given, so the tracked duplicate is what sever() can still reset.
        duplicate = connection.dup()
        with self._guard:
            self._open.add(duplicate)
        try:
            yield
        finally:
            with self._guard:
                self._open.discard(duplicate)
            duplicate.close()


def _read_request(client: ssl.SSLSocket) -> bytes | None:
    """A whole request, with `Connection: close` in place of whatever it said."""
    data = b""
    while HEAD_END not in data:
        piece = client.recv(PIECE)
        if not piece:
            return None
        data += piece
    head, _, body = data.partition(HEAD_END)
    lines = head.split(b"\r\n")
    lengths = [line.split(b":", 1)[1] for line in lines if line.lower().startswith(b"content-length:")]
    while lengths and len(body) < int(lengths[0]):
        piece = client.recv(PIECE)
        if not piece:
            return None
        body += piece
    kept = [line for line in lines if not line.lower().startswith((b"connection:", b"accept-encoding:"))]
    return b"\r\n".join([*kept, b"Connection: close"]) + HEAD_END + body


def _status(code: int) -> dict[str, object]:
    reason = REASONS.get(code, "InternalError")
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": f"injected by the fault proxy: {code}",
        "reason": reason,
        "code": code,
    }


def _status_answer(code: int, retry_after: int | None) -> bytes:
    body = json.dumps(_status(code)).encode()
    extra = "" if retry_after is None else f"Retry-After: {retry_after}\r\n"
    return _head(code, extra + f"Content-Length: {len(body)}\r\n") + body


def _watch_answer(code: int) -> bytes:
    return _head(200, "") + json.dumps({"type": "ERROR", "object": _status(code)}).encode() + b"\n"


def _head(code: int, extra: str) -> bytes:
    date = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime())
    lines = f"HTTP/1.1 {code} Injected\r\nContent-Type: application/json\r\nDate: {date}\r\n"
    head = f"{lines}{extra}Connection: close\r\n\r\n"
    return head.encode()


def _reset(connection: socket.socket) -> None:
    """End a connection with RST, as a dying host or a firewall does; FIN would look like a proper end.

    Closing with SO_LINGER 0 would do it only for the last descriptor, and another thread may be blocked in
    recv() on its own. To connect to no address (AF_UNSPEC) resets the connection and wakes that thread.
    """
    nowhere = struct.pack("=H14x", socket.AF_UNSPEC)
    if LIBC.connect(connection.fileno(), nowhere, len(nowhere)) != 0:
        number = ctypes.get_errno()
        # Ended by its peer, or closed by its own thread meanwhile: there is nothing left to reset.
        if number not in (errno.ENOTCONN, errno.ECONNRESET, errno.EBADF):
            raise OSError(number, f"reset: {os.strerror(number)}")
