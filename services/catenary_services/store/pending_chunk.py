"""A chunk that somebody waits for: where it lies, who fetches it, and how far that has come."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from catenary_services.content.record import FileRecord
from catenary_services.domain.ids import ModelKey, Nanoseconds
from catenary_services.store.chunk_map import ChunkMap, chunk_digest, chunk_span
from catenary_services.store.kept import KeptVersion
from catenary_services.store.messages import FilePart
from catenary_services.store.peers import ChunkSources, SourcePeer, should_take_over

_TAKE_OVER_NS = 2_000_000_000


@dataclass(frozen=True, slots=True)
class FetchedVersion:
    """A version that is being fetched, and the peers that may have it."""

    model: ModelKey
    kept: KeptVersion
    content: str
    """The digest of the version."""
    sources: tuple[str, ...]


@dataclass(eq=False, slots=True)
class PendingChunk:
    """A chunk that somebody waits for."""

    version: FetchedVersion
    name: str
    """The path of the file that the chunk is of."""
    index: int
    sources: ChunkSources
    done: asyncio.Future[None]
    since_ns: Nanoseconds
    """The moment at which it was asked for, or some of it came last."""
    fetchers: dict[str, Nanoseconds] = field(default_factory=dict)
    """The peers it is being fetched from, each with the moment at which that began."""
    received: int = 0
    """Bytes that came from the first of these peers."""
    blocked_until_ns: Nanoseconds = 0
    """Another process of this machine is fetching it; it is looked at again at this moment."""

    @property
    def map(self) -> ChunkMap:
        """The map of the chunks of its file."""
        return self.version.kept.map_of(self.name)

    @property
    def part(self) -> FilePart:
        """The bytes to ask a peer for."""
        version, file = self.version, self._file
        offset, length = chunk_span(file, self.index)
        return FilePart(version.model, version.content, self.name, file.sha256, offset, length)

    @property
    def size(self) -> int:
        """Number of bytes of the chunk."""
        return chunk_span(self._file, self.index)[1]

    @property
    def digest(self) -> str:
        """The digest that was recorded of it."""
        return chunk_digest(self._file, self.index)

    def is_slow(self, peer: SourcePeer, now_ns: Nanoseconds) -> bool:
        """True if a peer without work should fetch it from the start, beside the one that does."""
        spent_ns = now_ns - next(iter(self.fetchers.values()))
        if spent_ns < _TAKE_OVER_NS:
            return False
        rate = self.received * 1e9 / spent_ns
        return should_take_over(self.size - self.received, rate, self.size, peer.bytes_per_s)

    @property
    def _file(self) -> FileRecord:
        return self.version.kept.record.files[self.name]
