"""The queue of messages to the scheduler, which keeps them while no scheduler leads."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from catenary_services.log import get_logger

if TYPE_CHECKING:
    from catenary_agent.engine.reporting import OutgoingMessage

_log = get_logger("catenary_agent.outbox")

LINGER_S = 0.01
"""Seconds for which mere reports are gathered: a write costs far more than a report in it."""
AS_BOOKED_LINGER_S = 0.02
"""The same for reports that all is as booked. It is well below the time after which the scheduler
gives up a batch of which it hears nothing (`overdue_grace_ms`, 50 at least)."""
_ENOUGH = 64
"""The number of messages from which on they are sent at once."""


class Outbox:
    """A bounded queue that outlives connections.

    It is no `PackedWriter`, which refuses the newest message and loses what a broken stream has
    taken: the agent prefers to drop the oldest report, and keeps what was not sent.

    Invariant: there are at most `capacity` messages, and one that is not droppable is dropped only
    when there are no others.
    """

    def __init__(self, capacity: int = 16_384) -> None:
        self._capacity = capacity
        self._queue: deque[OutgoingMessage] = deque()
        self._due = asyncio.Event()
        """Set when the queued messages are to be sent."""
        self._linger: asyncio.TimerHandle | None = None
        self._lingers_long = False
        self.dropped = 0
        """Number of messages dropped so far because nobody took them."""

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, message: OutgoingMessage) -> None:
        """Queues a message; when full, drops the oldest report instead of failing."""
        self._queue.append(message)
        if len(self._queue) > self._capacity:
            self._shrink()
        if self._due.is_set():
            return
        if not message.droppable or len(self._queue) >= _ENOUGH:
            self._due.set()
        elif self._linger is None or (self._lingers_long and not message.is_as_booked):
            self._linger_until_due(message.is_as_booked)

    def _linger_until_due(self, long: bool) -> None:
        if self._linger is not None:
            self._linger.cancel()
        self._lingers_long = long
        linger_s = AS_BOOKED_LINGER_S if long else LINGER_S
        self._linger = asyncio.get_running_loop().call_later(linger_s, self._due.set)

    async def take(self, limit: int, timeout_s: float) -> list[OutgoingMessage]:
        """Returns up to `limit` queued messages; after `timeout_s` seconds even if there are none.

        Mere reports wait up to `LINGER_S` for more of them, or `AS_BOOKED_LINGER_S`; all other
        messages are sent at once.
        """
        if not self._due.is_set():
            ending = asyncio.get_running_loop().call_later(timeout_s, self._due.set)
            try:
                await self._due.wait()
            finally:
                ending.cancel()
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None
        taken = [self._queue.popleft() for _ in range(min(limit, len(self._queue)))]
        if self._queue:
            self._due.set()
        else:
            self._due.clear()
        return taken

    def put_back(self, messages: Sequence[OutgoingMessage]) -> None:
        """Puts messages back to the front after the stream broke while they were sent."""
        self._queue.extendleft(reversed(messages))
        self._shrink()
        self._due.set()

    def _shrink(self) -> None:
        if len(self._queue) <= self._capacity:
            return
        # Rare (a scheduler is away for long under load), so a tenth of the capacity goes at once.
        excess = len(self._queue) - self._capacity + self._capacity // 10
        kept: deque[OutgoingMessage] = deque()
        for message in self._queue:
            if excess > 0 and message.droppable:
                excess -= 1
                self.dropped += 1
            else:
                kept.append(message)
        while len(kept) > self._capacity:
            kept.popleft()
            self.dropped += 1
        self._queue = kept
        _log.warning("reports_dropped", total=self.dropped)
