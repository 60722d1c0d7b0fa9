"""The gate lets fleet calls through as they are, and nothing else."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fedbicross.transport.flower import gate
from fedbicross.transport.flower.certificates import make_certificates
from fedbicross.transport.flower.deploy import free_port


def through_the_gate(ask: Callable[[httpx.AsyncClient], Awaitable[None]], superlink: Starlette) -> None:
    async def go() -> None:
        inner = httpx.AsyncClient(transport=httpx.ASGITransport(superlink), base_url="http://superlink")
        outer = httpx.AsyncClient(transport=httpx.ASGITransport(gate.door(inner)), base_url="http://gate")
        async with inner, outer:
            await ask(outer)

    asyncio.run(go())


class Superlink:
    """Notes every call that reaches it."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, bytes, dict[str, str]]] = []
        self.app = Starlette(routes=[Route("/{path:path}", self.answer, methods=["GET", "POST"])])

    async def answer(self, request: Request) -> Response:
        self.seen.append((request.url.path, await request.body(), dict(request.headers)))
        return Response(b"\x00answer", 202, {"x-flower": "yes", "content-type": "application/x-protobuf"})


def test_fleet_calls_pass_unchanged() -> None:
    superlink = Superlink()

    async def ask(client: httpx.AsyncClient) -> None:
        for call in sorted(gate.CALLS):
            answer = await client.post(f"/v1/fleet/{call}", content=b"\x01body", headers={"flwr-signature": "abc"})
            assert (answer.status_code, answer.content) == (202, b"\x00answer")
            assert answer.headers["x-flower"] == "yes"
            assert answer.headers["content-type"] == "application/x-protobuf"

    through_the_gate(ask, superlink.app)
    assert [path for path, _, _ in superlink.seen] == [f"/v1/fleet/{call}" for call in sorted(gate.CALLS)]
    assert all(body == b"\x01body" and headers["flwr-signature"] == "abc" for _, body, headers in superlink.seen)


@pytest.mark.parametrize(
    "path",
    [
        "/v1/control/start-run",
        "/v1/control/register-node",
        "/v1/runtime/pull-task-input",
        "/v1/fleet/register-node",
        "/v1/fleet/unregister-node",
        "/v1/fleet/../control/start-run",
        "/v1/fleet/%2e%2e/control/start-run",
        "/v1/fleet/get-run/../../control/start-run",
        "/v1/fleet/get-run%2f..%2f..%2fcontrol%2fstart-run",
        "//v1/control/start-run",
        "/V1/fleet/get-run",
        "/docs",
        "/openapi.json",
        "/",
    ],
)
def test_nothing_else_passes(path: str) -> None:
    superlink = Superlink()

    async def ask(client: httpx.AsyncClient) -> None:
        raw = httpx.URL(scheme="http", host="gate", raw_path=path.encode())
        assert (await client.post(raw, content=b"body")).status_code in (404, 405)
        assert (await client.get(raw)).status_code in (404, 405)

    through_the_gate(ask, superlink.app)
    assert superlink.seen == []


def test_a_body_over_the_limit_is_refused_before_it_is_passed_on() -> None:
    superlink = Superlink()

    async def ask(client: httpx.AsyncClient) -> None:
        assert (await client.post("/v1/fleet/push-object", content=bytes(gate.MAX_BODY))).status_code == 202
        assert (await client.post("/v1/fleet/push-object", content=bytes(gate.MAX_BODY + 1))).status_code == 413

    through_the_gate(ask, superlink.app)
    assert len(superlink.seen) == 1


def test_a_superlink_that_is_away_is_said_so() -> None:
    async def go() -> None:
        inner = httpx.AsyncClient(base_url=f"http://127.0.0.1:{free_port()}", trust_env=False)
        outer = httpx.AsyncClient(transport=httpx.ASGITransport(gate.door(inner)), base_url="http://gate")
        async with inner, outer:
            assert (await outer.post("/v1/fleet/get-run", content=b"")).status_code == 503
            assert (await outer.get("/health")).status_code == 503

    asyncio.run(go())


def test_health_is_the_superlinks() -> None:
    superlink = Superlink()

    async def ask(client: httpx.AsyncClient) -> None:
        assert (await client.get("/health")).status_code == 202

    through_the_gate(ask, superlink.app)


def test_it_leaves_with_its_parent(tmp_path: Path) -> None:
    """Otherwise the gate of a SuperLink that was killed would hold the port for ever."""
    make_certificates(tmp_path, ["localhost"])
    port = free_port()
    files = {"authority": "ca.crt", "certificate": "server.crt", "key": "server.key"}
    words = [sys.executable, "-m", "fedbicross.transport.flower.gate", "--superlink", "https://127.0.0.1:9"]
    words += [word for name, file in files.items() for word in (f"--{name}", str(tmp_path / file))]
    words += ["--host", "127.0.0.1", "--port", str(port)]
    script = f"import subprocess, time; p = subprocess.Popen({words!r}); print(p.pid, flush=True); time.sleep(400)"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        try:
            wait(lambda: listening(port), "the gate")
            parent.kill()
            wait(lambda: not listening(port), "its end")
        finally:
            parent.kill()
            if listening(port):
                os.kill(child, signal.SIGKILL)


def listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def wait(done: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 200
    while not done():
        assert time.monotonic() < end, what
        time.sleep(0.05)
