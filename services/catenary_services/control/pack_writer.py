"""A bounded queue in front of a control stream, which packs what comes within one turn of the loop.

A pack of one message costs as much as the message again. `put` therefore only appends; at the end
of the turn all of it goes, or a moment later where packs are to be some time apart.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

from catenary_services.errors import Overloaded

LINGER_S = 0.01
"""The longest time for which `put_soon` lets a message wait for another one to go with."""
MOST_AT_ONCE = 4096
"""The most messages of one pack, because the reader limits the number of values in a message."""

M = TypeVar("M")


class PackWriter(Generic[M]):
    """Writes messages to one stream, in the order in which they were put."""

    __slots__ = (
        "_capacity",
        "_due_s",
        "_is_full",
        "_loop",
        "_queue",
        "_spacing_s",
        "_timer",
        "_write",
        "_wrote_s",
    )

    def __init__(
        self,
        write: Callable[[list[M]], None],
        is_full: Callable[[], bool],
        capacity: int = 65536,
        spacing_s: float = 0.0,
    ) -> None:
        """Creates a writer.

        Args:
            write: Writes a pack.
            is_full: Returns True while the peer reads too slowly; `resumed` ends that.
            capacity: The most messages that may wait.
            spacing_s: Seconds between two packs, at the least.
        """
        self._write = write
        self._is_full = is_full
        self._capacity = capacity
        self._spacing_s = spacing_s
        self._loop = asyncio.get_running_loop()
        self._queue: list[M] = []
        self._timer: asyncio.Handle | None = None
        """The call of `flush` that is on its way; None if there is none."""
        self._due_s = 0.0
        """Time of the call of `flush` on the loop's clock; 0 if it comes in the next turn."""
        self._wrote_s = 0.0

    @property
    def pending(self) -> int:
        """Number of messages that wait."""
        return len(self._queue)

    def put(self, message: M) -> None:
        """Queues a message for the next pack.

        Raises:
            Overloaded: `capacity` messages wait already; the message was not queued.
        """
        self._append(message)
        if self._timer is None or self._due_s:
            self._flush_in(0.0)

    def put_soon(self, message: M) -> None:
        """Queues a message to be sent with the next one, or at the latest after `LINGER_S`.

        Raises:
            Overloaded: As by `put`.
        """
        self._append(message)
        if self._timer is None:
            self._flush_in(LINGER_S)

    def flush(self) -> None:
        """Writes what waits, unless the peer reads too slowly."""
        self._cancel()
        while self._queue and not self._is_full():
            pack, self._queue = self._queue[:MOST_AT_ONCE], self._queue[MOST_AT_ONCE:]
            if self._spacing_s:
                self._wrote_s = self._loop.time()
            self._write(pack)

    def resumed(self) -> None:
        """Goes on after the peer has read."""
        if self._queue and self._timer is None:
            self._flush_in(0.0)

    def close(self) -> None:
        """Forgets the messages that wait, because the stream is over."""
        self._cancel()
        self._queue.clear()

    def _append(self, message: M) -> None:
        if len(self._queue) >= self._capacity:
            text = f"{len(self._queue)} messages wait for a peer that does not read them"
            raise Overloaded(text)
        self._queue.append(message)

    def _flush_in(self, seconds: float) -> None:
        due_s = 0.0
        if self._spacing_s or seconds:
            now_s = self._loop.time()
            due_s = max(now_s + seconds, self._wrote_s + self._spacing_s)
            if due_s <= now_s:
                due_s = 0.0
        if self._timer is not None:
            if due_s >= self._due_s > 0.0:
                return
            self._timer.cancel()
        self._due_s = due_s
        if due_s:
            self._timer = self._loop.call_at(due_s, self.flush)
        else:
            self._timer = self._loop.call_soon(self.flush)

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._due_s = 0.0
