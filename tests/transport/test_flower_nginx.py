"""The nginx configuration of the examples, run by a real nginx before a stand-in for the gate."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fedbicross.transport.flower import gate
from fedbicross.transport.flower.certificates import make_certificates
from fedbicross.transport.flower.deploy import free_port
from transport.test_flower_gate import listening

CONFIG = Path(__file__).parents[2] / "examples" / "flower" / "nginx.conf"
NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")

pytestmark = [pytest.mark.slow, pytest.mark.skipif(NGINX is None, reason="nginx is not installed")]


def test_the_calls_are_those_of_the_gate() -> None:
    routes = CONFIG.read_text().split("^/v1/fleet/(")[1].split(")")[0]
    assert set(routes.split("|")) == gate.CALLS


class Door:
    """nginx on ``port``, and what came through it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port, self.inner = folder, free_port(), free_port()
        self.seen: list[tuple[str, int, dict[str, str]]] = []
        make_certificates(folder / "certificates", ["localhost"])
        (folder / "nginx-temp").mkdir()
        own = "user root;\n" if os.geteuid() == 0 else ""  # else nginx's workers become nobody, who may not write here
        text = own + CONFIG.read_text().replace("listen 8000", f"listen 127.0.0.1:{self.port}")
        (folder / "nginx.conf").write_text(
            text.replace("127.0.0.1:8001", f"127.0.0.1:{self.inner}").replace("body_timeout 30s", "body_timeout 1s")
        )
        self.trust = ssl.create_default_context(cafile=str(folder / "certificates/ca.crt"))
        self.client = httpx.Client(
            base_url=f"https://localhost:{self.port}", verify=self.trust, trust_env=False, timeout=60
        )

    async def answer(self, request: Request) -> Response:
        self.seen.append((str(request.url.path), len(await request.body()), dict(request.headers)))
        return Response(b"\x00answer", 202, {"content-type": "application/x-protobuf"})

    def gate(self) -> uvicorn.Server:
        app = Starlette(routes=[Route("/{path:path}", self.answer, methods=["GET", "POST"])])
        files = {"ssl_certfile": "server.crt", "ssl_keyfile": "server.key"}
        given = {name: str(self.folder / "certificates" / file) for name, file in files.items()}
        return uvicorn.Server(uvicorn.Config(app, port=self.inner, log_level="error", **given))

    @contextlib.contextmanager
    def nginx(self) -> Iterator[None]:
        assert NGINX is not None
        process = subprocess.Popen([NGINX, "-p", str(self.folder), "-c", "nginx.conf"])
        try:
            end = time.monotonic() + 60
            while not listening(self.port):
                assert process.poll() is None and time.monotonic() < end, "nginx did not start"
                time.sleep(0.05)
            yield
        finally:
            process.terminate()
            process.wait(60)


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    made = Door(tmp_path_factory.mktemp("nginx"))
    behind = made.gate()
    serving = threading.Thread(target=lambda: asyncio.run(behind.serve()))
    serving.start()
    try:
        with made.nginx():
            end = time.monotonic() + 60
            while not behind.started:
                assert time.monotonic() < end, "the gate did not start"
                time.sleep(0.05)
            yield made
    finally:
        behind.should_exit = True
        serving.join(60)


def test_a_gate_that_is_away_is_said_so(tmp_path: Path) -> None:
    alone = Door(tmp_path)
    with alone.nginx():
        assert alone.client.post("/v1/fleet/get-run", content=b"").status_code == 503
        assert alone.client.get("/health").status_code == 503


def test_calls_pass_with_their_signature(door: Door) -> None:
    before = len(door.seen)
    for call in sorted(gate.CALLS):
        answer = door.client.post(f"/v1/fleet/{call}?more=1", content=b"\x01body", headers={"flwr-signature": "abc"})
        assert (answer.status_code, answer.content) == (202, b"\x00answer")
        assert answer.headers["content-type"] == "application/x-protobuf" and "." not in answer.headers["server"]
    assert door.client.get("/health").status_code == 202
    came = door.seen[before:]
    assert [path for path, _, _ in came] == [*(f"/v1/fleet/{call}" for call in sorted(gate.CALLS)), "/health"]
    assert all(headers["flwr-signature"] == "abc" and size == 5 for _, size, headers in came[:-1])


@pytest.mark.parametrize(
    "path",
    [
        "/v1/control/start-run",
        "/v1/fleet/register-node",
        "/v1/fleet/../control/start-run",
        "/v1/fleet/%2e%2e/control/start-run",
        "/v1/fleet/get-run/../../control/start-run",
        "/v1/fleet/get-run%2f..%2f..%2fcontrol%2fstart-run",
        "/v1/fleet/get-run%0a",
        "/V1/fleet/get-run",
        "/v1/fleet/get-run/",
        "/",
    ],
)
def test_nothing_else_passes(door: Door, path: str) -> None:
    before = len(door.seen)
    raw = httpx.URL(scheme="https", host="localhost", port=door.port, raw_path=path.encode())
    assert door.client.post(raw, content=b"body").status_code == 404
    assert door.client.get(raw).status_code == 404
    assert door.client.get("/v1/fleet/get-run").status_code == 405
    assert len(door.seen) == before


def test_bodies_have_a_limit_with_a_length_and_without(door: Door) -> None:
    assert door.client.post("/v1/fleet/push-object", content=bytes(gate.Limits().body_bytes)).status_code == 202
    before = len(door.seen)
    assert door.client.post("/v1/fleet/push-object", content=bytes(gate.Limits().body_bytes + 1)).status_code == 413
    pieces = (bytes(1 << 20) for _ in range(17))  # in chunks, so that no header says how many
    with contextlib.suppress(httpx.WriteError):  # hung up on in the middle
        assert door.client.post("/v1/fleet/push-object", content=pieces).status_code == 413
    assert len(door.seen) == before
    assert not [file for file in (door.folder / "nginx-temp").rglob("*") if file.is_file()]


def test_who_sends_slowly_is_hung_up_on_and_never_reaches_the_gate(door: Door) -> None:
    before = len(door.seen)
    plain = socket.create_connection(("127.0.0.1", door.port), timeout=60)
    with door.trust.wrap_socket(plain, server_hostname="localhost") as line:
        line.sendall(b"POST /v1/fleet/push-object HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\nhalf")
        said = line.recv(1000)
    assert said == b"" or b" 408 " in said
    assert len(door.seen) == before


def test_only_tls(door: Door) -> None:
    answer = httpx.get(f"http://localhost:{door.port}/health", trust_env=False)
    assert answer.status_code == 400
