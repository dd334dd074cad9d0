"""The queue of messages to the scheduler, which keeps them while no scheduler leads."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
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

    It is no `PackWriter`, which refuses the newest message: the agent prefers to drop the oldest
    report.

    Invariant: there are at most `capacity` messages, and one that is not droppable is dropped only
    when there are no others.
    """

    def __init__(self, capacity: int = 16_384) -> None:
        self._capacity = capacity
        self._queue: deque[OutgoingMessage] = deque()
        self._send: Callable[[], None] | None = None
        """Takes what is due and sends it; None while no scheduler leads."""
        self._call: asyncio.Handle | None = None
        """The call of `_send` that is on its way."""
        self._linger_s = 0.0
        """Seconds that call was put off when it was made."""
        self.dropped = 0
        """Number of messages dropped so far because nobody took them."""

    def __len__(self) -> int:
        return len(self._queue)

    def serve(self, send: Callable[[], None]) -> None:
        """Has `send` called from now on, once for each time that messages are due."""
        self._send = send
        if self._queue:
            self._call_in(0.0)

    def rest(self) -> None:
        """Keeps messages from now on, because no scheduler leads. Idempotent."""
        self._send = None
        self._cancel()

    def put(self, message: OutgoingMessage) -> None:
        """Queues a message; when full, drops the oldest report instead of failing.

        Mere reports wait up to `LINGER_S` for more of them, or `AS_BOOKED_LINGER_S`; all other
        messages are due at once.
        """
        self._queue.append(message)
        if len(self._queue) > self._capacity:
            self._shrink()
        if self._send is None:
            return
        if not message.droppable or len(self._queue) >= _ENOUGH:
            self._call_in(0.0)
        else:
            self._call_in(AS_BOOKED_LINGER_S if message.is_as_booked else LINGER_S)

    def take(self, limit: int) -> list[OutgoingMessage]:
        """Returns up to `limit` queued messages; if that is not all, the others are due."""
        self._cancel()
        taken = [self._queue.popleft() for _ in range(min(limit, len(self._queue)))]
        if self._queue and self._send is not None:
            self._call_in(0.0)
        return taken

    def _call_in(self, linger_s: float) -> None:
        if self._call is not None:
            if linger_s >= self._linger_s:
                return
            self._call.cancel()
        assert self._send is not None
        loop = asyncio.get_running_loop()
        self._linger_s = linger_s
        self._call = (
            loop.call_later(linger_s, self._send) if linger_s else loop.call_soon(self._send)
        )

    def _cancel(self) -> None:
        if self._call is not None:
            self._call.cancel()
            self._call = None

    def _shrink(self) -> None:
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
