"""Has the dispatcher look again when other agents can be given work than before."""

from __future__ import annotations

from collections.abc import Callable

from catenary_scheduler.dispatch.availability import Availability
from catenary_scheduler.dispatch.events import Event, Tick
from catenary_scheduler.storage.clock import now_ns
from catenary_services.domain.ids import Nanoseconds


class AvailabilityWatch:
    """Compares the version of the availability with the one the dispatcher acted on last."""

    def __init__(
        self, availability: Availability, feed: Callable[[Event, Nanoseconds], None]
    ) -> None:
        self._availability = availability
        self._feed = feed
        self._heeded = 0

    def tick(self, now: Nanoseconds) -> None:
        """Tells the dispatcher what impaired or cleared an agent, whoever said so."""
        if self._availability.version != self._heeded:
            self._heeded = self._availability.version
            self._feed(Tick(), now)

    def heed(self) -> None:
        """Tells the dispatcher at once, before the next tick is due."""
        self.tick(now_ns())
