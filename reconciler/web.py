"""/metrics and /healthz for `run`: the standard library's server, a thread per scrape, nothing else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from reconciler.errors import UsageError


class WebServer:
    """Serves until closed; port 0 takes a free one (see `.port`)."""

    def __init__(self, port: int, registry: CollectorRegistry, healthy: Callable[[], bool]) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path = self.path.split("?", 1)[0]
                if path == "/metrics":
                    self._answer(200, CONTENT_TYPE_LATEST, generate_latest(registry))
                elif path == "/healthz":
                    ok = healthy()
                    text = b"ok\n" if ok else b"no pass finished for three intervals\n"
                    self._answer(200 if ok else 503, "text/plain; charset=utf-8", text)
                else:
                    self._answer(404, "text/plain; charset=utf-8", b"try /metrics or /healthz\n")

            def _answer(self, status: int, kind: str, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the library's name
                """A probe every few seconds is not news."""

        try:
            self._server = ThreadingHTTPServer(("", port), Handler)
        except OSError as error:
            raise UsageError(
                f"cannot listen on port {port} ({error.strerror}); set REAPER_METRICS_PORT to a free port"
            ) from error
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="web", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
