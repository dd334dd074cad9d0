"""Wakes the dispatcher when the set of agents that can be given work changes."""

from __future__ import annotations

from collections.abc import Callable

from catenary_scheduler.dispatch.availability import Availability
from catenary_scheduler.dispatch.events import Event, Tick
from catenary_scheduler.storage.clock import now_ns
from catenary_services.domain.ids import Nanoseconds


class AvailabilityWatch:
    """Compares the version of the availability with the one that the dispatcher last acted on."""

    def __init__(
        self, availability: Availability, feed: Callable[[Event, Nanoseconds], None]
    ) -> None:
        self._availability = availability
        self._feed = feed
        self._heeded = 0

    def tick(self, now: Nanoseconds) -> None:
        """Has the dispatcher decide again if the availability changed since the last call."""
        if self._availability.version != self._heeded:
            self._heeded = self._availability.version
            self._feed(Tick(), now)

    def heed(self) -> None:
        """Has the dispatcher decide again at once, before the next tick is due."""
        self.tick(now_ns())
