"""The one door that sites can knock at. It passes Flower's fleet calls on to the SuperLink, and nothing else.

A SuperLink answers nodes, operators and its own apps on one port, and asks only nodes who they are: whoever reaches
it may register keys and start code. So it listens on the loopback, and this stands in front. Started by
`fedbicross flower up`; ends with the process that started it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import ssl
import time
from pathlib import Path

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

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
MAX_BODY = 16 << 20  # bytes; Flower cuts what is larger into pieces of 5 MB
MAX_CALLS = 200  # at once; with MAX_BODY this bounds the memory that strangers can take
_HOP = frozenset((b"host", b"connection", b"content-length", b"transfer-encoding", b"keep-alive", b"upgrade", b"te"))


def door(client: httpx.AsyncClient) -> Starlette:
    """The door, before the SuperLink that ``client`` reaches."""

    async def forward(request: Request) -> Response:
        call = request.path_params["call"]
        if call not in CALLS:
            return Response(status_code=404)
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > MAX_BODY:
                return Response(status_code=413)
        headers = [(name, value) for name, value in request.headers.raw if name.lower() not in _HOP]
        try:
            answer = await client.post(f"/v1/fleet/{call}", content=bytes(body), headers=headers)
        except httpx.TransportError:
            return Response(status_code=503)  # the SuperLink is starting or gone; nodes try again
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
            return Response(status_code=503)

    return Starlette(
        routes=[Route("/v1/fleet/{call}", forward, methods=["POST"]), Route("/health", health, methods=["GET"])]
    )


async def serve(superlink: str, authority: Path, certificate: Path, key: Path, listener: socket.socket) -> None:
    """Stand at the door until the parent is gone."""
    parent = os.getppid()
    verify = ssl.create_default_context(cafile=str(authority))
    async with httpx.AsyncClient(base_url=superlink, verify=verify, timeout=120, trust_env=False) as client:
        config = uvicorn.Config(
            door(client),
            ssl_certfile=certificate,
            ssl_keyfile=key,
            log_level="warning",
            server_header=False,
            proxy_headers=False,
            limit_concurrency=MAX_CALLS,
        )
        server = uvicorn.Server(config)

        async def watch() -> None:
            while os.getppid() == parent:
                await asyncio.sleep(0.5)
            server.should_exit = True

        watching = asyncio.create_task(watch())
        await server.serve([listener])
        watching.cancel()


def listen(host: str, port: int, patience: float = 15.0) -> socket.socket:
    """The outer port; one that an earlier gate is about to leave is waited for."""
    end = time.monotonic() + patience
    while True:
        try:
            return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        except OSError:
            if time.monotonic() >= end:
                raise
            time.sleep(0.25)


def main() -> None:
    """``python -m fedbicross.transport.flower.gate``."""
    words = argparse.ArgumentParser()
    for name in ("superlink", "authority", "certificate", "key", "host"):
        words.add_argument(f"--{name}", required=True)
    words.add_argument("--port", type=int, required=True)
    given = words.parse_args()
    listener = listen(given.host, given.port)
    files = (Path(given.authority), Path(given.certificate), Path(given.key))
    asyncio.run(serve(given.superlink, *files, listener))


if __name__ == "__main__":
    main()
