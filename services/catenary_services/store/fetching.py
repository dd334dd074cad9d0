"""Fetching of chunks from peers: several peers at once, verified, and resumed where it was cut.

Each chunk comes from one peer, in pieces of which a window's worth is asked for at a time; whoever
sends a chunk whose digest is wrong is therefore known. A chunk that a peer does not finish is
fetched whole from another. A peer without work takes over a chunk that comes slowly.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from catenary_services.content.record import LARGEST_RECORD_BYTES, RECORD_FILE
from catenary_services.domain.ids import ModelKey, Nanoseconds
from catenary_services.errors import CatenaryError, PlanInfeasible, Unavailable
from catenary_services.log import get_logger
from catenary_services.store.chunk_map import ChunkMap, chunk_digest, chunk_span
from catenary_services.store.kept import KeptVersion
from catenary_services.store.messages import (
    ABSENT,
    BUSY,
    GIVEN,
    FilePart,
    LinkSource,
    push_request,
)
from catenary_services.store.peers import ChunkSources, SourcePeer, should_take_over
from catenary_services.store.progress import ProgressCounter
from catenary_services.store.settings import PIECE_BYTES, StoreSettings
from catenary_services.store.window import ByteRate, FetchWindow

if TYPE_CHECKING:
    from catenary_protos.catenary.v1.frame_pb2 import ContentAnswer, FrameHeader
    from catenary_services.transport.interface import ReceivedFrame

T = TypeVar("T")
_LANES = 2
"""The chunks that are fetched from one peer at a time: the next one begins while the last pieces of
one are under way."""
_MOST_CHUNKS = 8
"""The chunks that are in memory at a time."""
_ABSENT_TIMES = 3
"""The number of times that every source has to say that it has not got a chunk: nobody has it."""
_ELSEWHERE_NS = 100_000_000
_TAKE_OVER_NS = 2_000_000_000
_LONGEST_POSTPONEMENT_NS = 5_000_000_000
_POSTPONEMENTS = 50
_SECOND_NS = 1_000_000_000
_log = get_logger("catenary_services.store")


class _AbsentError(Exception):
    """A peer that does not have the bytes."""


class _FailedError(Exception):
    """A peer that does not answer as it should; the text says how."""


@dataclass(eq=False, slots=True)
class _Asked:
    """A request that waits for its answer."""

    peer: str
    into: memoryview
    answered: asyncio.Future[ContentAnswer]


@dataclass(frozen=True, slots=True)
class FetchedVersion:
    """A version that is being fetched, and the peers that may have it."""

    model: ModelKey
    kept: KeptVersion
    content: str
    """The digest of the version."""
    sources: tuple[str, ...]


@dataclass(eq=False, slots=True)
class _Chunk:
    """A chunk that somebody waits for."""

    version: FetchedVersion
    name: str
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
        return self.version.kept.map_of(self.name)

    @property
    def span(self) -> tuple[int, int]:
        return chunk_span(self.version.kept.record.files[self.name], self.index)

    @property
    def digest(self) -> str:
        return chunk_digest(self.version.kept.record.files[self.name], self.index)


class _Gate:
    """The requests that one peer has to answer: no more at a time than its window allows."""

    def __init__(self) -> None:
        self.window = FetchWindow()
        self._busy = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def enter(self) -> None:
        while self._busy >= self.window.pieces:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._wake()
                raise
        self._busy += 1

    def leave(self) -> None:
        self._busy -= 1
        self._wake()

    def _wake(self) -> None:
        free = self.window.pieces - self._busy
        while self._waiting and free > 0:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                free -= 1


class ContentFetcher:
    """Fetches chunks of files; everything here runs on one event loop."""

    def __init__(
        self,
        hub: LinkSource,
        settings: StoreSettings,
        threads: ThreadPoolExecutor,
        progress: ProgressCounter,
        clock: Callable[[], Nanoseconds] = time.monotonic_ns,
    ) -> None:
        """Creates a fetcher.

        Args:
            hub: The links to peers.
            settings: Limits.
            threads: Threads that hash and write.
            progress: Is told what is wanted and what came.
            clock: Monotonic nanoseconds.
        """
        self.lies = 0
        """Number of chunks whose digest was wrong."""
        self.fetched: Callable[[int], object] = lambda _: None
        """Called with the size of each chunk that has come from a peer and is on the disk."""
        self._hub = hub
        self._settings = settings
        self._threads = threads
        self._progress = progress
        self._clock = clock
        self._numbers = itertools.count(1)
        self._asked: dict[int, _Asked] = {}
        self._chunks: dict[tuple[str, str, int], _Chunk] = {}
        self._peers: dict[str, SourcePeer] = {}
        self._gates: dict[str, _Gate] = {}
        self._lanes: dict[str, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._last_ns: Nanoseconds = 0
        """The moment at which the last piece came."""
        self._closed = False
        self._rate = ByteRate(settings.fetch_bytes_per_second)

    # -- what is wanted --------------------------------------------------------------------------

    async def record(self, model: ModelKey, content: str, sources: Sequence[str]) -> bytes:
        """Returns the bytes of a version's content record as some peer has it.

        Raises:
            Unavailable: No peer has it, or none answers.
        """
        asked = ChunkSources(tuple(sources))
        began = self._clock()
        while not asked.all_lack_it(_ABSENT_TIMES):
            for peer in [self._peer(name) for name in sources]:
                if not asked.may_be_asked(peer, self._clock()):
                    continue
                part = FilePart(model, content, RECORD_FILE, "", 0, PIECE_BYTES)
                try:
                    return await self._whole(peer, part)
                except _AbsentError:
                    asked.said_absent(peer.name, self._clock())
                except _FailedError as error:
                    peer.failed(str(error), self._clock())
            if self._clock() - began > self._settings.stall_s * _SECOND_NS:
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

    def on_answer(self, header: FrameHeader, frame: ReceivedFrame) -> None:
        """Handles the answer of a peer."""
        answer = header.content_answer
        asked = self._asked.get(answer.request_id)
        # An answer that comes late, or from somebody who was not asked, is of no use to anybody.
        if asked is not None and asked.peer == frame.sender.name and not asked.answered.done():
            payload, into = frame.payload, asked.into
            if len(payload) > len(into):
                asked.answered.set_exception(_FailedError("it sent more than was asked for"))
            else:
                into[: len(payload)] = payload
                if answer.verdict == GIVEN and len(payload) < min(len(into), answer.size):
                    asked.answered.set_exception(_FailedError("it sent less than it said"))
                else:
                    asked.answered.set_result(answer)
        frame.release()

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

    def _want(self, version: FetchedVersion, name: str, index: int) -> _Chunk:
        key = (str(version.kept.folder), name, index)
        known = self._chunks.get(key)
        if known is not None:
            return known
        now = self._clock()
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.add_done_callback(_look)
        chunk = _Chunk(version, name, index, ChunkSources(version.sources), done, now)
        self._chunks[key] = chunk
        self._progress.wanted(version.model, chunk.span[1], now)
        done.add_done_callback(lambda _: self._chunks.pop(key, None))
        return chunk

    def _pump(self) -> None:
        """Gives peers work as far as there is some, and fails what nobody can give."""
        if self._closed:
            return
        now = self._clock()
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
        self._set_timer(now)

    def _next_for(self, peer: SourcePeer, now: Nanoseconds) -> _Chunk | None:
        if not peer.is_usable(now):
            return None
        slow = None
        for chunk in self._chunks.values():
            if chunk.done.done() or not chunk.sources.may_be_asked(peer, now):
                continue
            if not chunk.fetchers and now >= chunk.blocked_until_ns:
                return chunk
            if slow is None and len(chunk.fetchers) == 1 and peer.name not in chunk.fetchers:
                slow = chunk if self._is_slow(chunk, peer, now) else None
        return slow

    def _is_slow(self, chunk: _Chunk, peer: SourcePeer, now: Nanoseconds) -> bool:
        spent = now - next(iter(chunk.fetchers.values()))
        if spent < _TAKE_OVER_NS:
            return False
        whole = chunk.span[1]
        rate = chunk.received * 1e9 / spent
        return should_take_over(whole - chunk.received, rate, whole, peer.bytes_per_s)

    def _start(self, name: str, chunk: _Chunk, now: Nanoseconds) -> None:
        self._lanes[name] = self._lanes.get(name, 0) + 1
        if not chunk.fetchers:
            chunk.received = 0
        is_second = bool(chunk.fetchers)
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
        stall_ns = self._settings.stall_s * _SECOND_NS
        for chunk in list(self._chunks.values()):
            if chunk.fetchers or chunk.done.done():
                continue
            if (
                chunk.sources.all_lack_it(_ABSENT_TIMES)
                or now - max(chunk.since_ns, self._last_ns) > stall_ns
            ):
                offset, length = chunk.span
                what = f"bytes {offset} to {offset + length} of {chunk.version.model}/{chunk.name}"
                why = self._why(chunk.sources)
                self._settle(chunk, Unavailable(f"{what} come from nobody: {why}"))

    def _set_timer(self, now: Nanoseconds) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._chunks:
            # Pauses end, other processes finish, and slow peers are noticed.
            self._timer = asyncio.get_running_loop().call_later(0.2, self._pump)

    def _settle(self, chunk: _Chunk, error: Exception | None = None) -> None:
        if chunk.done.done():
            return
        if error is None:
            self._progress.came(chunk.version.model, chunk.span[1], self._clock())
            chunk.done.set_result(None)
        else:
            self._progress.wanted(chunk.version.model, -chunk.span[1], self._clock())
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

    async def _fetch(self, peer: SourcePeer, chunk: _Chunk, *, is_second: bool) -> None:
        with contextlib.ExitStack() as stack:
            if not is_second:
                is_mine = await self._on_thread(
                    lambda: stack.enter_context(chunk.map.claimed(chunk.index))
                )
                if await self._on_thread(lambda: chunk.map.is_here(chunk.index)):
                    self._settle(chunk)
                    return
                if not is_mine:
                    chunk.since_ns = self._clock()
                    chunk.blocked_until_ns = chunk.since_ns + _ELSEWHERE_NS
                    return
            await self._fetch_claimed(peer, chunk)

    async def _fetch_claimed(self, peer: SourcePeer, chunk: _Chunk) -> None:
        began = self._clock()
        transfer = asyncio.ensure_future(self._transfer(peer, chunk))
        try:
            await asyncio.wait((transfer, chunk.done), return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not transfer.done():  # another peer was faster, or nobody wants it any more
                transfer.cancel()
        if chunk.done.done():
            await asyncio.gather(transfer, return_exceptions=True)
            return
        now = self._clock()
        try:
            content = transfer.result()
        except _AbsentError:
            chunk.sources.said_absent(peer.name, now)
            return
        except _FailedError as error:
            self._gate(peer).window.lost()
            peer.failed(str(error), now)
            _log.warning("source_failed", peer=peer.name, file=chunk.name, why=str(error))
            return
        found = await self._on_thread(lambda: hashlib.sha256(content).hexdigest())
        if found != chunk.digest:
            self.lies += 1
            why = f"its bytes of {chunk.name} have another digest than was recorded"
            peer.lied(why, self._clock())
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
                self.fetched(len(content))
            self._settle(chunk)

    async def _transfer(self, peer: SourcePeer, chunk: _Chunk) -> bytearray:
        """Returns the bytes of a chunk as a peer sends them."""
        offset, length = chunk.span
        content = bytearray(length)
        recorded = chunk.version.kept.record.files[chunk.name]

        def came(nbytes: int) -> None:
            chunk.since_ns = self._clock()
            if next(iter(chunk.fetchers), peer.name) == peer.name:
                chunk.received += nbytes

        def part(at: int, size: int) -> FilePart:
            version = chunk.version
            return FilePart(
                version.model, version.content, chunk.name, recorded.sha256, offset + at, size
            )

        await self._all_pieces(peer, part, memoryview(content), 0, came)
        return content

    async def _whole(self, peer: SourcePeer, first: FilePart) -> bytes:
        """Returns a file whose size only the peer knows."""
        start = bytearray(PIECE_BYTES)
        answer = await self._piece(peer, first, memoryview(start))
        if answer.size > LARGEST_RECORD_BYTES:
            raise _FailedError(f"its {first.path} has {answer.size} bytes")
        content = bytearray(answer.size)
        content[:PIECE_BYTES] = start[: answer.size]

        def part(at: int, size: int) -> FilePart:
            return FilePart(first.model, first.content, first.path, first.sha256, at, size)

        await self._all_pieces(peer, part, memoryview(content), PIECE_BYTES, lambda _: None)
        return bytes(content)

    async def _all_pieces(
        self,
        peer: SourcePeer,
        part: Callable[[int, int], FilePart],
        into: memoryview,
        begin: int,
        came: Callable[[int], None],
    ) -> None:
        async def one(at: int) -> None:
            size = min(PIECE_BYTES, len(into) - at)
            await self._piece(peer, part(at, size), into[at : at + size])
            came(size)

        begins: Iterator[int] = iter(range(begin, len(into), PIECE_BYTES))
        tasks = [asyncio.ensure_future(one(at)) for at in begins]
        try:
            await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    async def _piece(self, peer: SourcePeer, part: FilePart, into: memoryview) -> ContentAnswer:
        """Returns the answer of a peer that has given a piece, which is in `into` then.

        Raises:
            _AbsentError: The peer does not have it.
            _FailedError: The peer does not answer, or is busy for long.
        """
        gate = self._gate(peer)
        await gate.enter()
        try:
            for _ in range(_POSTPONEMENTS):
                await asyncio.sleep(self._rate.wait_ns(part.length, self._clock()) / _SECOND_NS)
                began = self._clock()
                answer = await self._ask(peer.name, part, into)
                now = self._clock()
                if answer.verdict == GIVEN:
                    gate.window.answered(now - began, now)
                    self._last_ns = now
                    return answer
                if answer.verdict == ABSENT:
                    raise _AbsentError
                if answer.verdict != BUSY:
                    raise _FailedError(f"its verdict {answer.verdict} is unknown here")
                delay_ns = min(_LONGEST_POSTPONEMENT_NS, max(1_000_000, answer.retry_after_ns))
                await asyncio.sleep(delay_ns / _SECOND_NS)
            raise _FailedError("it is busy all the time")
        finally:
            gate.leave()

    async def _ask(self, peer: str, part: FilePart, into: memoryview) -> ContentAnswer:
        number = next(self._numbers)
        answered: asyncio.Future[ContentAnswer] = asyncio.get_running_loop().create_future()
        answered.add_done_callback(_look)
        self._asked[number] = _Asked(peer, into, answered)
        wait_s = self._settings.answer_s
        try:
            async with asyncio.timeout(wait_s):
                link = await self._hub.link_to(peer, wait_s)
                await push_request(link, number, part, wait_s)
                return await answered
        except TimeoutError:
            raise _FailedError(f"it did not answer within {wait_s:g} s") from None
        except CatenaryError as error:
            raise _FailedError(error.message) from None
        finally:
            del self._asked[number]

    def _gate(self, peer: SourcePeer) -> _Gate:
        gate = self._gates.get(peer.name)
        if gate is None:
            gate = self._gates[peer.name] = _Gate()
        return gate

    async def _on_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _look(done: asyncio.Future[T]) -> None:
    """Looks at the exception of a future that perhaps nobody waits for."""
    if not done.cancelled():
        done.exception()
