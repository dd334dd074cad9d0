"""Fixtures: endpoints of every transport, and peers in processes of their own."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from catenary_services.transport.interface import EndpointAddress
from catenary_services.transport.settings import TransportSettings, host_id
from tests.services.transport.peers import KINDS, RECEIVER, ForeignPeer, Kit, Spawn
from tests.support.certificates import Certificates


@pytest.fixture(params=KINDS)
async def kit(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Kit]:
    kind = str(request.param)
    certificates = Certificates(tmp_path / "certs") if kind.endswith("tls") else None
    settings = TransportSettings(runtime_dir=tmp_path / "run", trusted_network=True)
    made = Kit(kind, settings, [], certificates)
    yield made
    for endpoint in made.opened:
        await endpoint.close()


@pytest.fixture
async def spawn() -> AsyncIterator[Spawn]:
    peers: list[ForeignPeer] = []

    async def start(transport: str, runtime_dir: Path) -> ForeignPeer:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            RECEIVER,
            transport,
            str(runtime_dir),
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), 20)
        peer = ForeignPeer(process, EndpointAddress(transport, line.decode().strip(), host_id()))
        peers.append(peer)
        return peer

    yield start
    for peer in peers:
        if peer.process.returncode is None:
            await peer.kill()
