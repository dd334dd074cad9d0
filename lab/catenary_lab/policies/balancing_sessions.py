"""Policies for chains that share their time among all sessions: by number, or by context.

Clusters of generation engines run such policies by default: join the shortest queue (DistServe),
the better of two random ones (power of two choices, Mitzenmacher 2001), and the fewest tokens. They
ignore c_k: an engine takes whatever comes and batches it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from catenary_scheduler.book.caches import Cache
from catenary_scheduler.dispatch.chained.chain_state import ChainState
from catenary_scheduler.dispatch.chained.placement.inadmissible import ObjectiveViolation
from catenary_scheduler.dispatch.chained.placement.slo_placer import SloPlacer
from catenary_scheduler.dispatch.chained.tracking import SequenceRequest
from catenary_scheduler.dispatch.events import SessionRequested
from catenary_scheduler.dispatch.placing.prefix_directory import (
    NOTHING,
    CachedTokens,
)
from catenary_services.domain.ids import Nanoseconds

RandomBelow = Callable[[int], int]
"""Returns a number of [0, n), each equally likely."""


class BoundPolicy:
    """The common part of policies that bind a request to a chain when it arrives.

    They look at every chain for every request, so they need not be told of sessions that leave.
    """

    central = False

    def __init__(self, random_below: RandomBelow) -> None:
        self._random_below = random_below
        self._routes: list[ChainState] = []

    def rebuild(self, routes: Sequence[ChainState]) -> None:
        """Replaces the routes to choose from."""
        self._routes = list(routes)

    def offer(self, route: ChainState) -> None:
        """Ignores that a session left a route."""

    def freed(self, cache: Cache) -> None:
        """Ignores that slots of a cache were freed."""


class FewestSessions(BoundPolicy):
    """JSQ by sessions, running and waiting; ties at random."""

    def choose(
        self, request: SessionRequested, tokens: int = 0, cached: CachedTokens = NOTHING
    ) -> ChainState | None:
        """Returns one of the chains with the fewest sessions."""
        routes = self._routes
        if not routes:
            return None
        fewest = min([route.jobs for route in routes])
        shortest = [route for route in routes if route.jobs == fewest]
        return shortest[self._random_below(len(shortest))]


class PowerOfTwoChoices(FewestSessions):
    """Two different chains at random; the one with fewer sessions, the first drawn if equal."""

    def choose(
        self, request: SessionRequested, tokens: int = 0, cached: CachedTokens = NOTHING
    ) -> ChainState | None:
        """Returns the one of two random chains that has fewer sessions."""
        routes = self._routes
        if len(routes) < 2:
            return routes[0] if routes else None
        first = self._random_below(len(routes))
        second = self._random_below(len(routes) - 1)
        second += second >= first
        one, other = routes[first], routes[second]
        return one if one.jobs <= other.jobs else other


class LeastContext(SloPlacer):
    """The chain whose sessions hold the fewest tokens, as gateways report them; no request waits.

    A free slot is needed all the same. Of equal chains, it is the first.
    """

    def fault(self, event: SessionRequested, now: Nanoseconds) -> ObjectiveViolation | None:
        """Returns None: no request is refused for its objectives."""
        return None

    def choose(self, sequence: SequenceRequest, now: Nanoseconds) -> ChainState | None:
        """Returns the chain with the least context now; None if all are full."""
        best: ChainState | None = None
        fewest = 0
        self._tokens = sequence.tokens
        for route, worker in zip(self.workers.routes, self.workers.open, strict=True):
            if (best is None or worker.now_tokens < fewest) and self._is_free(route):
                best, fewest = route, worker.now_tokens
        return best
