"""Links between servers as agents measured them: kept, and aged. Pure: time is an argument."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from catenary_scheduler.planning.live import LinkFigures, ServerLinks, ServerPair
from catenary_scheduler.storage.values.codec import encode_document
from catenary_scheduler.storage.values.stored import ServerLink, StoredServerLink
from catenary_scheduler.storage.values.tables import server_link_name

_KEPT = 10_000
FRESH_S = 6 * 3600
"""Seconds after which a link is measured again."""


@dataclass(frozen=True, slots=True)
class MeasuredLink:
    """The figures of a link, with what they hold for."""

    figures: LinkFigures
    unix_s: int
    """The moment of the measurement, by the calendar's clock: figures outlive processes."""
    addresses: str
    """The addresses of both ends; with others it is another link."""


class MeasuredLinks:
    """The last figures of every link between servers; what was measured first is forgotten first.

    Attributes:
        known: All figures, for planners. Another object whenever one of them changes.
    """

    def __init__(self) -> None:
        self._links: dict[ServerPair, MeasuredLink] = {}
        self.known = ServerLinks()

    def put(self, pair: ServerPair, link: MeasuredLink) -> None:
        """Takes in what was measured."""
        self._links.pop(pair, None)
        self._links[pair] = link
        while len(self._links) > _KEPT:
            del self._links[next(iter(self._links))]
        self.known = ServerLinks({pair: each.figures for pair, each in self._links.items()})

    def forget(self, pair: ServerPair) -> None:
        """Drops the figures of a link that does not pass a network any more."""
        if self._links.pop(pair, None) is not None:
            self.known = ServerLinks({pair: each.figures for pair, each in self._links.items()})

    def of(self, pair: ServerPair) -> MeasuredLink | None:
        """Returns the figures of a link, however old they are; None if it was never measured."""
        return self._links.get(pair)

    def measured_s(
        self, pair: ServerPair, addresses: str, unix_s: int, fresh_s: int = FRESH_S
    ) -> int:
        """Returns when a link was measured last.

        Returns 0 if that is `fresh_s` seconds ago or more, or was another link.
        """
        link = self._links.get(pair)
        if link is None or link.addresses != addresses:
            return 0
        return link.unix_s if 0 <= unix_s - link.unix_s < fresh_s else 0

    def all(self) -> Iterator[tuple[ServerPair, MeasuredLink]]:
        """Yields every link with its figures."""
        yield from self._links.items()

    def records(self) -> dict[str, str | None]:
        """Returns the fields that Redis keeps, one for each link."""
        return {
            server_link_name(*pair): encode_document(
                StoredServerLink(
                    link.figures.round_trip_ns,
                    link.figures.bytes_per_second,
                    link.unix_s,
                    link.addresses,
                )
            )
            for pair, link in self._links.items()
        }

    def restore(self, links: Mapping[ServerLink, StoredServerLink]) -> None:
        """Takes over what an earlier scheduler had measured, the oldest first."""
        for pair, link in sorted(links.items(), key=lambda each: each[1].measured_unix_s):
            figures = LinkFigures(link.round_trip_ns, link.bytes_per_second)
            measured = MeasuredLink(figures, link.measured_unix_s, link.addresses)
            self.put((pair.source, pair.target), measured)
