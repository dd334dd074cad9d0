"""Fetching of chunks from peers: several peers at once, verified, and resumed where it was cut.

Each chunk comes from one peer; whoever sends one whose digest is wrong is therefore known. A chunk
that a peer does not finish is fetched whole from another. A peer without work takes over a chunk
that comes slowly.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from catenary_services.content.record import RECORD_FILE
from catenary_services.domain.ids import NANOSECONDS_PER_SECOND, ModelKey, Nanoseconds
from catenary_services.errors import PlanInfeasible, Unavailable
from catenary_services.log import get_logger
from catenary_services.store.messages import FilePart
from catenary_services.store.peers import ChunkSources, SourcePeer
from catenary_services.store.pending_chunk import FetchedVersion, PendingChunk
from catenary_services.store.progress import ProgressCounter
from catenary_services.store.settings import PIECE_BYTES
from catenary_services.store.transfers import (
    FileTransfers,
    MissingError,
    TransferError,
    quiet_future,
)

T = TypeVar("T")
_LANES = 2
"""The chunks that are fetched from one peer at a time: the next one begins while the last pieces of
one are under way."""
_MOST_CHUNKS = 8
"""The chunks that are in memory at a time."""
_ABSENT_TIMES = 3
"""The number of times that every source has to say that it has not got a chunk: nobody has it."""
_ELSEWHERE_NS = 100_000_000
_log = get_logger("catenary_services.store")


class ContentFetcher:
    """Fetches chunks of files; everything here runs on one event loop."""

    def __init__(
        self,
        transfers: FileTransfers,
        stall_s: float,
        threads: ThreadPoolExecutor,
        progress: ProgressCounter,
        fetched: Callable[[int], object],
    ) -> None:
        """Creates a fetcher.

        Args:
            transfers: Asks peers for bytes.
            stall_s: What is waited for fails if nothing of it arrives for so long.
            threads: Threads that hash and write.
            progress: Is told what is wanted and what came.
            fetched: Called with the size of each chunk that has come from a peer and is on the
                disk.
        """
        self.lies = 0
        """Number of chunks whose digest was wrong."""
        self._transfers = transfers
        self._stall_ns = round(stall_s * NANOSECONDS_PER_SECOND)
        self._threads = threads
        self._progress = progress
        self._fetched = fetched
        self._chunks: dict[tuple[str, str, int], PendingChunk] = {}
        self._peers: dict[str, SourcePeer] = {}
        self._lanes: dict[str, int] = {}
        """Number of chunks that are being fetched from each peer."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    # -- what is wanted --------------------------------------------------------------------------

    async def record(self, model: ModelKey, content: str, sources: Sequence[str]) -> bytes:
        """Returns the bytes of a version's content record as some peer has it.

        Raises:
            Unavailable: No peer has it, or none answers.
        """
        asked = ChunkSources(tuple(sources))
        began = time.monotonic_ns()
        while not asked.all_lack_it(_ABSENT_TIMES):
            for peer in [self._peer(name) for name in sources]:
                if not asked.may_be_asked(peer, time.monotonic_ns()):
                    continue
                part = FilePart(model, content, RECORD_FILE, "", 0, PIECE_BYTES)
                try:
                    return await self._transfers.whole(peer.name, part)
                except MissingError:
                    asked.said_absent(peer.name, time.monotonic_ns())
                except TransferError as error:
                    peer.failed(str(error), time.monotonic_ns())
            if time.monotonic_ns() - began > self._stall_ns:
                break
            await asyncio.sleep(0.1)
        why = self._why(asked)
        raise Unavailable(f"the content record of {model} comes from nobody: {why}")

    async def bring(self, version: FetchedVersion, name: str, chunks: Sequence[int]) -> None:
        """Returns when chunks of a file, which are missing, have been fetched and are on the disk.

        Raises:
            Unavailable: They come from nobody, or the fetching was abandoned.
            PlanInfeasible: They cannot be written.
        """
        waited = [self._want(version, name, chunk) for chunk in chunks]
        self._pump()
        for each in waited:
            await asyncio.shield(each.done)

    def abandon(self, model: ModelKey) -> None:
        """Ends the fetching of a version, which is wanted no more."""
        for chunk in [each for each in self._chunks.values() if each.version.model == model]:
            self._settle(chunk, Unavailable(f"{model} is not wanted here any more"))

    async def close(self) -> None:
        """Ends all fetching."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for chunk in list(self._chunks.values()):
            self._settle(chunk, Unavailable("the process ends"))
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # -- who fetches what ------------------------------------------------------------------------

    def _want(self, version: FetchedVersion, name: str, index: int) -> PendingChunk:
        key = (str(version.kept.folder), name, index)
        known = self._chunks.get(key)
        if known is not None:
            return known
        now = time.monotonic_ns()
        done: asyncio.Future[None] = quiet_future()
        chunk = PendingChunk(version, name, index, ChunkSources(version.sources), done, now)
        self._chunks[key] = chunk
        self._progress.wanted(version.model, chunk.size, now)
        done.add_done_callback(lambda _: self._chunks.pop(key, None))
        return chunk

    def _pump(self) -> None:
        """Gives peers work as far as there is some, and fails what nobody can give."""
        if self._closed:
            return
        now = time.monotonic_ns()
        self._expire(now)
        names = dict.fromkeys(n for chunk in self._chunks.values() for n in chunk.sources.names)
        is_busy = True
        while is_busy:  # one chunk for each in turn, so that all peers get some
            is_busy = False
            for name in names:
                if self._lanes.get(name, 0) >= _LANES or len(self._tasks) >= _MOST_CHUNKS:
                    continue
                chunk = self._next_for(self._peer(name), now)
                if chunk is not None:
                    self._start(name, chunk, now)
                    is_busy = True
        self._set_timer()

    def _next_for(self, peer: SourcePeer, now: Nanoseconds) -> PendingChunk | None:
        if not peer.is_usable(now):
            return None
        slow = None
        for chunk in self._chunks.values():
            if chunk.done.done() or not chunk.sources.may_be_asked(peer, now):
                continue
            if not chunk.fetchers and now >= chunk.blocked_until_ns:
                return chunk
            if slow is None and len(chunk.fetchers) == 1 and peer.name not in chunk.fetchers:
                slow = chunk if chunk.is_slow(peer, now) else None
        return slow

    def _start(self, name: str, chunk: PendingChunk, now: Nanoseconds) -> None:
        self._lanes[name] = self._lanes.get(name, 0) + 1
        is_second = bool(chunk.fetchers)
        if not is_second:
            chunk.received = 0
        chunk.fetchers[name] = now
        work = self._fetch(self._peer(name), chunk, is_second=is_second)
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            self._lanes[name] -= 1
            chunk.fetchers.pop(name, None)
            if not task.cancelled() and (error := task.exception()) is not None:
                _log.error("fetch_crashed", error=repr(error))
                self._settle(chunk, Unavailable(f"fetching failed: {error}"))
            self._pump()

        task.add_done_callback(ended)

    def _expire(self, now: Nanoseconds) -> None:
        for chunk in list(self._chunks.values()):
            if chunk.fetchers or chunk.done.done():
                continue
            if (
                chunk.sources.all_lack_it(_ABSENT_TIMES)
                or now - max(chunk.since_ns, self._transfers.last_ns) > self._stall_ns
            ):
                first, file = chunk.part.offset, f"{chunk.version.model}/{chunk.name}"
                what = f"bytes {first} to {first + chunk.size} of {file}"
                why = self._why(chunk.sources)
                self._settle(chunk, Unavailable(f"{what} come from nobody: {why}"))

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._chunks:
            # Pauses end, other processes finish, and slow peers are noticed.
            self._timer = asyncio.get_running_loop().call_later(0.2, self._pump)

    def _settle(self, chunk: PendingChunk, error: Exception | None = None) -> None:
        if chunk.done.done():
            return
        if error is None:
            self._progress.came(chunk.version.model, chunk.size, time.monotonic_ns())
            chunk.done.set_result(None)
        else:
            self._progress.wanted(chunk.version.model, -chunk.size, time.monotonic_ns())
            chunk.done.set_exception(error)

    def _why(self, sources: ChunkSources) -> str:
        said = []
        for name in sources.names:
            if name in sources.absent:
                said.append(f"{name} does not have it")
            else:
                said.append(f"{name}: {self._peer(name).problem or 'it did not send it'}")
        return "; ".join(said) or "no peer was named that has the files"

    def _peer(self, name: str) -> SourcePeer:
        peer = self._peers.get(name)
        if peer is None:
            peer = self._peers[name] = SourcePeer(name)
        return peer

    # -- one chunk from one peer -----------------------------------------------------------------

    async def _fetch(self, peer: SourcePeer, chunk: PendingChunk, *, is_second: bool) -> None:
        with contextlib.ExitStack() as stack:
            if not is_second:
                is_mine = await self._on_thread(
                    lambda: stack.enter_context(chunk.map.claimed(chunk.index))
                )
                if await self._on_thread(lambda: chunk.map.is_here(chunk.index)):
                    self._settle(chunk)
                    return
                if not is_mine:
                    chunk.since_ns = time.monotonic_ns()
                    chunk.blocked_until_ns = chunk.since_ns + _ELSEWHERE_NS
                    return
            await self._fetch_claimed(peer, chunk)

    async def _fetch_claimed(self, peer: SourcePeer, chunk: PendingChunk) -> None:
        began = time.monotonic_ns()
        transfer = asyncio.ensure_future(self._transfer(peer, chunk))
        try:
            await asyncio.wait((transfer, chunk.done), return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not transfer.done():  # another peer was faster, or nobody wants it any more
                transfer.cancel()
        if chunk.done.done():
            await asyncio.gather(transfer, return_exceptions=True)
            return
        now = time.monotonic_ns()
        try:
            content = transfer.result()
        except MissingError:
            chunk.sources.said_absent(peer.name, now)
            return
        except TransferError as error:
            self._transfers.lost(peer.name)
            peer.failed(str(error), now)
            _log.warning("source_failed", peer=peer.name, file=chunk.name, why=str(error))
            return
        found = await self._on_thread(lambda: hashlib.sha256(content).hexdigest())
        if found != chunk.digest:
            self.lies += 1
            why = f"its bytes of {chunk.name} have another digest than was recorded"
            peer.lied(why, time.monotonic_ns())
            _log.error("source_lied", peer=peer.name, file=chunk.name, chunk=chunk.index)
            return
        peer.gave(len(content), now - began)
        if chunk.done.done():
            return
        try:
            await self._on_thread(lambda: chunk.map.write(chunk.index, content))
        except OSError as error:
            where = f"{chunk.version.model}/{chunk.name}"
            problem = f"{where} cannot be written as it is fetched: {error.strerror or error}"
            self._settle(chunk, PlanInfeasible(problem))
        else:
            if not chunk.done.done():  # another peer may have brought it meanwhile
                self._fetched(len(content))
            self._settle(chunk)

    async def _transfer(self, peer: SourcePeer, chunk: PendingChunk) -> bytearray:
        """Returns the bytes of a chunk as a peer sends them."""
        content = bytearray(chunk.size)

        def came(nbytes: int) -> None:
            chunk.since_ns = time.monotonic_ns()
            if next(iter(chunk.fetchers), peer.name) == peer.name:
                chunk.received += nbytes

        await self._transfers.fill(peer.name, chunk.part, memoryview(content), came)
        return content

    async def _on_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)
