"""The NIXL library of one endpoint, called on one thread.

Each call may block for as long as the library likes, and its agents are not made for several
threads. Without a WRITE under way the thread waits for its queue and costs nothing; with one it
asks again and again whether it has ended, at growing intervals. What peers need of this process
meanwhile is done by NIXL's own thread, which sleeps until one of its connections has something.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.metadata
import importlib.util
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from catenary_services.errors import InvalidInput, PartitionLost, Unavailable
from catenary_services.log import get_logger
from catenary_services.transport.exchange import lost

PIECE_BYTES = 4 << 20
"""A frame is written in pieces of this size, which tell that it makes progress. Where the library
copies by itself, inside a machine, it keeps the interpreter for as long as a piece takes."""
ABANDONED_S = 30.0
"""Seconds after which a WRITE that cannot be aborted is left alone, with its memory."""
_BACKEND = "UCX"
_PACKAGES = ("nixl_cu13", "nixl_cu12", "nixl")
"""Packages that hold the library, built for one version of CUDA each; none is needed here."""
_SLEEP_US = 1_000_000
"""The longest sleep of NIXL's own thread. It is woken by its connections; 0, the default of NIXL's
Python layer, keeps a core busy."""
_FIRST_PAUSE_S = 20e-6
_LONGEST_PAUSE_S = 1e-3
_CLOSE_S = 10.0

T = TypeVar("T")
_log = get_logger("catenary_services.transport")


def is_installed() -> bool:
    """Returns True if a package with the library is installed, which need not work."""
    return any(importlib.util.find_spec(name) is not None for name in _PACKAGES)


def _bindings() -> tuple[Any, str]:
    """Returns the library's bindings, and its version.

    They have choices that its Python layer does not leave.
    """
    failures = []
    for name in _PACKAGES:
        try:
            found = importlib.import_module(f"{name}._bindings")
            return found, importlib.metadata.version(name)
        except ImportError as error:
            failures.append(str(error))
    raise Unavailable(f"NIXL is not installed: {'; '.join(failures)}")


@dataclass(eq=False, slots=True)
class Registration:
    """Memory that NIXL may read and write."""

    memory: memoryview
    descriptor: Any
    metadata: bytes
    """NIXL's words for a peer that is to write into it."""

    @property
    def address(self) -> int:
        """Address of its first byte."""
        return address_of(self.memory)


@dataclass(eq=False, slots=True)
class Write:
    """A WRITE of bytes of this process into a peer's memory."""

    source: Registration
    begin: int
    """Offset of the bytes in `source`."""
    nbytes: int
    peer: str
    target: int
    """Address in the peer's process."""
    ended: asyncio.Future[None]
    """Done once NIXL no longer reads the bytes; with `PartitionLost` if they did not arrive."""
    written_bytes: int = 0
    """Bytes that have arrived."""
    handle: int | None = None
    """NIXL's handle of the piece under way."""
    abandoned_s: float | None = None
    """Time at which nobody wanted it any more."""


@dataclass(slots=True)
class _Library:
    """The objects of NIXL that the thread holds."""

    bindings: Any
    agent: Any
    backend: Any
    peers: dict[str, int] = field(default_factory=dict)
    """Number of links to each peer that is loaded."""


class NixlThread:
    """NIXL as one endpoint has it. Methods are called on the event loop."""

    def __init__(self, name: str) -> None:
        """Takes the name under which peers write to this process, which nobody else may have."""
        self.name = name
        self.version = ""
        """Version of the library, known after `start`."""
        self._loop = asyncio.get_running_loop()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._writes: list[Write] = []
        self._unwanted: list[Registration] = []
        """Memory to be deregistered once no WRITE reads it."""
        self._left: list[Write] = []
        """Writes that never ended; their memory must stay."""
        self._library: _Library | None = None
        self._thread = threading.Thread(target=self._run, name="nixl", daemon=True)
        self._ended: asyncio.Future[None] = self._loop.create_future()

    # ---- on the event loop ----

    async def start(self) -> None:
        """Starts the thread, and NIXL on it.

        Raises:
            Unavailable: NIXL is not installed, or does not work here.
        """
        self._thread.start()
        try:
            await self._call(self._open)
        except BaseException:
            await self.close()
            raise

    async def register(self, memory: memoryview) -> Registration:
        """Makes memory known to NIXL.

        Raises:
            Unavailable: NIXL does not take it.
        """
        return await self._call(lambda: self._register(memory))

    def deregister(self, registration: Registration) -> None:
        """Has NIXL forget memory, once no WRITE reads it."""
        self._jobs.put(lambda: self._unwanted.append(registration))

    async def add_peer(self, name: str, metadata: bytes) -> None:
        """Makes a peer and its memory known; to be undone by `remove_peer`.

        Raises:
            InvalidInput: NIXL cannot read the metadata, or they are of another peer.
        """
        await self._call(lambda: self._add_peer(name, metadata))

    def remove_peer(self, name: str) -> None:
        """Has NIXL forget a peer, if no other link goes there."""
        self._jobs.put(lambda: self._remove_peer(name))

    def write(self, source: Registration, begin: int, nbytes: int, peer: str, target: int) -> Write:
        """Begins to write bytes at offset `begin` of `source` to address `target` of a peer."""
        write = Write(source, begin, nbytes, peer, target, self._loop.create_future())
        self._jobs.put(lambda: self._writes.append(write))
        return write

    def abandon(self, write: Write) -> None:
        """Has a WRITE end soon, complete or not."""
        write.abandoned_s = time.monotonic()

    async def close(self) -> None:
        """Ends every WRITE, forgets all memory and ends the thread."""
        self._jobs.put(None)
        try:
            async with asyncio.timeout(_CLOSE_S):
                await asyncio.shield(self._ended)
        except TimeoutError:
            _log.warning("nixl_does_not_end")

    async def _call(self, function: Callable[[], T]) -> T:
        answer: asyncio.Future[T] = self._loop.create_future()

        def job() -> None:
            try:
                result = function()
            except Exception as error:  # for whoever waits; the thread goes on
                self._tell(answer, error)
            else:
                self._tell(answer, None, result)

        self._jobs.put(job)
        return await answer

    # ---- on the thread ----

    def _tell(
        self, answer: asyncio.Future[T], error: Exception | None, result: T | None = None
    ) -> None:
        def settle() -> None:
            if answer.done():
                return
            if error is None:
                answer.set_result(result)  # type: ignore[arg-type]
            else:
                answer.set_exception(error)
                answer.exception()  # nobody may be waiting for it

        try:
            self._loop.call_soon_threadsafe(settle)
        except RuntimeError:  # the loop has ended
            return

    def _run(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                job = self._jobs.get(timeout=pause_s if self._writes else None)
            except queue.Empty:
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            else:
                if job is None:
                    break
                job()
                pause_s = _FIRST_PAUSE_S
            if self._advance_all():
                pause_s = _FIRST_PAUSE_S
        with suppress(queue.Empty):
            while True:  # somebody may wait for what came behind the order to end
                if (job := self._jobs.get_nowait()) is not None:
                    job()
        self._end()
        self._tell(self._ended, None)

    def _open(self) -> None:
        bindings, self.version = _bindings()
        config = bindings.nixlAgentConfig()
        config.useProgThread = True
        config.useListenThread = False
        config.syncMode = bindings.NIXL_THREAD_SYNC_NONE
        config.pthrDelay = _SLEEP_US
        try:
            agent = bindings.nixlAgent(self.name, config)
            backend = agent.createBackend(_BACKEND, {})
        except Exception as error:  # the library's exceptions have no class of their own
            raise Unavailable(f"NIXL does not work here: {error}") from error
        self._library = _Library(bindings, agent, backend)

    def _opened(self) -> _Library:
        if self._library is None:
            raise Unavailable("NIXL was closed")
        return self._library

    def _register(self, memory: memoryview) -> Registration:
        nixl = self._opened()
        bindings = nixl.bindings
        where = (address_of(memory), len(memory), 0, b"")
        try:
            descriptor = bindings.nixlRegDList(bindings.DRAM_SEG, [where])
            nixl.agent.registerMem(descriptor, [nixl.backend])
            metadata = nixl.agent.getLocalPartialMD(descriptor, True, [nixl.backend])
        except Exception as error:
            raise Unavailable(f"NIXL takes no memory: {error}") from error
        return Registration(memory, descriptor, bytes(metadata))

    def _deregister_unwanted(self) -> None:
        used = {id(write.source) for write in self._writes}
        unwanted = self._unwanted
        self._unwanted = [each for each in unwanted if id(each) in used]
        for each in unwanted:
            if id(each) not in used and self._library is not None:
                _quietly(self._library.agent.deregisterMem, each.descriptor, [])

    def _add_peer(self, name: str, metadata: bytes) -> None:
        nixl = self._opened()
        if name != self.name:
            try:
                loaded = nixl.agent.loadRemoteMD(metadata)
            except Exception as error:
                raise InvalidInput("ring.metadata", f"NIXL cannot read it: {error}") from error
            loaded = loaded.decode("utf-8", "replace") if isinstance(loaded, bytes) else loaded
            if loaded != name:
                if loaded not in nixl.peers:
                    _quietly(nixl.agent.invalidateRemoteMD, loaded)
                raise InvalidInput("ring.metadata", "belongs to another peer")
        nixl.peers[name] = nixl.peers.get(name, 0) + 1

    def _remove_peer(self, name: str) -> None:
        if self._library is None:
            return
        peers = self._library.peers
        peers[name] -= 1
        if not peers[name]:
            del peers[name]
            if name != self.name:
                _quietly(self._library.agent.invalidateRemoteMD, name)

    def _advance_all(self) -> bool:
        """Looks at every WRITE; returns True if one moved on."""
        moved = False
        for write in tuple(self._writes):
            before = write.written_bytes
            error: PartitionLost | None = None
            try:
                is_over = self._advance(write)
            except PartitionLost as failure:
                is_over, error = True, failure
            if is_over:
                self._writes.remove(write)
                self._tell(write.ended, error)
            moved = moved or is_over or write.written_bytes != before
        if self._unwanted:
            self._deregister_unwanted()
        return moved

    def _advance(self, write: Write) -> bool:
        """Looks at a WRITE, and posts its next piece; returns True once it is complete.

        Raises:
            PartitionLost: It failed or was abandoned, and NIXL no longer reads the memory.
        """
        nixl = self._opened()
        if write.abandoned_s is not None:
            return self._abort(write, write.abandoned_s)
        piece_bytes = min(PIECE_BYTES, write.nbytes - write.written_bytes)
        try:
            if write.handle is None:
                write.handle = self._new_piece(write, piece_bytes)
                status = nixl.agent.postXferReq(write.handle)
            else:
                status = nixl.agent.getXferStatus(write.handle)
            if status == nixl.bindings.NIXL_IN_PROG:
                return False
            nixl.agent.releaseXferReq(write.handle)
        except Exception as error:
            self._give_up(write)
            raise lost("nixl", f"a WRITE failed: {error}") from error
        write.handle = None
        if status != nixl.bindings.NIXL_SUCCESS:
            raise lost("nixl", f"a WRITE failed: {status}")
        write.written_bytes += piece_bytes
        return write.written_bytes == write.nbytes

    def _new_piece(self, write: Write, nbytes: int) -> int:
        nixl = self._opened()
        bindings, at = nixl.bindings, write.written_bytes
        source = (write.source.address + write.begin + at, nbytes, 0)
        return int(
            nixl.agent.createXferReq(
                bindings.NIXL_WRITE,
                bindings.nixlXferDList(bindings.DRAM_SEG, [source]),
                bindings.nixlXferDList(bindings.DRAM_SEG, [(write.target + at, nbytes, 0)]),
                write.peer,
                "",
                [nixl.backend],
            )
        )

    def _abort(self, write: Write, since_s: float) -> bool:
        """Ends a WRITE that nobody wants; returns False if NIXL goes on with it for now."""
        if write.handle is not None and not self._give_up(write):
            if time.monotonic() - since_s < ABANDONED_S:
                return False
            self._left.append(write)
            _log.error("nixl_write_does_not_end", peer=write.peer)
        raise lost("nixl", "a WRITE was abandoned")

    def _give_up(self, write: Write) -> bool:
        """Releases the handle of a WRITE, which aborts it; returns False if NIXL cannot yet."""
        if write.handle is None or _quietly(self._opened().agent.releaseXferReq, write.handle):
            write.handle = None
            return True
        return False

    def _end(self) -> None:
        """Ends what is under way, and closes the library."""
        now_s = time.monotonic()
        for write in self._writes:
            write.abandoned_s = now_s
        while self._writes and time.monotonic() < now_s + _CLOSE_S / 2:
            if not self._advance_all():
                time.sleep(_LONGEST_PAUSE_S)
        for write in self._writes:
            self._tell(write.ended, lost("nixl", "the endpoint was closed"))
        nixl, self._library = self._library, None
        if nixl is None:
            return
        for name in nixl.peers:
            if name != self.name:
                _quietly(nixl.agent.invalidateRemoteMD, name)
        nixl.agent = nixl.backend = None  # it deregisters what is left when it goes


def _quietly(function: Callable[..., object], *arguments: object) -> bool:
    """Calls a function of NIXL; returns False if it failed."""
    try:
        function(*arguments)
    except Exception as error:
        _log.debug("nixl_call_failed", error=str(error))
        return False
    return True


def address_of(memory: memoryview) -> int:
    """Returns the address of the first byte of some memory."""
    return int(np.frombuffer(memory, np.uint8).__array_interface__["data"][0])
