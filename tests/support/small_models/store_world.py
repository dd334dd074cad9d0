"""Model stores of several peers, each with a folder and a hub of its own, in one process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from catenary_protos.catenary.v1 import common_pb2
from catenary_services.content import hashing, reading, record
from catenary_services.domain.ids import ModelKey
from catenary_services.models.model_repository import ModelRepository
from catenary_services.store import chunk_map, store
from catenary_services.store.kept import KeptVersion
from catenary_services.store.settings import StoreSettings
from catenary_services.store.store import ModelStore
from catenary_services.transport.frames import read_header
from catenary_services.transport.hub import TransportHub
from catenary_services.transport.interface import ReceivedFrame
from catenary_services.transport.settings import TransportSettings
from shared_helpers.peers import peer_of

KEY = ModelKey("net", "1")
CHUNK = 64 << 10
WEIGHTS = "weights.bin"


def chunks_of_64_kib(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes chunks small, so that small files have many."""
    for module in (hashing, reading, record, chunk_map):
        monkeypatch.setattr(module, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(store, "_SMALL_BYTES", CHUNK)


def write_model(root: Path, chunks: int, key: ModelKey = KEY, seed: bytes | None = None) -> bytes:
    """Writes a model with a file of so many chunks, and returns the content of that file."""
    folder = root / key.name / key.version
    folder.mkdir(parents=True)
    (folder / "model.yaml").write_text(f"platform: decoder\nfile: {WEIGHTS}\n")
    content = (seed or os.urandom(64)) * (chunks * CHUNK // 64)
    if seed is None:
        content = os.urandom(chunks * CHUNK)
    (folder / WEIGHTS).write_bytes(content)
    return content


class StorePeer:
    """One process with a store, as far as the store needs one."""

    def __init__(self, name: str, root: Path, settings: StoreSettings, run: Path) -> None:
        self.name = name
        self.root = root
        self.hub = TransportHub(name, TransportSettings(enabled=("tcp",), runtime_dir=run))
        self.repository = ModelRepository(root)
        self.store = ModelStore(self.repository, self.hub, settings)
        self.counted: list[int] = []
        """Bytes of each chunk that it has fetched."""
        self.store.fetched = self.counted.append

    async def start(self) -> None:
        self.store.start()
        await self.hub.start(self._take)

    def _take(self, frame: ReceivedFrame) -> None:
        self.store.on_frame(read_header(frame), frame)

    async def stop(self) -> None:
        await self.store.close()
        await self.hub.close()

    @property
    def described(self) -> common_pb2.Peer:
        return peer_of(self.name, self.hub, id(self))

    def read(
        self,
        digest: str,
        sources: Sequence[str],
        ranges: list[tuple[int, int]] | None = None,
        key: ModelKey = KEY,
    ) -> bytes:
        """Prepares a version, and returns its weights after reading some ranges of them."""
        self.store.prepare(key, digest, sources)
        path = self.repository.folder(key) / WEIGHTS
        with self.repository.reading(key) as checked:
            checked.begin(path, ranges)
            return path.read_bytes()

    async def load(
        self,
        digest: str,
        sources: Sequence[str],
        ranges: list[tuple[int, int]] | None = None,
        key: ModelKey = KEY,
    ) -> bytes:
        return await asyncio.to_thread(self.read, digest, sources, ranges, key)

    def kept(self, key: ModelKey = KEY) -> KeptVersion:
        content = self.repository.content(key)
        assert content is not None
        return KeptVersion(self.repository.folder(key), content)


class StoreWorld:
    """The peers of a test."""

    def __init__(self, tmp_path: Path, settings: StoreSettings) -> None:
        self.tmp_path = tmp_path
        self.settings = settings
        self.peers: dict[str, StorePeer] = {}

    async def add(
        self, name: str, folder: str = "", settings: StoreSettings | None = None
    ) -> StorePeer:
        """Starts a peer, whose folder is named as it is unless said otherwise."""
        root = self.tmp_path / (folder or name)
        root.mkdir(exist_ok=True)
        chosen = settings or self.settings
        peer = StorePeer(name, root, chosen, self.tmp_path / "run")
        await peer.start()
        self.peers[name] = peer
        self.tell()
        return peer

    async def remove(self, name: str) -> None:
        """Ends a peer at once, as its process would end with it."""
        await self.peers.pop(name).stop()
        self.tell()

    def tell(self) -> None:
        """Tells everybody who is there."""
        everyone = [peer.described for peer in self.peers.values()]
        for peer in self.peers.values():
            peer.hub.update_directory(everyone)


@asynccontextmanager
async def store_world(
    tmp_path: Path, settings: StoreSettings | None = None
) -> AsyncIterator[StoreWorld]:
    """Runs peers for the length of the block."""
    world = StoreWorld(tmp_path, settings or StoreSettings(stall_s=20.0, free_bytes=0))
    try:
        yield world
    finally:
        for name in list(world.peers):
            await world.peers.pop(name).stop()
