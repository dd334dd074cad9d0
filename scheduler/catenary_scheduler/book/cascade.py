"""Propagation of a delay: which booked uses must move when one took longer than booked.

Every use that can still move keeps its place in the order of each of its resources and in the chain
of its batch. It moves later, never earlier, and no further than it must. Both orders run forward in
time, so visiting the displaced uses by their old start visits each of them once, after everything
that can displace it.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

from catenary_scheduler.book.core import BookedInterval
from catenary_services.domain.ids import Nanoseconds


class Cascade:
    """A set of displaced uses and the new starts it implies. It moves nothing itself."""

    def __init__(self, successor: Callable[[BookedInterval], BookedInterval | None]) -> None:
        self._successor = successor
        self._floor: dict[BookedInterval, Nanoseconds] = {}
        self._pending: list[tuple[Nanoseconds, int, BookedInterval]] = []

    def displace(self, use: BookedInterval | None, floor: Nanoseconds) -> None:
        """Requires that `use`, if there is one, does not start before `floor`."""
        if use is None or use.start >= floor:
            return
        known = self._floor.get(use)
        if known is None:
            heappush(self._pending, (use.start, len(self._floor), use))
        self._floor[use] = floor if known is None else max(known, floor)

    def moves(self) -> list[tuple[BookedInterval, Nanoseconds]]:
        """Returns every displaced use with its new start, a moment in nanoseconds."""
        found: list[tuple[BookedInterval, Nanoseconds]] = []
        while self._pending:
            use = heappop(self._pending)[2]
            # Time whose real use is known stays as it is, so nothing moves to before `done_until`.
            start = max(self._floor[use], *(line.done_until for line in use.timelines))
            found.append((use, start))
            end = start + use.end - use.start
            for line in use.timelines:
                self.displace(line.after(use), end)
            self.displace(self._successor(use), end)
        return found
