"""A small client for tests: JSON in, JSON out, and the status code when it is not 2xx.

Not the product's client on purpose: a test that sets up its facts through the code under test proves little.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import urllib3

Json = dict[str, Any]
MERGE_PATCH = "application/merge-patch+json"


class KubeApiError(Exception):
    """The API server answered, and it was not 2xx."""

    def __init__(self, method: str, path: str, status: int, body: bytes) -> None:
        super().__init__(f"{method} {path} -> {status}: {body[:500].decode(errors='replace')}")
        self.status = status
        self.body = body


@dataclass(frozen=True)
class Endpoint:
    """How to reach an API server and as whom: a client certificate or a bearer token."""

    server: str
    ca: Path
    client_cert: Path | None = None
    client_key: Path | None = None
    token: str | None = None


class KubeApi:
    """Plain calls to one API server as one identity."""

    def __init__(self, endpoint: Endpoint, *, timeout: float = 30.0) -> None:
        self.endpoint = endpoint
        context = ssl.create_default_context(cafile=str(endpoint.ca))
        if endpoint.client_cert is not None:
            context.load_cert_chain(endpoint.client_cert, endpoint.client_key)
        self._pool = urllib3.PoolManager(ssl_context=context, timeout=timeout, retries=False, maxsize=8)

    def close(self) -> None:
        """Close the pooled connections; an open socket at exit is a warning, and warnings are errors here."""
        self._pool.clear()

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        query: Mapping[str, str] | None = None,
        content_type: str = "application/json",
    ) -> Json:
        """One call; raises KubeApiError unless the answer is 2xx."""
        response = self._send(method, path, body, query=query, content_type=content_type, preload=True)
        return json.loads(response.data) if response.data else {}

    def get(self, path: str, **query: str) -> Json:
        return self.call("GET", path, query=query)

    def create(self, path: str, body: Json) -> Json:
        return self.call("POST", path, body)

    def delete(self, path: str, body: Any = None) -> Json:
        return self.call("DELETE", path, body)

    def merge(self, path: str, body: Any) -> Json:
        """JSON merge patch: lists are replaced as a whole, None removes a field."""
        return self.call("PATCH", path, body, content_type=MERGE_PATCH)

    def text(self, path: str, **query: str) -> str:
        """An answer that is not JSON: logs, /readyz, /metrics."""
        response = self._send("GET", path, None, query=query, content_type="application/json", preload=True)
        return str(response.data.decode())

    def exists(self, path: str) -> bool:
        """True or false for 200 or 404; every other answer is an error, never an absence."""
        try:
            self.get(path)
        except KubeApiError as error:
            if error.status == 404:
                return False
            raise
        return True

    def watch(self, path: str, *, seconds: int, **query: str) -> Iterator[Json]:
        """The events of a watch that the server itself ends after so many seconds."""
        asked = {**query, "watch": "true", "timeoutSeconds": str(seconds)}
        response = self._send("GET", path, None, query=asked, content_type="application/json", preload=False)
        buffer = b""
        try:
            for piece in response.stream(65536):
                buffer += piece
                *lines, buffer = buffer.split(b"\n")
                yield from (json.loads(line) for line in lines if line)
        finally:
            response.close()

    def _send(
        self,
        method: str,
        path: str,
        body: Any,
        *,
        query: Mapping[str, str] | None,
        content_type: str,
        preload: bool,
    ) -> urllib3.BaseHTTPResponse:
        headers = {"Accept": "application/json"}
        if body is not None:
            headers["Content-Type"] = content_type
        if self.endpoint.token is not None:
            headers["Authorization"] = f"Bearer {self.endpoint.token}"
        url = self.endpoint.server + path + (f"?{urlencode(query)}" if query else "")
        encoded = None if body is None else json.dumps(body).encode()
        response = self._pool.request(method, url, body=encoded, headers=headers, preload_content=preload)
        if not 200 <= response.status < 300:
            raise KubeApiError(method, path, response.status, response.data)
        return response
