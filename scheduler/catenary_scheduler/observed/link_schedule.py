"""Says which link is measured next. Pure: agents and time in, at most one order out.

One link is measured at a time, and each pair of servers once for both of their agents: by the first
agent of the one, to the first agent of the other. What is not measured yet comes first, then what
was measured with other addresses or is too old. Links whose agents are at work, or that fail, are
left alone for a while that doubles every time.

Links that chains pass come first, are measured again far sooner, and are looked at in between: a
few empty frames tell their round trip, also while their agents are at work (`link_watch`). What was
found to be another round trip is measured in full.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from itertools import chain, permutations

from catenary_scheduler.observed.link_watch import LinkWatch
from catenary_scheduler.observed.links import FRESH_S, MeasuredLink, MeasuredLinks
from catenary_scheduler.planning.live import LinkFigures, ServerPair
from catenary_services.domain.ids import NANOSECONDS_PER_SECOND, AgentId, Nanoseconds, ServerId

SPACING_NS = 2 * NANOSECONDS_PER_SECOND
"""Time from one order to the next, at least: thirty links a minute."""
IDLE_NS = 10 * NANOSECONDS_PER_SECOND
"""Time until the next look if nothing is due: to look at thousands of links takes milliseconds."""
ANSWER_NS = 20 * NANOSECONDS_PER_SECOND
"""Time that an agent has for a measurement."""
_LATE_NS = 5 * NANOSECONDS_PER_SECOND
MOST_SERVERS = 64
"""Number of servers between which links are measured; the others have none."""
MOST_BUSY = 5
"""A link is measured in spite of work when its agents were at work so many times in a row."""
IN_USE_FRESH_S = 1800
"""Seconds after which a link that chains pass is measured in full again."""
LOOK_NS = 60 * NANOSECONDS_PER_SECOND
"""Usual time between two looks at a link that chains pass."""
_FIRST_PAUSE_NS = 10 * NANOSECONDS_PER_SECOND
_LONGEST_PAUSE_NS = 3600 * NANOSECONDS_PER_SECOND


class LinkOutcome(enum.Enum):
    """The outcome of a measurement."""

    MEASURED = "measured"
    SAME_HOST = "same_host"
    BUSY = "busy"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class LinkEnd:
    """An agent that is there, with where its peers reach it."""

    agent: AgentId
    server: ServerId
    address: str


@dataclass(frozen=True, slots=True)
class LinkOrder:
    """One agent is to measure the link to another."""

    number: int
    source: LinkEnd
    target: LinkEnd
    even_if_busy: bool
    is_look: bool = False
    """True if only the round trip is wanted."""

    @property
    def pair(self) -> ServerPair:
        return self.source.server, self.target.server

    @property
    def addresses(self) -> str:
        """The addresses of both ends."""
        return _addresses(self.source, self.target)


@dataclass(frozen=True, slots=True)
class _Pause:
    addresses: str
    until_ns: Nanoseconds
    busy: int = 0
    """Times in a row that its agents were at work."""
    failed: int = 0
    """Times in a row that it failed."""


class LinkSchedule:
    """Orders measurements of links, and takes in their outcomes.

    Args:
        links: Where figures are kept.
        first_number: The number of the first order; larger than all of earlier leaders.
        look_ns: Time between two looks at a link that chains pass.
    """

    def __init__(
        self, links: MeasuredLinks, first_number: int, look_ns: Nanoseconds = LOOK_NS
    ) -> None:
        self._links = links
        self._watch = LinkWatch(look_ns)
        self._was_look = False
        """True if the last order was a look: it is then the turn of a link that is not known."""
        self._in_use: AbstractSet[ServerPair] = frozenset()
        self._changed: set[ServerPair] = set()
        """The links that were found to have another round trip since they were measured."""
        self._pauses: dict[ServerPair, _Pause] = {}
        self._under_way: tuple[LinkOrder, Nanoseconds] | None = None
        """The order that is not answered yet, and when it counts as failed."""
        self._next_ns: Nanoseconds = 0
        self._number = first_number

    def is_time(self, now: Nanoseconds) -> bool:
        """True if it is time to ask for the next order; `now` is of the clock of this process."""
        return now >= self._next_ns

    def next_order(
        self,
        ends: Sequence[LinkEnd],
        now: Nanoseconds,
        unix_s: int,
        in_use: AbstractSet[ServerPair] = frozenset(),
    ) -> LinkOrder | None:
        """Returns what is to be measured now; None if that is nothing.

        Args:
            ends: The agents that are connected and stay.
            now: Time on the clock of this process.
            unix_s: The same moment on the calendar's clock.
            in_use: The links that chains pass.
        """
        if not self.is_time(now):
            return None
        self._next_ns, self._in_use = now + SPACING_NS, in_use
        if self._under_way is not None:
            order, until_ns = self._under_way
            if order.source in ends and now < until_ns:
                return None
            if order.is_look:
                self._looked(order, None, now)
            else:
                self._settle(order, LinkOutcome.FAILED, now)
        found = self._ordered(ends, now, unix_s)
        if found is None:
            resumed_ns = min(
                (each.until_ns for each in self._pauses.values()), default=now + IDLE_NS
            )
            self._next_ns = max(now + SPACING_NS, min(now + IDLE_NS, resumed_ns))
        return found

    def answered(
        self,
        agent: AgentId,
        number: int,
        outcome: LinkOutcome,
        figures: LinkFigures | None,
        now: Nanoseconds,
        unix_s: int,
    ) -> LinkOrder | None:
        """Takes in the outcome of an order; returns the order, or None if nobody waits for that.

        Args:
            agent: Who says it.
            number: The number of the order.
            outcome: The outcome.
            figures: What was measured; None if nothing was.
            now: Time on the clock of this process.
            unix_s: The same moment on the calendar's clock.
        """
        if self._under_way is None:
            return None
        order = self._under_way[0]
        if order.number != number or order.source.agent != agent:
            return None
        if order.is_look and outcome is not LinkOutcome.SAME_HOST:
            self._looked(order, figures, now)
            return order
        if figures is not None and outcome is LinkOutcome.MEASURED:
            figures = self._believed(order, figures, now)
            self._links.put(order.pair, MeasuredLink(figures, unix_s, order.addresses))
        self._settle(order, outcome, now)
        return order

    # ---- inside ----

    def _ordered(
        self,
        ends: Sequence[LinkEnd],
        now: Nanoseconds,
        unix_s: int,
    ) -> LinkOrder | None:
        servers: dict[ServerId, LinkEnd] = {}
        for end in sorted(ends, key=lambda each: each.agent):
            if len(servers) < MOST_SERVERS:
                servers.setdefault(end.server, end)
        self._pauses = {
            pair: each for pair, each in self._pauses.items() if servers.keys() >= set(pair)
        }
        self._changed = {pair for pair in self._changed if servers.keys() >= set(pair)}
        look = self._look(servers, now)
        found = self._most_due(servers, now, unix_s)
        if look is not None and (found is None or not self._was_look):
            return self._order(servers, look, now, insists=True, is_look=True)
        if found is None:
            return None
        pause = self._pauses.get(found)
        insists = pause is not None and pause.busy >= MOST_BUSY
        return self._order(servers, found, now, insists=insists, is_look=False)

    def _order(
        self,
        servers: Mapping[ServerId, LinkEnd],
        pair: ServerPair,
        now: Nanoseconds,
        *,
        insists: bool,
        is_look: bool,
    ) -> LinkOrder:
        order = LinkOrder(self._number, servers[pair[0]], servers[pair[1]], insists, is_look)
        self._number += 1
        self._was_look = is_look
        self._under_way = order, now + ANSWER_NS + _LATE_NS
        return order

    def _look(self, servers: Mapping[ServerId, LinkEnd], now: Nanoseconds) -> ServerPair | None:
        """Returns the link in use to look at now; None if none is due."""
        known = self._links.known.figures
        there = [pair for pair in self._in_use if pair in known and servers.keys() >= set(pair)]
        return self._watch.due(there, now)

    def _looked(self, order: LinkOrder, figures: LinkFigures | None, now: Nanoseconds) -> None:
        """Takes in the outcome of a look; one that failed is made again a period later."""
        self._under_way = None
        known = self._links.of(order.pair)
        if known is None:
            return
        found_ns = figures.round_trip_ns if figures is not None else 0
        changed = self._watch.looked(order.pair, known.figures, found_ns, now)
        if changed is None:
            return
        for pair in (order.pair, (order.pair[1], order.pair[0])):  # it is the same in both
            there = self._links.of(pair)
            if there is not None:
                figures = replace(there.figures, round_trip_ns=changed.round_trip_ns)
                self._links.put(pair, replace(there, figures=figures))
                self._changed.add(pair)

    def _believed(self, order: LinkOrder, figures: LinkFigures, now: Nanoseconds) -> LinkFigures:
        """Returns what is believed of a whole measurement.

        The round trip of a link in use must be found twice if it is longer than it was known to be.
        """
        pair, known = order.pair, self._links.of(order.pair)
        if known is None or known.addresses != order.addresses:
            return figures
        if pair in self._changed or pair not in self._in_use:
            return figures
        changed = self._watch.looked(pair, known.figures, figures.round_trip_ns, now)
        round_trip_ns = (changed or known.figures).round_trip_ns
        return replace(figures, round_trip_ns=round_trip_ns)

    def _most_due(
        self, servers: Mapping[ServerId, LinkEnd], now: Nanoseconds, unix_s: int
    ) -> ServerPair | None:
        """Returns the pair to measure next: of those that are due, one that failed least often.

        Of several, it is one that chains pass.
        """
        best: tuple[int, ServerPair] | None = None
        names = sorted(servers)
        wanted = sorted(pair for pair in self._in_use if servers.keys() >= set(pair))
        for pair in chain(wanted, permutations(names, 2)):
            addresses = _addresses(servers[pair[0]], servers[pair[1]])
            pause = self._pauses.get(pair)
            is_paused = pause is not None and pause.addresses == addresses and now < pause.until_ns
            fresh_s = IN_USE_FRESH_S if pair in self._in_use else FRESH_S
            is_known = pair not in self._changed and self._links.measured_s(
                pair, addresses, unix_s, fresh_s
            )
            if is_paused or is_known:
                continue
            failed = pause.failed if pause is not None else 0
            if not failed:
                return pair  # none before it is as good
            if best is None or failed < best[0]:
                best = failed, pair
        return best[1] if best is not None else None

    def _settle(self, order: LinkOrder, outcome: LinkOutcome, now: Nanoseconds) -> None:
        self._under_way = None
        before = self._pauses.pop(order.pair, None)
        if outcome is LinkOutcome.MEASURED:
            self._changed.discard(order.pair)
            return
        if outcome is LinkOutcome.SAME_HOST:
            self._links.forget(order.pair)
            until_ns = now + _LONGEST_PAUSE_NS
            self._pauses[order.pair] = _Pause(order.addresses, until_ns)
            return
        busy, failed = (before.busy, before.failed) if before is not None else (0, 0)
        times = busy if outcome is LinkOutcome.BUSY else failed
        until_ns = now + min(_LONGEST_PAUSE_NS, _FIRST_PAUSE_NS << min(times, 16))
        if outcome is LinkOutcome.BUSY:
            self._pauses[order.pair] = _Pause(order.addresses, until_ns, busy + 1, 0)
        else:
            self._pauses[order.pair] = _Pause(order.addresses, until_ns, busy, failed + 1)


def _addresses(source: LinkEnd, target: LinkEnd) -> str:
    return f"{source.address}>{target.address}"
