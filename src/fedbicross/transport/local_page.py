"""A page on this machine only, on which a person looks at a file and says yes or no.

The server listens on the loopback, under an address that nobody can guess, and answers nobody who came by another
name (a page elsewhere could else point its own name here). The page runs no script and fetches nothing. It ends with
the decision.
"""

from __future__ import annotations

import hmac
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from fedbicross.errors import RunError

SECONDS = 15  # that one request may take
MAX_BODY = 1000  # bytes of an answer
ANSWERS = {b"answer=yes": "yes", b"answer=no": "no"}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; form-action 'self'; "
    "frame-ancestors 'none'; base-uri 'none'",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def ask(shown: Mapping[str, Any], port: int, seconds: float, tell: Callable[[str], None]) -> bool:
    """Serve the page, tell its address, and wait for the answer; none in time is a no."""
    server = Server(render(shown), port)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True).start()
    try:
        tell(server.address)
        if server.answered.wait(seconds):
            time.sleep(0.2)  # so that the last page gets out
    finally:
        server.shutdown()
        server.server_close()
    return bool(server.answer)


def render(shown: Mapping[str, Any]) -> Callable[[str], bytes]:
    """The page as a function of what was answered: nothing, yes or no."""
    environment = Environment(
        loader=PackageLoader("fedbicross.transport", "templates"), autoescape=True, undefined=StrictUndefined
    )
    template = environment.get_template("page.html.j2")
    return lambda answer: template.render(shown, answer=answer).encode("utf-8", "replace")


class Server(ThreadingHTTPServer):
    """One page, one decision."""

    daemon_threads = True

    def __init__(self, page: Callable[[str], bytes], port: int = 0) -> None:
        try:
            super().__init__(("127.0.0.1", port), Handler)
        except OSError as error:
            problem = f"cannot listen on 127.0.0.1:{port}: {error.strerror}"
            raise RunError("port", f"{problem}; choose another --port") from None
        self.page = page
        self.secret = secrets.token_urlsafe(24)
        self.answered = threading.Event()
        self.answer: bool | None = None

    @property
    def address(self) -> str:
        """The page's address; who does not know it gets nothing."""
        return f"http://127.0.0.1:{self.server_port}/{self.secret}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that hangs up is no news."""


class Handler(BaseHTTPRequestHandler):
    """GET shows the page, POST decides."""

    server: Server
    timeout = SECONDS
    server_version, sys_version = "fedbicross", ""

    def do_GET(self) -> None:
        """The page."""
        if self._known():
            self._send(200, self.server.page(""))

    def do_POST(self) -> None:
        """``answer=yes`` or ``answer=no``; the first one counts."""
        if not self._known():
            return
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()) or int(length) > MAX_BODY:
            self._send(413, b"")
            return
        answer = ANSWERS.get(self.rfile.read(int(length)))
        if answer is None or self.server.answered.is_set():
            self._send(400, b"")
            return
        self.server.answer = answer == "yes"
        self._send(200, self.server.page(answer))
        self.server.answered.set()

    def _known(self) -> bool:
        """Whether the request is for this page, by its own name."""
        port = self.server.server_port
        named = self.headers.get("Host") in (f"127.0.0.1:{port}", f"localhost:{port}")
        asked = self.path.removeprefix("/").encode("utf-8", "replace")
        if named and hmac.compare_digest(asked, self.server.secret.encode()):
            return True
        self._send(404, b"")
        return False

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the address is a secret."""
