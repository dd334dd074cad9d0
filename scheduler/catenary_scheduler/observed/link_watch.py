"""Follows the round trips of links in use. Pure: time is an argument.

A link that was measured hours ago may carry the chains of a plan while it has long been slow. So
the round trips of links that chains pass are looked at again and again, by a few empty frames. The
shortest of several round trips is never too short; it may be too long, where the agents or the
network are at work. A shorter one is therefore believed at once, and a longer one when a second
look has found the like.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from catenary_scheduler.planning.live import LinkFigures, ServerPair
from catenary_services.domain.ids import AgentId, Nanoseconds, ServerId
from catenary_services.domain.plan import Plan

_NOTABLE = 0.15
"""Share by which a round trip must differ to count as another one: planners plan anew by the same
share."""
_LEAST_NS = 200_000
"""Nanoseconds by which it must differ, too: less is what processes take to wake up."""


def links_in_use(plan: Plan, servers: Mapping[AgentId, ServerId]) -> frozenset[ServerPair]:
    """Returns the links that chains of a plan pass, the way back to where each begins included.

    Args:
        plan: The plan.
        servers: The servers of the agents that are known.
    """
    return frozenset(
        (servers[before.agent], servers[hop.agent])
        for model in plan.models
        for chain in model.chains
        for before, hop in zip((chain.hops[-1], *chain.hops), chain.hops, strict=False)
        if before.agent in servers
        and hop.agent in servers
        and servers[before.agent] != servers[hop.agent]
    )


@dataclass(frozen=True, slots=True)
class _Look:
    at_ns: Nanoseconds
    longer_ns: Nanoseconds = 0
    """The round trip that was found, if it was longer than the known one; 0 if it was not."""


class LinkWatch:
    """Says which link is to be looked at, and what was found.

    Args:
        period_ns: Time between two looks at a link; after a longer round trip the next look is due
            at once.
    """

    def __init__(self, period_ns: Nanoseconds) -> None:
        self._period_ns = period_ns
        self._looks: dict[ServerPair, _Look] = {}

    def due(self, pairs: Iterable[ServerPair], now: Nanoseconds) -> ServerPair | None:
        """Returns the pair that was not looked at for longest; None if none is due.

        Args:
            pairs: The links in use whose figures are known. All others are forgotten.
            now: Time on the clock of this process.
        """
        self._looks = {pair: self._looks.get(pair) or _Look(now) for pair in pairs}
        waiting = [pair for pair, look in self._looks.items() if self._due_ns(look) <= now]
        return min(waiting, key=lambda pair: (self._due_ns(self._looks[pair]), pair), default=None)

    def looked(
        self, pair: ServerPair, known: LinkFigures, round_trip_ns: Nanoseconds, now: Nanoseconds
    ) -> LinkFigures | None:
        """Returns the new figures of a link if its round trip is another one, else None.

        Args:
            pair: The link that was looked at.
            known: Its figures until now.
            round_trip_ns: The shortest round trip of this look; 0 if none was found.
            now: Time on the clock of this process.
        """
        before = self._looks.get(pair)
        self._looks[pair] = _Look(now)
        if not _is_notable(known.round_trip_ns, round_trip_ns):
            return None
        if round_trip_ns < known.round_trip_ns:
            return replace(known, round_trip_ns=round_trip_ns)
        if before is None or not before.longer_ns:
            self._looks[pair] = _Look(now, round_trip_ns)
            return None
        return replace(known, round_trip_ns=min(before.longer_ns, round_trip_ns))

    def _due_ns(self, look: _Look) -> Nanoseconds:
        return look.at_ns + (0 if look.longer_ns else self._period_ns)


def _is_notable(known_ns: Nanoseconds, found_ns: Nanoseconds) -> bool:
    if not found_ns or abs(found_ns - known_ns) < _LEAST_NS:
        return False
    longer, shorter = max(known_ns, found_ns), min(known_ns, found_ns)
    return longer > (1.0 + _NOTABLE) * shorter
