"""Policies with a queue per chain, for comparison: JSQ, SA-JSQ, JIQ and SED.

As defined for the experiments of server-chain composition (section 4.1.2): Z_k is the number of
sessions on a chain and waiting for it, c_k its capacity, mu_k its rate. A request is bound to its
chain when it arrives. The policies look at every chain for every request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from catenary_lab.policies.balancing_sessions import BoundPolicy, RandomBelow
from catenary_scheduler.dispatch.chained.chain_state import ChainState
from catenary_scheduler.dispatch.events import SessionRequested
from catenary_scheduler.dispatch.placing.prefix_directory import (
    NOTHING,
    CachedTokens,
)


class _Bound(BoundPolicy):
    """The common part of these policies, which leave out chains without slots."""

    def rebuild(self, routes: Sequence[ChainState]) -> None:
        """Replaces the routes to choose from."""
        super().rebuild([route for route in routes if route.capacity > 0])


class JoinShortestQueue(_Bound):
    """JSQ: the chain with the least (Z_k - c_k + 1)+ / c_k; ties at random."""

    def choose(
        self, request: SessionRequested, tokens: int = 0, cached: CachedTokens = NOTHING
    ) -> ChainState | None:
        """Returns one of the chains with the shortest queue."""
        return _any_of(_least(self._routes, _queue_per_slot), self._random_below)


class SpeedAwareJoinShortestQueue(_Bound):
    """SA-JSQ: like JSQ; ties go to the fastest chain."""

    def choose(
        self, request: SessionRequested, tokens: int = 0, cached: CachedTokens = NOTHING
    ) -> ChainState | None:
        """Returns the fastest of the chains with the shortest queue."""
        shortest = _least(self._routes, _queue_per_slot)
        return min(shortest, key=_service) if shortest else None


class JoinIdleQueue(_Bound):
    """JIQ: a chain with a free slot at random; any chain at random if none has one."""

    def choose(
        self, request: SessionRequested, tokens: int = 0, cached: CachedTokens = NOTHING
    ) -> ChainState | None:
        """Returns a random chain that is not full; any chain if all are full."""
        free = [route for route in self._routes if route.jobs < route.capacity]
        return _any_of(free or self._routes, self._random_below)


class SmallestExpectedDelay(_Bound):
    """SED: the chain with the least 1/mu_k + (Z_k - c_k + 1)+ / (mu_k c_k); ties to the first."""

    def choose(
        self, request: SessionRequested, tokens: int = 0, cached: CachedTokens = NOTHING
    ) -> ChainState | None:
        """Returns the chain that is expected to finish the request first."""
        return min(self._routes, key=_expected_delay) if self._routes else None


def _queue_per_slot(route: ChainState) -> float:
    return max(0, route.jobs - route.capacity + 1) / route.capacity


def _expected_delay(route: ChainState) -> float:
    return route.service_ns * (1.0 + _queue_per_slot(route))


def _service(route: ChainState) -> int:
    return route.service_ns


def _least(routes: Sequence[ChainState], cost: Callable[[ChainState], float]) -> list[ChainState]:
    """Returns the routes of least cost, in their order."""
    costs = [cost(route) for route in routes]
    least = min(costs, default=0.0)
    return [route for route, each in zip(routes, costs, strict=True) if each == least]


def _any_of(routes: Sequence[ChainState], random_below: RandomBelow) -> ChainState | None:
    return routes[random_below(len(routes))] if routes else None
