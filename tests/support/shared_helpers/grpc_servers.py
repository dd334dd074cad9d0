"""gRPC servers of tests, in this event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio


@asynccontextmanager
async def listening(add: Callable[[Any, Any], None], service: object) -> AsyncIterator[str]:
    """Serves one service on a free port; yields its address."""
    server = grpc.aio.server()
    add(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


@asynccontextmanager
async def connected(
    add: Callable[[Any, Any], None], service: object
) -> AsyncIterator[grpc.aio.Channel]:
    """Serves one service on a free port; yields a channel to it."""
    async with (
        listening(add, service) as address,
        grpc.aio.insecure_channel(address) as channel,
    ):
        yield channel
