"""The page on which a person decides: what it answers, to whom, and how it looks in a real browser."""

from __future__ import annotations

import http.client
import json
import os
import select
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from fedbicross.errors import RunError
from fedbicross.transport.local_page import MAX_BODY, Server, render

SHOWN: dict[str, Any] = {
    "name": "north.safetensors",
    "title": "May this file leave?",
    "about": "It is the one file that leaves this site.",
    "yes": "Yes, it may leave",
    "checked": "ok",
    "state": "good",
    "rows": [("kind", "upload"), ("from", "<script>document.title='stolen'</script>")],
    "tensors": [("head.weight", "3 × 64", "768", "-0.1, 0.1, 0.001")],
}


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server(render(SHOWN))
    threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()


def request(
    server: Server, method: str, path: str, body: str | None = None, **headers: str
) -> tuple[int, str, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    try:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), dict(answer.getheaders())
    finally:
        connection.close()


def test_it_listens_on_this_machine_only(server: Server) -> None:
    assert server.server_address[0] == "127.0.0.1"
    with pytest.raises(RunError, match=f"cannot listen on 127.0.0.1:{server.server_port}"):
        Server(render(SHOWN), server.server_port)


def test_the_page_shows_everything_as_text(server: Server) -> None:
    status, page, headers = request(server, "GET", f"/{server.secret}")
    assert status == 200 and "head.weight" in page and "Yes, it may leave" in page
    assert "&lt;script&gt;" in page and "<script" not in page, "a stranger's words are no markup"
    assert headers["Content-Security-Policy"].startswith("default-src 'none'")
    assert headers["Cache-Control"] == "no-store" and "Python" not in headers["Server"]


def test_strangers_get_nothing(server: Server) -> None:
    good = f"/{server.secret}"
    for path, host in (("/", None), ("/guess", None), (f"{good}x", None), (good, "evil.example"), (good, "")):
        headers = {} if host is None else {"Host": host}
        for method, body in (("GET", None), ("POST", "answer=yes")):
            status, page, _ = request(server, method, path, body, **headers)
            assert (status, page) == (404, ""), (path, host, method)
    assert not server.answered.is_set()


ODD = ["", "yes", "answer=", "answer=maybe", "answer=yes&answer=no", "answer=yes\xff", "x" * (MAX_BODY + 1)]


@pytest.mark.parametrize("body", ODD, ids=range(len(ODD)))
def test_only_yes_and_no_are_answers(server: Server, body: str) -> None:
    status, _, _ = request(server, "POST", f"/{server.secret}", body.encode("latin-1"))
    assert status == (413 if len(body) > MAX_BODY else 400) and server.answer is None


@pytest.mark.parametrize("length", ["", "-1", "x", "1" * 30])
def test_a_length_that_is_none(server: Server, length: str) -> None:
    assert request(server, "POST", f"/{server.secret}", None, **{"Content-Length": length})[0] == 413


@pytest.mark.parametrize(("answer", "allowed"), [("yes", True), ("no", False)])
def test_the_first_answer_counts(server: Server, answer: str, allowed: bool) -> None:
    status, page, _ = request(server, "POST", f"/{server.secret}", f"answer={answer}")
    assert status == 200 and f"You answered: {answer}" in page and "<form" not in page
    assert server.answered.wait(10) and server.answer is allowed
    other = "no" if allowed else "yes"
    assert request(server, "POST", f"/{server.secret}", f"answer={other}")[0] == 400 and server.answer is allowed


def test_a_silent_caller_keeps_nobody_waiting(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=20) as silent:
        silent.sendall(b"GET / HTTP/1.1\r\n")
        assert request(server, "GET", f"/{server.secret}")[0] == 200


# --- in a real browser ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chromium() -> str:
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("no Chromium")
    return found


class Browser:
    """Chromium without a window, led over a pipe in its own protocol."""

    FLAGS = (
        "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
        "--disable-background-networking", "--disable-component-update", "--remote-debugging-pipe",
    )  # fmt: skip

    def __init__(self, program: str, profile: str) -> None:
        (its_end, self.orders), (self.answers, other_end) = os.pipe(), os.pipe()

        def as_chromium_wants_them() -> None:
            ends = os.dup(its_end), os.dup(other_end)
            os.dup2(ends[0], 3)
            os.dup2(ends[1], 4)

        words = [program, *self.FLAGS, f"--user-data-dir={profile}", "about:blank"]
        quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(words, preexec_fn=as_chromium_wants_them, pass_fds=(3, 4), **quiet)
        os.close(its_end)
        os.close(other_end)
        self.buffer, self.number, self.session = b"", 0, ""

    def ask(self, method: str, **given: Any) -> dict[str, Any]:
        """Send one order and wait for its answer; what else the browser says is passed over."""
        self.number += 1
        order: dict[str, Any] = {"id": self.number, "method": method, "params": given}
        order |= {"sessionId": self.session} if self.session else {}
        os.write(self.orders, json.dumps(order).encode() + b"\0")
        while True:
            while b"\0" not in self.buffer:
                ready, _, _ = select.select([self.answers], [], [], 60)
                assert ready, f"no answer to {method}"
                piece = os.read(self.answers, 1 << 20)
                assert piece, "the browser is gone"
                self.buffer += piece
            line, _, self.buffer = self.buffer.partition(b"\0")
            found = json.loads(line)
            if found.get("id") == self.number:
                assert "error" not in found, found
                return dict(found["result"])

    def open(self, address: str) -> None:
        """Go to a page and wait until it is there."""
        target = self.ask("Target.createTarget", url=address)["targetId"]
        self.session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.until("document.readyState == 'complete' && location.href != 'about:blank'")

    def value(self, expression: str) -> Any:
        """Of an expression on the page."""
        return self.ask("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def until(self, expression: str) -> None:
        """Wait until it holds."""
        for _ in range(300):
            if self.value(expression) is True:
                return
            time.sleep(0.1)
        pytest.fail(f"never: {expression}")

    def close(self) -> None:
        """End it."""
        self.process.terminate()
        self.process.wait(30)
        os.close(self.orders)
        os.close(self.answers)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("button", "allowed"), [("yes", True), ("no", False)])
def test_a_person_decides_in_a_real_browser(server: Server, chromium: str, button: str, allowed: bool) -> None:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = Browser(chromium, profile)
        try:
            browser.open(server.address)
            assert browser.value("document.title") == "May this file leave?", "no script of a stranger ran"
            assert browser.value("document.querySelectorAll('#words tr').length") == len(SHOWN["rows"])
            for width in (1280, 390):
                size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
                browser.ask("Emulation.setDeviceMetricsOverride", **size)
                assert browser.value("document.documentElement.scrollWidth <= innerWidth"), f"clipped at {width} px"
            browser.value(f"document.getElementById('{button}').click()")
            assert server.answered.wait(30) and server.answer is allowed
            browser.until("document.getElementById('answer') !== null")
            assert f"You answered: {button}" in browser.value("document.getElementById('answer').textContent")
        finally:
            browser.close()
