"""Bounded memory for frames: segments cut into slots of power-of-two sizes.

A `MemoryPool` is a budget of bytes. Each link takes a `MemoryShare` of it and grows the share by
whole segments, pre-faulted so that filling a slot never waits for the kernel. A released slot is
kept for the next frame of that size; segments without a used slot are freed when another size or
link needs the bytes. A request that finds no memory waits in a queue, with a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import mmap
import os
from collections import deque
from collections.abc import Callable

import numpy as np

from catenary_services.errors import Overloaded, PayloadTooLarge

SMALLEST_SLOT = 4096
_SMALL_SEGMENT = 256 << 10
_IN_THREAD = 2 << 20
"""Segments of at least this size are made on a thread, because zeroing their pages would block the
event loop."""
_F_SEAL_FUTURE_WRITE = 0x0010
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE
_HUGE_PAGE = 2 << 20


class MemorySegment:
    """A mapping of whole pages, cut into equal slots.

    It is freed when nothing refers to it any more.
    """

    __slots__ = ("fd", "number", "slot_bytes", "used", "view")

    def __init__(self, memory: mmap.mmap, fd: int = -1) -> None:
        self.view = memoryview(memory)
        self.fd = fd
        self.number = 0
        self.slot_bytes = 0
        self.used = 0

    def close_fd(self) -> None:
        """Closes the descriptor; the mapping stays."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close_fd()


def private_segment(nbytes: int) -> MemorySegment:
    """Returns pre-faulted memory of this process."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if nbytes >= _HUGE_PAGE:
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    np.frombuffer(memory, np.uint8).fill(0)
    return MemorySegment(memory)


def shared_segment(nbytes: int) -> MemorySegment:
    """Returns pre-faulted memory behind a descriptor that peers can map, but only for reading.

    It can neither shrink (which would kill a reader with SIGBUS) nor be mapped for writing again.
    """
    fd = os.memfd_create("catenary", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, nbytes)
        memory = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return MemorySegment(memory, fd)


class MemoryBlock:
    """The memory of one slot."""

    __slots__ = ("offset", "segment")

    def __init__(self, segment: MemorySegment, offset: int) -> None:
        self.segment = segment
        self.offset = offset

    def view(self, nbytes: int) -> memoryview:
        """Returns the first `nbytes` bytes of the slot, writable."""
        return self.segment.view[self.offset : self.offset + nbytes]


class MemoryPool:
    """A budget of bytes that the shares of one endpoint divide among themselves."""

    def __init__(self, capacity: int, make: Callable[[int], MemorySegment]) -> None:
        self.capacity = capacity
        self.make = make
        self.reserved = 0
        self.shares: list[MemoryShare] = []

    def try_reserve(self, share: MemoryShare, nbytes: int) -> bool:
        """Books `nbytes` for `share` if there is room, after dropping idle segments if needed."""
        limit = max(self.capacity // 2, nbytes)
        if share.reserved + nbytes > limit:
            share.drop_idle(share.reserved + nbytes - limit)
            if share.reserved + nbytes > limit:
                return False
        for other in (*(item for item in self.shares if item is not share), share):
            if self.reserved + nbytes <= self.capacity:
                break
            other.drop_idle(self.reserved + nbytes - self.capacity)
        if self.reserved + nbytes > self.capacity:
            return False
        self.reserved += nbytes
        share.reserved += nbytes
        return True

    def unreserve(self, share: MemoryShare, nbytes: int) -> None:
        """Gives booked bytes back."""
        self.reserved -= nbytes
        share.reserved -= nbytes

    def serve_waiting(self) -> None:
        """Gives memory that is free now to requests that wait, in every share."""
        for share in tuple(self.shares):
            share.serve_waiting()


class MemoryShare:
    """The part of a pool that one link or connection holds."""

    def __init__(
        self,
        pool: MemoryPool,
        on_new: Callable[[MemorySegment], None] | None = None,
        on_drop: Callable[[MemorySegment], None] | None = None,
    ) -> None:
        self._pool = pool
        self._on_new = on_new
        self._on_drop = on_drop
        self._free: dict[int, list[MemoryBlock]] = {}
        self._segments: dict[int, MemorySegment] = {}
        self._waiting: deque[tuple[int, asyncio.Future[MemoryBlock | None]]] = deque()
        self._next_number = 1
        self._closed: Exception | None = None
        self.reserved = 0
        pool.shares.append(self)

    def _slot_bytes(self, nbytes: int) -> int:
        size = max(SMALLEST_SLOT, 1 << (nbytes - 1).bit_length())
        if size > self._pool.capacity:
            raise PayloadTooLarge(f"{nbytes} bytes never fit into {self._pool.capacity}")
        return size

    def _segment_bytes(self, slot_bytes: int) -> int:
        return max(slot_bytes, min(_SMALL_SEGMENT, self._pool.capacity // 16 & -slot_bytes))

    def try_acquire(self, nbytes: int) -> MemoryBlock | None:
        """Returns a slot that is free now, or None; never makes a large segment."""
        size = self._slot_bytes(nbytes)
        if self._closed is not None or self._waiting:
            return None
        block = self._take(size)
        if block is None and self._segment_bytes(size) < _IN_THREAD:
            total = self._segment_bytes(size)
            if self._pool.try_reserve(self, total):
                return self._add(self._make(total), size)
        return block

    async def acquire(self, nbytes: int, timeout_s: float) -> MemoryBlock:
        """Returns a slot of at least `nbytes` bytes.

        Raises:
            Overloaded: No slot became free within `timeout_s`.
            PayloadTooLarge: The pool is never large enough.
            Exception: The error that `close` was given.
        """
        block = self.try_acquire(nbytes)
        if block is not None:
            return block
        if self._closed is not None:
            raise self._closed
        size = self._slot_bytes(nbytes)
        granted = None
        if self._waiting or not self._pool.try_reserve(self, self._segment_bytes(size)):
            granted = await self._wait(size, timeout_s)
        return granted if granted is not None else await self._grow(size)

    async def _grow(self, size: int) -> MemoryBlock:
        total = self._segment_bytes(size)
        if total < _IN_THREAD:
            return self._add(self._make(total), size)
        try:
            segment = await asyncio.to_thread(self._pool.make, total)
            if self._closed is not None:
                raise self._closed
        except BaseException as error:
            self._pool.unreserve(self, total)
            self._pool.serve_waiting()
            if isinstance(error, OSError | MemoryError):
                raise Overloaded(f"no memory for {total} bytes") from error
            raise
        return self._add(segment, size)

    def _make(self, total: int) -> MemorySegment:
        try:
            return self._pool.make(total)
        except (OSError, MemoryError) as error:
            self._pool.unreserve(self, total)
            raise Overloaded(f"no memory for {total} bytes") from error

    def _add(self, segment: MemorySegment, size: int) -> MemoryBlock:
        segment.number = self._next_number
        self._next_number += 1
        segment.slot_bytes = size
        self._segments[segment.number] = segment
        if self._on_new is not None:
            self._on_new(segment)
        blocks = self._free.setdefault(size, [])
        blocks.extend(MemoryBlock(segment, at) for at in range(size, len(segment.view), size))
        segment.used += 1
        self.serve_waiting()
        return MemoryBlock(segment, 0)

    async def _wait(self, size: int, timeout_s: float) -> MemoryBlock | None:
        turn: asyncio.Future[MemoryBlock | None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(turn)
        except BaseException as error:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._return(size, turn.result())
            turn.cancel()
            self._waiting = deque(entry for entry in self._waiting if entry[1] is not turn)
            self._pool.serve_waiting()
            if isinstance(error, TimeoutError):
                raise Overloaded(
                    f"no slot of {size} bytes became free within {timeout_s:g} s",
                    retry_after_ns=100_000_000,
                ) from None
            raise

    def _return(self, size: int, granted: MemoryBlock | None) -> None:
        if granted is None:
            self._pool.unreserve(self, self._segment_bytes(size))
        else:
            self.release(granted)

    def _take(self, size: int) -> MemoryBlock | None:
        blocks = self._free.get(size)
        if not blocks:
            return None
        block = blocks.pop()  # the slot used last is still in the processor's cache
        block.segment.used += 1
        return block

    def release(self, block: MemoryBlock) -> None:
        """Takes a slot back."""
        segment = block.segment
        segment.used -= 1
        if self._closed is None:
            self._free[segment.slot_bytes].append(block)
        elif segment.used == 0:
            self._pool.unreserve(self, len(segment.view))
        self._pool.serve_waiting()

    def serve_waiting(self) -> None:
        """Gives memory that is free now to requests that wait, in their order."""
        while self._waiting:
            size, turn = self._waiting[0]
            if not turn.done():
                block = self._take(size)
                if block is None and not self._pool.try_reserve(self, self._segment_bytes(size)):
                    return
                turn.set_result(block)
            self._waiting.popleft()

    def drop_idle(self, nbytes: int) -> None:
        """Drops unused segments until `nbytes` have become free or none is left."""
        for segment in [item for item in self._segments.values() if item.used == 0]:
            if nbytes <= 0:
                return
            nbytes -= len(segment.view)
            del self._segments[segment.number]
            kept = [b for b in self._free[segment.slot_bytes] if b.segment is not segment]
            self._free[segment.slot_bytes] = kept
            self._pool.unreserve(self, len(segment.view))
            if self._on_drop is not None:
                self._on_drop(segment)

    def close(self, error: Exception) -> None:
        """Gives up everything unused; slots in use count until they are released."""
        if self._closed is not None:
            return
        self._closed = error
        for segment in self._segments.values():
            if segment.used == 0:
                self._pool.unreserve(self, len(segment.view))
        self._segments.clear()
        self._free.clear()
        for _, turn in self._waiting:
            if not turn.done():
                turn.set_exception(error)
        self._waiting.clear()
        self._pool.shares.remove(self)
        self._pool.serve_waiting()
