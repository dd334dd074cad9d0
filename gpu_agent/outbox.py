"""What waits to be told to the scheduler, also while there is none."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from services.log import get_logger

if TYPE_CHECKING:
    from gpu_agent.engine.reporting import Outgoing

_log = get_logger("gpu_agent.outbox")


class Outbox:
    """A bounded queue that outlives connections.

    Not a `PackedWriter`, which refuses the newest message and loses what a broken stream had
    taken: the agent prefers to drop the oldest report, and keeps what was not sent.

    Invariant: never more than `capacity` messages; one that is not droppable goes only when all
    of them are such.
    """

    def __init__(self, capacity: int = 16_384) -> None:
        """Holds at most `capacity` messages."""
        self._capacity = capacity
        self._queue: deque[Outgoing] = deque()
        self._filled = asyncio.Event()
        self.dropped = 0
        """Messages dropped so far because nobody took them."""

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, message: Outgoing) -> None:
        """Queues a message; when full, drops the oldest report instead of failing."""
        self._queue.append(message)
        self._shrink()
        self._filled.set()

    async def take(self, limit: int, timeout_s: float) -> list[Outgoing]:
        """Returns everything queued (up to `limit`), or nothing after `timeout_s`."""
        if not self._queue:
            self._filled.clear()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._filled.wait()
            except TimeoutError:
                return []
        return [self._queue.popleft() for _ in range(min(limit, len(self._queue)))]

    def put_back(self, messages: Sequence[Outgoing]) -> None:
        """Queues what `take` returned in front again: the stream broke while it was sent."""
        self._queue.extendleft(reversed(messages))
        self._shrink()
        self._filled.set()

    def _shrink(self) -> None:
        if len(self._queue) <= self._capacity:
            return
        # Rare (a scheduler away for long under load), so a whole tenth goes at once.
        excess = len(self._queue) - self._capacity + self._capacity // 10
        kept: deque[Outgoing] = deque()
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
