"""The memory of one request body, into which a socket is read."""

from __future__ import annotations

import asyncio

import numpy as np

AT_ONCE_BYTES = 1 << 20
"""The most bytes that are set aside for a body before any of them came. More is set aside as bytes
come, so that a client that announces much and sends nothing holds nothing."""


class BodyBuffer:
    """The bytes of a body that is arriving, in one piece, and who waits for them."""

    __slots__ = ("_filled", "_memory", "_size", "_told", "_waiter")

    def __init__(self, size: int) -> None:
        self._size = size
        self._filled = 0
        # Unlike that of a bytearray, this memory is not filled with zeros first.
        self._memory = np.empty(min(size, AT_ONCE_BYTES), np.uint8)
        self._told = 0
        self._waiter: asyncio.Future[None] | None = None

    def room(self) -> memoryview:
        """Returns the memory for the next bytes."""
        if self._filled == len(self._memory) < self._size:
            larger = np.empty(min(self._size, 2 * len(self._memory)), np.uint8)
            larger[: self._filled] = self._memory
            self._memory = larger
        return self._memory.data[self._filled :]

    def took(self, count: int) -> None:
        """Notes that `count` bytes were written to the memory."""
        self._filled += count
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def append(self, data: bytes) -> None:
        """Adds bytes that were read elsewhere; there are no more of them than are missing."""
        at = 0
        while at < len(data):
            room = self.room()
            piece = data[at : at + len(room)]
            room[: len(piece)] = piece
            self.took(len(piece))
            at += len(piece)

    async def more(self) -> int:
        """Waits for bytes, and returns how many came since the last call; 0 if all were told of."""
        if self._told == self._filled < self._size:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
            self._waiter = None
        count = self._filled - self._told
        self._told = self._filled
        return count

    def whole(self) -> memoryview:
        """Returns all bytes, once all are there."""
        assert self._filled == self._size
        return self._memory.data.toreadonly()
