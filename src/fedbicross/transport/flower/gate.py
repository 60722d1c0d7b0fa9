"""The one door that sites can knock at. It passes Flower's fleet calls on to the SuperLink, and nothing else.

A SuperLink answers nodes, operators and its own apps on one port, and asks only nodes who they are: whoever reaches
it may register keys and start code. So it listens on the loopback, and this stands in front. Started, and started
again, by `fedbicross flower up`; ends with the process that started it.

Nobody can hold it for others: who does not finish a request is hung up on, memory for bodies is bounded, and a node
brings no more than its quota in a run. What may pass later is answered with 503, which Flower's nodes try again.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import uvicorn
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import PushObjectRequest
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from fedbicross.transport.flower.settings import LogFile

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]

CALLS = frozenset(  # registering is not among them: that is the operator's word
    (
        "activate-node",
        "deactivate-node",
        "send-node-heartbeat",
        "pull-messages",
        "push-messages",
        "get-run",
        "get-fab",
        "push-object",
        "pull-object",
        "confirm-message-received",
    )
)
_HOP = frozenset((b"host", b"connection", b"content-length", b"transfer-encoding", b"keep-alive", b"upgrade", b"te"))
_NODE = "flwr-public-key"  # header of every call; the SuperLink checks the signature that comes with it
_LATER, _TOO_LARGE = 503, 413


@dataclass(frozen=True)
class Limits:
    """What one caller can take from the others."""

    connections: int = 256  # at once; of those that have asked nothing yet, the oldest gives way
    handshake_seconds: float = 10.0
    head_seconds: float = 10.0  # from the connection, or the last answer, to the whole head of a request
    silence_seconds: float = 30.0  # between two pieces of a body
    body_seconds: float = 600.0  # for a whole body: 5 MB over the slowest line
    body_bytes: int = 16 << 20  # Flower cuts what is larger into pieces of 5 MB
    bodies_bytes: int = 64 << 20  # of all bodies here; who has been silent longest gives way
    node_bytes: int = 256 << 20  # that one node brings in one run, before any of it is looked at


class _TooLarge(Exception):
    """A body over the limit."""


@dataclass
class Bodies:
    """The bodies in memory: those being read, by the timer that can stop each, and those handed on."""

    limits: Limits
    reading: dict[asyncio.Timeout, int] = field(default_factory=dict)  # bytes; least recently heard from first
    passing: int = 0  # bytes on their way to the SuperLink

    async def read(self, request: Request) -> bytes:
        """The whole body, or ``TimeoutError`` for who is too slow, or too large with others waiting."""
        loop = asyncio.get_running_loop()
        end, body = loop.time() + self.limits.body_seconds, bytearray()
        async with asyncio.timeout(self.limits.silence_seconds) as patience:
            self.reading[patience] = 0
            try:
                async for piece in request.stream():
                    body += piece
                    if len(body) > self.limits.body_bytes:
                        raise _TooLarge
                    self._heard(patience, len(body))
                    patience.reschedule(min(loop.time() + self.limits.silence_seconds, end))
            finally:
                self.reading.pop(patience, None)
        return bytes(body)

    def _heard(self, one: asyncio.Timeout, size: int) -> None:
        if self.reading.pop(one, None) is None:  # given up for another one in this very moment
            raise TimeoutError
        self.reading[one] = size
        while sum(self.reading.values()) + self.passing > self.limits.bodies_bytes:
            given_up = next(iter(self.reading))
            del self.reading[given_up]
            if given_up is one:
                raise TimeoutError
            given_up.reschedule(asyncio.get_running_loop().time())


@dataclass
class Quotas:
    """How much each node has brought in each run. Only what the SuperLink took under a node's signature counts."""

    limit: int
    say: Callable[[str], None]
    used: dict[tuple[str, int], int] = field(default_factory=dict)  # by node key and Flower's number of the run
    told: set[tuple[str, int]] = field(default_factory=set)

    def allows(self, node: str, run: int, size: int) -> bool:
        """Whether these bytes fit; the first time that they do not, it is said."""
        who = node, run
        if self.used.get(who, 0) + size <= self.limit:
            return True
        if who in self.used and who not in self.told:
            self.told.add(who)
            key = hashlib.sha256(node.encode()).hexdigest()[:12]
            self.say(
                f"the node with key {key} has brought {self.used[who]:,} bytes in Flower run {run}; more than "
                f"{self.limit:,} are refused (`flower up --node-megabytes`)"
            )
        return False

    def count(self, node: str, run: int, size: int) -> None:
        """These bytes were taken."""
        self.used[node, run] = self.used.get((node, run), 0) + size


def _run_of(call: str, body: bytes) -> int | None:
    """In which run a call brings something to be stored; none for other calls."""
    if call == "push-object":
        return int(PushObjectRequest.FromString(body).run_id)
    if call == "push-messages":
        messages = PushMessagesRequest.FromString(body).messages_list
        return int(messages[0].metadata.run_id) if messages else 0
    return None


def door(client: httpx.AsyncClient, limits: Limits | None = None, say: Callable[[str], None] = print) -> Starlette:
    """The door, before the SuperLink that ``client`` reaches."""
    limits = limits or Limits()
    bodies, quotas = Bodies(limits), Quotas(limits.node_bytes, say)

    async def forward(request: Request) -> Response:
        call = request.path_params["call"]
        if call not in CALLS:
            return _refusal(404)
        try:
            body = await bodies.read(request)
        except _TooLarge:
            return _refusal(_TOO_LARGE)
        except (TimeoutError, ClientDisconnect):
            return _refusal(_LATER)
        bodies.passing += len(body)
        try:
            return await _pass_on(call, request, body)
        finally:
            bodies.passing -= len(body)

    async def _pass_on(call: str, request: Request, body: bytes) -> Response:
        node = request.headers.get(_NODE, "")
        try:
            run = _run_of(call, body)
        except Exception:  # protobuf's own: these bytes are no such call
            return _refusal(400)
        if run is not None and not quotas.allows(node, run, len(body)):
            return _refusal(_TOO_LARGE)
        headers = [(name, value) for name, value in request.headers.raw if name.lower() not in _HOP]
        try:
            answer = await client.post(f"/v1/fleet/{call}", content=body, headers=headers)
        except httpx.TransportError:
            return _refusal(_LATER)  # the SuperLink is starting or gone
        if answer.status_code >= 500:
            return _refusal(_LATER)  # its database is locked, say: to a node 500 would mean to give up for good
        if run is not None and answer.is_success:
            quotas.count(node, run, len(body))
        passed = Response(answer.content, answer.status_code)
        passed.raw_headers = [
            (name, value)
            for name, value in answer.headers.raw
            if name.lower() not in _HOP | {b"content-encoding", b"server", b"date"}
        ] + [(b"content-length", str(len(answer.content)).encode())]
        return passed

    async def health(request: Request) -> Response:
        del request
        try:
            return Response(status_code=(await client.get("/health")).status_code)
        except httpx.TransportError:
            return _refusal(_LATER)

    return Starlette(
        routes=[Route("/v1/fleet/{call}", forward, methods=["POST"]), Route("/health", health, methods=["GET"])]
    )


def _refusal(status: int) -> Response:
    """An answer that ends the connection, so that nobody goes on sending what is not read."""
    return Response(status_code=status, headers={"connection": "close"})


class Line(H11Protocol):
    """One connection. It knows since when the head of a request is waited for."""

    limits = Limits()

    @property
    def asks_nothing(self) -> bool:
        """No request is at work."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Let it in; if there are too many, the one that has asked nothing for longest is hung up on."""
        super().connection_made(transport)
        self.waits_since = self.loop.time()
        if len(self.connections) > self.limits.connections:
            idle = [line for line in self.connections if isinstance(line, Line) and line.asks_nothing]
            min(idle, key=lambda line: line.waits_since).hang_up()  # at least this one

    def on_response_complete(self) -> None:
        """From now on the next request is waited for."""
        self.waits_since = self.loop.time()
        super().on_response_complete()

    def hang_up(self) -> None:
        """At once, and out of the list of connections."""
        self.connections.discard(self)
        self.transport.abort()


class Server(uvicorn.Server):
    """uvicorn, with limits for callers who do not finish what they began."""

    def __init__(self, config: uvicorn.Config, limits: Limits) -> None:
        super().__init__(config)
        self.limits = limits

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn does it, with a limit for the TLS handshake."""
        await self.lifespan.startup()
        loop = asyncio.get_running_loop()

        def line() -> asyncio.Protocol:
            made = Line(self.config, self.server_state, self.lifespan.state)
            made.limits = self.limits
            return made

        self.servers = [
            await loop.create_server(
                line,
                sock=sock,
                ssl=self.config.ssl,
                backlog=self.config.backlog,
                ssl_handshake_timeout=self.limits.handshake_seconds,
                ssl_shutdown_timeout=5.0,
            )
            for sock in sockets or ()
        ]
        self.started = True

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: hang up on who has not sent a whole head in time."""
        latest = asyncio.get_running_loop().time() - self.limits.head_seconds
        for line in list(self.server_state.connections):
            if isinstance(line, Line) and line.asks_nothing and line.waits_since < latest:
                line.hang_up()
        return await super().on_tick(counter)


async def serve(
    superlink: str,
    authority: Path,
    certificate: Path,
    key: Path,
    listener: socket.socket,
    limits: Limits,
    say: Callable[[str], None],
) -> None:
    """Stand at the door until the parent is gone."""
    parent = os.getppid()
    verify = ssl.create_default_context(cafile=str(authority))
    pool = httpx.Limits(max_connections=limits.connections)
    async with httpx.AsyncClient(
        base_url=superlink, verify=verify, timeout=120, limits=pool, trust_env=False
    ) as client:
        config = uvicorn.Config(
            door(client, limits, say),
            ssl_certfile=certificate,
            ssl_keyfile=key,
            log_level="warning",
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=5,
        )
        server = Server(config, limits)

        async def watch() -> None:
            while os.getppid() == parent:
                await asyncio.sleep(0.5)
            server.should_exit = True

        watching = asyncio.create_task(watch())
        await server.serve([listener])
        watching.cancel()


def main() -> None:
    """``python -m fedbicross.transport.flower.gate``."""
    words = argparse.ArgumentParser()
    for name in ("superlink", "authority", "certificate", "key", "log"):
        words.add_argument(f"--{name}", required=True)
    words.add_argument("--listener", type=int, required=True, help="number of the open socket that was handed down")
    words.add_argument("--node-bytes", type=int, required=True)
    given = words.parse_args()
    if resource is not None:
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # who has not even begun TLS takes a file too
    files = (Path(given.authority), Path(given.certificate), Path(given.key))
    limits = Limits(node_bytes=given.node_bytes)
    with socket.socket(fileno=given.listener) as listener:
        asyncio.run(serve(given.superlink, *files, listener, limits, LogFile(Path(given.log)).say))


if __name__ == "__main__":
    main()
