"""A server of one file on this machine, for downloads that go wrong."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest


class Server(ThreadingHTTPServer):
    """Serves one body; ``mode`` chooses how badly it behaves."""

    def __init__(self, body: bytes) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.body, self.mode = body, "good"
        self.ranges: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/file.npz"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        server, body = self.server, self.server.body
        asked = self.headers.get("Range")
        server.ranges.append(asked)
        if server.mode == "404":
            self.send_error(404)
            return
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked and server.mode != "no_range" else 0
        if start >= len(body):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(body)}")
            self.end_headers()
            return
        self.send_response(206 if start else 200)
        if start:
            said = 0 if server.mode == "wrong_range" else start
            self.send_header("Content-Range", f"bytes {said}-{len(body) - 1}/{len(body)}")
        if server.mode != "no_length":
            self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        self.wfile.write(body[start : len(body) // 2] if server.mode == "cut" else body[start:])


@contextmanager
def serving(body: bytes) -> Iterator[Server]:
    """The server, while it runs; no proxy stands between."""
    with pytest.MonkeyPatch.context() as patch, Server(body) as running:
        patch.setenv("no_proxy", "*")
        threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield running
        running.shutdown()
