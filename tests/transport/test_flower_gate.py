"""The gate lets fleet calls through as they are, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import uvicorn
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import PushObjectRequest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from uvicorn.server import ServerState

from fedbicross.transport.flower import deploy, gate
from fedbicross.transport.flower.certificates import make_certificates
from fedbicross.transport.flower.deploy import free_port

LIMITS = gate.Limits()
BODY = b"\x78\x01"  # a field that no call of Flower's knows: every one of them can read it


def through_the_gate(
    ask: Callable[[httpx.AsyncClient], Awaitable[None]],
    superlink: Starlette,
    limits: gate.Limits | None = None,
    said: list[str] | None = None,
) -> None:
    async def go() -> None:
        inner = httpx.AsyncClient(transport=httpx.ASGITransport(superlink), base_url="http://superlink")
        door = gate.door(inner, limits, ([] if said is None else said).append)
        outer = httpx.AsyncClient(transport=httpx.ASGITransport(door), base_url="http://gate")
        async with inner, outer:
            await ask(outer)

    asyncio.run(go())


class Superlink:
    """Notes every call that reaches it."""

    def __init__(self, status: int = 202) -> None:
        self.seen: list[tuple[str, bytes, dict[str, str]]] = []
        self.status = status
        self.app = Starlette(routes=[Route("/{path:path}", self.answer, methods=["GET", "POST"])])

    async def answer(self, request: Request) -> Response:
        self.seen.append((request.url.path, await request.body(), dict(request.headers)))
        return Response(b"\x00answer", self.status, {"x-flower": "yes", "content-type": "application/x-protobuf"})


def test_fleet_calls_pass_unchanged() -> None:
    superlink = Superlink()

    async def ask(client: httpx.AsyncClient) -> None:
        for call in sorted(gate.CALLS):
            answer = await client.post(f"/v1/fleet/{call}", content=BODY, headers={"flwr-signature": "abc"})
            assert (answer.status_code, answer.content) == (202, b"\x00answer")
            assert answer.headers["x-flower"] == "yes"
            assert answer.headers["content-type"] == "application/x-protobuf"

    through_the_gate(ask, superlink.app)
    assert [path for path, _, _ in superlink.seen] == [f"/v1/fleet/{call}" for call in sorted(gate.CALLS)]
    assert all(body == BODY and headers["flwr-signature"] == "abc" for _, body, headers in superlink.seen)


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
        assert (await client.post("/v1/fleet/pull-object", content=bytes(LIMITS.body_bytes))).status_code == 202
        assert (await client.post("/v1/fleet/pull-object", content=bytes(LIMITS.body_bytes + 1))).status_code == 413

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


# --- who brings too much ----------------------------------------------------------------------------------------


def piece(run: int, size: int) -> bytes:
    return PushObjectRequest(run_id=run, object_content=bytes(size)).SerializeToString()


def test_a_node_brings_no_more_than_its_quota_in_a_run() -> None:
    superlink, said = Superlink(), list[str]()
    limits = gate.Limits(node_bytes=2500)

    async def ask(client: httpx.AsyncClient) -> None:
        async def push(node: str, run: int, size: int = 1000) -> int:
            headers = {"flwr-public-key": node}
            return (await client.post("/v1/fleet/push-object", content=piece(run, size), headers=headers)).status_code

        assert [await push("greedy", 1) for _ in range(4)] == [202, 202, 413, 413]
        assert [await push("modest", 1) for _ in range(2)] == [202, 202]
        assert await push("greedy", 2) == 202  # the next run is another one
        other = await client.post("/v1/fleet/pull-messages", content=b"", headers={"flwr-public-key": "greedy"})
        assert other.status_code == 202  # it may still fetch what is for it

    through_the_gate(ask, superlink.app, limits, said)
    assert sum(path == "/v1/fleet/push-object" for path, _, _ in superlink.seen) == 5
    assert len(said) == 1 and "Flower run 1" in said[0] and "--node-megabytes" in said[0]


def test_what_the_superlink_refused_is_not_counted() -> None:
    """Otherwise a stranger could use up the quota of a node whose key it knows."""
    superlink, limits = Superlink(401), gate.Limits(node_bytes=2500)

    async def ask(client: httpx.AsyncClient) -> None:
        for _ in range(9):
            answer = await client.post(
                "/v1/fleet/push-object", content=piece(1, 1000), headers={"flwr-public-key": "x"}
            )
            assert answer.status_code == 401

    through_the_gate(ask, superlink.app, limits)


def test_a_push_that_cannot_be_read_goes_nowhere() -> None:
    superlink = Superlink()

    async def ask(client: httpx.AsyncClient) -> None:
        for call in ("push-object", "push-messages"):
            assert (await client.post(f"/v1/fleet/{call}", content=b"\xff" * 50)).status_code == 400
        message = PushMessagesRequest().SerializeToString()
        assert (await client.post("/v1/fleet/push-messages", content=message)).status_code == 202

    through_the_gate(ask, superlink.app)
    assert len(superlink.seen) == 1


@pytest.mark.parametrize("status", [500, 501, 502, 503, 504])
def test_an_error_of_the_superlink_is_one_to_try_again(status: int) -> None:
    """A node that is told 500 goes on without a heartbeat, and nobody asks it anything any more."""
    from flwr.supercore.retry.http_retry import _RETRYABLE_STATUS_CODES

    async def ask(client: httpx.AsyncClient) -> None:
        for call in sorted(gate.CALLS):
            assert (await client.post(f"/v1/fleet/{call}", content=BODY)).status_code in _RETRYABLE_STATUS_CODES

    through_the_gate(ask, Superlink(status).app)


# --- who does not finish ----------------------------------------------------------------------------------------


class Open:
    """The gate itself, a process at a port of this machine, before a SuperLink that is away; and who knocks there."""

    def __init__(self, folder: Path) -> None:
        make_certificates(folder, ["localhost"])
        self.trust = ssl.create_default_context(cafile=str(folder / "ca.crt"))
        self.listener = deploy.listen("127.0.0.1", 0)
        self.port = int(self.listener.getsockname()[1])
        self.lines: list[ssl.SSLSocket] = []
        files = {"authority": "ca.crt", "certificate": "server.crt", "key": "server.key", "log": "log"}
        self.words = [sys.executable, "-m", "fedbicross.transport.flower.gate", "--superlink", "https://127.0.0.1:9"]
        self.words += [word for name, file in files.items() for word in (f"--{name}", str(folder / file))]
        self.words += ["--listener", str(self.listener.fileno()), "--node-bytes", "1000000"]

    def knock(self, said: bytes = b"") -> ssl.SSLSocket:
        plain = socket.create_connection(("127.0.0.1", self.port), timeout=100)
        line = self.trust.wrap_socket(plain, server_hostname="localhost")
        self.lines.append(line)
        line.sendall(said)
        return line

    def health(self, timeout: float = 100) -> int:
        """What another caller gets meanwhile: the answer of this gate's missing SuperLink."""
        with httpx.Client(verify=self.trust, trust_env=False, timeout=timeout) as client:
            return client.get(f"https://localhost:{self.port}/health").status_code


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Open]:
    made = Open(tmp_path_factory.mktemp("gate"))
    with subprocess.Popen(made.words, pass_fds=(made.listener.fileno(),)) as process:
        made.process = process  # type: ignore[attr-defined]
        try:
            assert made.health() == 503
            yield made
        finally:
            for line in made.lines:
                line.close()
            process.kill()
            made.listener.close()


def memory_of(pid: int) -> int:
    """The most that a process has held, in bytes."""
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) << 10


@pytest.mark.slow
def test_unfinished_heads_keep_nobody_out(opened: Open) -> None:
    """260 callers who never come to the point: others are served at once, and each of them is hung up on in the end."""
    rude = [opened.knock(b"POST /v1/fleet/push-object HTTP/1.1\r\nHost: ") for _ in range(260)]
    assert opened.health(timeout=20) == 503  # answered, and by the gate: the SuperLink is away
    assert [line.recv(100) for line in rude[-20:]] == [b""] * 20  # after `head_seconds`; the first gave way before


class Wire(asyncio.Transport):
    """A connection of nobody."""

    cut = False

    def get_extra_info(self, name: str, default: object = None) -> object:
        return default

    def abort(self) -> None:
        self.cut = True


@pytest.mark.parametrize("at_work", [False, True])
def test_of_too_many_connections_the_oldest_that_asks_nothing_gives_way(at_work: bool) -> None:
    async def go() -> None:
        config, state = uvicorn.Config(Starlette(), ws="none"), ServerState()
        config.load()
        lines, wires = [], [Wire() for _ in range(4)]
        for place, wire in enumerate(wires):
            line = gate.Line(config, state, {})
            line.limits = gate.Limits(connections=3)
            line.connection_made(wire)
            line.waits_since = float(place)  # a clock may stand still between two of them
            if at_work and place == 0:
                line.cycle = SimpleNamespace(response_complete=False)  # type: ignore[assignment]
            lines.append(line)
        gone = 1 if at_work else 0
        assert [wire.cut for wire in wires] == [place == gone for place in range(4)]
        assert state.connections == {line for place, line in enumerate(lines) if place != gone}

    asyncio.run(go())


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_half_bodies_take_no_more_memory_than_there_is_for_them(opened: Open) -> None:
    before = memory_of(opened.process.pid)  # type: ignore[attr-defined]
    head = b"POST /v1/fleet/push-object HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % LIMITS.body_bytes
    for _ in range(40):
        with contextlib.suppress(OSError):  # hung up on in the middle
            opened.knock(head + bytes(LIMITS.body_bytes - 1))
    assert opened.health() == 503
    grown = memory_of(opened.process.pid) - before  # type: ignore[attr-defined]
    assert grown < 256 << 20, f"{grown:,} bytes"  # 40 bodies are 640; freed memory does not all come back at once


def test_who_has_been_silent_longest_gives_way() -> None:
    """Bodies are read side by side; the one that nothing was heard of is dropped, the others go on."""

    class Slow:
        def __init__(self, *pieces: bytes) -> None:
            self.pieces, self.go_on = list(pieces), asyncio.Event()

        async def stream(self) -> AsyncIterator[bytes]:
            for part in self.pieces:
                yield part
            await self.go_on.wait()

    async def go() -> None:
        bodies = gate.Bodies(gate.Limits(bodies_bytes=250, silence_seconds=1000.0))
        first, second, third = Slow(b"x" * 100), Slow(b"y" * 100), Slow(b"z" * 100)
        tasks = []
        for one in (first, second, third):
            tasks.append(asyncio.create_task(bodies.read(one)))  # type: ignore[arg-type]
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        with pytest.raises(TimeoutError):
            await tasks[0]
        assert sum(bodies.reading.values()) == 200
        second.go_on.set()
        third.go_on.set()
        assert await tasks[1] == b"y" * 100
        assert await tasks[2] == b"z" * 100
        assert not bodies.reading
        bodies.passing = 200  # on their way to the SuperLink: these cannot give way
        with pytest.raises(TimeoutError):
            await bodies.read(Slow(b"x" * 100))  # type: ignore[arg-type]

    asyncio.run(go())


def test_who_goes_silent_is_not_waited_for() -> None:
    class Silent:
        async def stream(self) -> AsyncIterator[bytes]:
            yield b"half"
            await asyncio.Event().wait()

    class Dripping:
        async def stream(self) -> AsyncIterator[bytes]:
            while True:
                yield b"x"
                await asyncio.sleep(0.01)

    async def go() -> None:
        for limits, body in (
            (gate.Limits(silence_seconds=0.1), Silent()),
            (gate.Limits(body_seconds=0.2), Dripping()),
        ):
            with pytest.raises(TimeoutError):
                await gate.Bodies(limits).read(body)  # type: ignore[arg-type]

    asyncio.run(go())


def test_it_leaves_with_its_parent(tmp_path: Path) -> None:
    """Otherwise the gate of a SuperLink that was killed would hold the port for ever."""
    made = Open(tmp_path)
    number = made.listener.fileno()
    script = (
        "import subprocess, time\n"
        f"p = subprocess.Popen({made.words!r}, pass_fds=({number},)); print(p.pid, flush=True); time.sleep(400)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, pass_fds=(number,)
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        made.listener.close()
        try:
            assert made.health() == 503
            parent.kill()
            wait(lambda: not listening(made.port), "its end")
        finally:
            parent.kill()
            if listening(made.port):
                os.kill(child, signal.SIGKILL)


def listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def wait(done: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 200
    while not done():
        assert time.monotonic() < end, what
        time.sleep(0.05)
