"""A writer that packs queued messages into as few sends on a stream as possible.

A gRPC write costs more than a hundred small envelopes inside it. `put` therefore only appends;
while one send is under way, and for a moment after the last one began where the writer was told to
wait so long, the next batch gathers behind it. So packing grows with load by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from catenary_services.errors import DeadlineExceeded, Overloaded

LINGER_S = 0.01
"""The longest time for which `put_soon` lets a message wait for another one to go with."""
_TICK_S = 0.001
"""Seconds by which event loops round their timers."""
MOST_AT_ONCE = 4096
"""The most messages of one send, because the reader limits the number of values in a message."""

M = TypeVar("M")


class PackedWriter(Generic[M]):
    """A bounded queue in front of a stream, used from one event loop.

    Invariant: the writer sleeps only while nothing is due, so `put` needs to wake it once per batch
    and not once per message. What is queued but not due was put soon, and the timer runs.
    """

    __slots__ = (
        "_began_s",
        "_capacity",
        "_flushed",
        "_is_due",
        "_queue",
        "_send",
        "_since_s",
        "_sleeping",
        "_spacing_s",
        "_timer",
        "_wake",
    )

    def __init__(
        self,
        send: Callable[[list[M]], Awaitable[None]],
        capacity: int = 65536,
        spacing_s: float = 0.0,
    ) -> None:
        """Creates a writer that sends nothing before `run`.

        Args:
            send: Sends a batch.
            capacity: The most messages that may wait.
            spacing_s: Seconds from the beginning of one send to that of the next, at the least.
        """
        self._send = send
        self._capacity = capacity
        self._spacing_s = spacing_s
        self._began_s = 0.0
        self._queue: list[M] = []
        self._wake: asyncio.Future[None] | None = None
        """The alarm for which `run` waits while it sleeps."""
        self._flushed: asyncio.Future[None] | None = None
        """The end of the present sends, for those who flush; None while nobody does."""
        self._sleeping = True
        self._is_due = False
        self._since_s = 0.0
        """Time at which the oldest message that is not due was queued."""
        self._timer: asyncio.TimerHandle | None = None

    @property
    def pending(self) -> int:
        """Number of messages put but not yet taken by a send."""
        return len(self._queue)

    def put(self, message: M) -> None:
        """Queues a message for the next send.

        Raises:
            Overloaded: `capacity` messages wait already; the message was not queued.
        """
        queue = self._queue
        if len(queue) >= self._capacity:
            raise Overloaded(f"{len(queue)} messages wait for a peer that does not read them")
        queue.append(message)
        self._is_due = True
        if self._sleeping:
            self._wake_up()

    def put_soon(self, message: M) -> None:
        """Queues a message to be sent with the next one, or at the latest after `LINGER_S`.

        A write costs far more than each message in it, and under load the next message comes soon.

        Raises:
            Overloaded: As by `put`.
        """
        queue = self._queue
        if len(queue) >= self._capacity:
            raise Overloaded(f"{len(queue)} messages wait for a peer that does not read them")
        loop = asyncio.get_running_loop()
        if not queue:
            self._since_s = loop.time()
        queue.append(message)
        if self._timer is None:
            self._timer = loop.call_later(LINGER_S, self._lingered, loop)

    def _lingered(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        if not self._queue or self._is_due:
            return
        left_s = self._since_s + LINGER_S - loop.time()
        if left_s >= _TICK_S:
            # Those that the timer was set for went with another message.
            self._timer = loop.call_later(left_s, self._lingered, loop)
            return
        self._is_due = True
        if self._sleeping:
            self._wake_up()

    def _wake_up(self) -> None:
        self._sleeping = False
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    async def run(self) -> None:
        """Sends until it is cancelled. An error of `send` is raised here, and its batch is lost."""
        loop = asyncio.get_running_loop()
        while True:
            if not self._is_due:
                self._sleeping = True
                if self._flushed is not None and not self._queue:
                    self._flushed.set_result(None)
                    self._flushed = None
                self._wake = loop.create_future()
                await self._wake
            early_s = self._began_s + self._spacing_s - loop.time()
            if early_s > 0:
                await asyncio.sleep(early_s)
            self._began_s = loop.time()
            batch, self._queue = self._queue[:MOST_AT_ONCE], self._queue[MOST_AT_ONCE:]
            self._is_due = bool(self._queue)
            await self._send(batch)

    async def flush(self, timeout_s: float) -> None:
        """Returns once everything put so far was sent, by a `run` in another task.

        Raises:
            DeadlineExceeded: It was not sent within `timeout_s`.
        """
        if self._sleeping and not self._queue:
            return
        if self._flushed is None:
            self._flushed = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(self._flushed)  # others may be waiting for it, too
        except TimeoutError:
            raise DeadlineExceeded(
                f"{self.pending} messages were not sent within {timeout_s} s",
                details={"stage": "flush"},
            ) from None
