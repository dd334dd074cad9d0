"""Rates at which caches travel between agents: measured as sessions move, and remembered."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from catenary_scheduler.packing.transfers.link_rates import LinkRate
from catenary_scheduler.storage.values.stored import Link
from catenary_scheduler.storage.values.tables import link_name
from catenary_services.domain.ids import AgentId, Nanoseconds

_KEPT = 10_000
_NOTABLE = 0.05
"""A rate is reported again when it differs from the last reported one by more than this share."""


class CacheRates:
    """Bytes per second by sender and receiver; the link measured first is forgotten first."""

    def __init__(self) -> None:
        self._rates: dict[Link, LinkRate] = {}
        self._told: dict[Link, int] = {}

    def observe(self, link: Link, size: int, sending_ns: Nanoseconds) -> int | None:
        """Adds one transfer to the rate of a link.

        Args:
            link: The sending and the receiving agent.
            size: Bytes of caches that were sent.
            sending_ns: Time in which at least one frame of them was on its way.

        Returns:
            The rate in bytes per second if it differs notably from the last one returned, else
                None.
        """
        rate = self._rates.get(link) or LinkRate()
        if not rate.add(size, sending_ns):
            return None
        self._rates[link] = rate
        told = self._told.get(link, 0)
        if abs(rate.bytes_per_second - told) <= _NOTABLE * told:
            return None
        self._tell(link, rate.bytes_per_second)
        return rate.bytes_per_second

    def rates(self) -> Iterator[tuple[AgentId, AgentId, int]]:
        """Yields sender, receiver and the last reported bytes per second of every measured link."""
        for (source, target), bytes_per_second in self._told.items():
            yield source, target, bytes_per_second

    def records(self) -> dict[str, str | None]:
        """Returns the fields that Redis keeps: a rate in bytes per second for each link."""
        return {link_name(source, target): str(rate) for source, target, rate in self.rates()}

    def restore(self, links: Mapping[Link, int]) -> None:
        """Takes over the rates, in bytes per second, that an earlier scheduler measured."""
        for link, bytes_per_second in links.items():
            self._rates[link] = LinkRate(bytes_per_second)
            self._tell(link, bytes_per_second)

    def _tell(self, link: Link, bytes_per_second: int) -> None:
        self._told[link] = bytes_per_second
        while len(self._told) > _KEPT:
            oldest = next(iter(self._told))
            del self._told[oldest]
            self._rates.pop(oldest, None)
