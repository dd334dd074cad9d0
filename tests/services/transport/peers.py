"""Endpoints of every transport, and a peer in a process of its own."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from catenary_services.transport.grpc.grpc_stream import GrpcEndpoint
from catenary_services.transport.interface import (
    Endpoint,
    EndpointAddress,
    FrameHandler,
    ReceivedFrame,
)
from catenary_services.transport.nixl.nixl import NixlEndpoint
from catenary_services.transport.nixl.nixl_thread import is_installed
from catenary_services.transport.settings import TransportSettings
from catenary_services.transport.shared_memory.shm import ShmEndpoint
from catenary_services.transport.tcp.tcp import TcpEndpoint
from tests.support.certificates import Certificates

ENDPOINTS = {"shm": ShmEndpoint, "tcp": TcpEndpoint, "grpc": GrpcEndpoint, "nixl": NixlEndpoint}
NIXL = pytest.param(
    "nixl",
    marks=pytest.mark.skipif(
        not is_installed(), reason="the library of the extra [nixl] is not installed"
    ),
)
"""The transport that not every machine has, as a parameter of tests."""
KINDS = ["shm", "tcp", "tcp+tls", "grpc", "grpc+tls", NIXL]
MIB = 1 << 20


class Inbox:
    """A handler that keeps frames until a test takes them."""

    def __init__(self) -> None:
        self.frames: asyncio.Queue[ReceivedFrame] = asyncio.Queue()

    def __call__(self, frame: ReceivedFrame) -> None:
        self.frames.put_nowait(frame)

    async def next(self) -> ReceivedFrame:
        return await asyncio.wait_for(self.frames.get(), 20)


@dataclass
class Kit:
    """Makes endpoints of one transport and closes them at the end."""

    kind: str
    settings: TransportSettings
    opened: list[Endpoint]
    certificates: Certificates | None = None
    """With TLS every endpoint has one of its own, as an agent."""

    @property
    def transport(self) -> str:
        return self.kind.partition("+")[0]

    async def endpoint(
        self, peer_id: str, handler: FrameHandler | None = None, **changes: object
    ) -> Endpoint:
        if self.certificates is not None:
            changes = {"security": self.certificates.transport("agent", peer_id), **changes}
        endpoint = ENDPOINTS[self.transport](peer_id, replace(self.settings, **changes))
        await endpoint.start(handler or Inbox())
        self.opened.append(endpoint)
        return endpoint


@dataclass
class ForeignPeer:
    """A receiver in another process. Holds every frame; says how many it has."""

    process: asyncio.subprocess.Process
    address: EndpointAddress

    async def received(self) -> bytes:
        assert self.process.stdout is not None
        return await asyncio.wait_for(self.process.stdout.readline(), 20)

    async def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        await self.process.wait()


RECEIVER = """
import asyncio, sys
from pathlib import Path
from catenary_services.transport.settings import TransportSettings
from catenary_services.transport.hub import _ENDPOINTS as ENDPOINTS
async def main():
    held = []
    def handler(frame):
        held.append(frame)
        print(len(frame.payload), flush=True)
    settings = TransportSettings(runtime_dir=Path(sys.argv[2]), trusted_network=True)
    endpoint = ENDPOINTS[sys.argv[1]]("foreign", settings)
    await endpoint.start(handler)
    print(endpoint.address.address, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""

Spawn = Callable[[str, Path], Awaitable[ForeignPeer]]
