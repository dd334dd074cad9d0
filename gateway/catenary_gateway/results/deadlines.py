"""Deadlines of all requests, served by one timer."""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable, Collection

SLACK_S = 0.002
_FEW = 1_024


class Deadlines:
    """A registry of deadlines with one event-loop timer, set for the earliest of them.

    Most requests finish long before their deadline. Removing an entry from a heap is slow and a
    stale entry is harmless, so an entry stays until it is the earliest when the timer fires. The
    timer is then set for the first request still pending, so that under load it fires about once
    per usual time limit and not once per request. If stale entries far outnumber pending ones
    (long deadlines, quick answers), all of them are removed at once.
    """

    def __init__(self, expired: Callable[[int], None], pending: Collection[int]) -> None:
        self._expired = expired
        self._pending = pending
        self._heap: list[tuple[int, int]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ns = 0

    def add(self, number: int, deadline_ns: int) -> None:
        """Arranges a call of `expired(number)` soon after `deadline_ns` on the monotonic clock."""
        if len(self._heap) > max(_FEW, 4 * len(self._pending)):
            self._heap = [entry for entry in self._heap if entry[1] in self._pending]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (deadline_ns, number))
        if self._timer is None or deadline_ns < self._timer_ns:
            self._arm()

    def close(self) -> None:
        """Drops all deadlines and cancels the timer."""
        self._heap.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_ns = self._heap[0][0]
        # Event loops count in milliseconds: without the slack a timer fires too early and has to
        # be set again. A timer that is a little late serves all deadlines up to then.
        delay_s = max(0, self._timer_ns - time.monotonic_ns()) / 1e9 + SLACK_S
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._fire)

    def _fire(self) -> None:
        self._timer = None
        heap, pending = self._heap, self._pending
        while heap and (heap[0][1] not in pending or heap[0][0] <= time.monotonic_ns()):
            number = heapq.heappop(heap)[1]
            if number in pending:
                self._expired(number)
        if self._heap:
            self._arm()
