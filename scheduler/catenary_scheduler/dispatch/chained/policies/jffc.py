"""Join the fastest free chain (server-chain composition, Algorithm 3)."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from catenary_scheduler.book.caches import Cache
from catenary_scheduler.book.slots import SlotLedger
from catenary_scheduler.dispatch.chained.chain_state import ChainState
from catenary_scheduler.dispatch.events import SessionRequested
from catenary_scheduler.dispatch.placing.prefix_directory import (
    NOTHING,
    CachedTokens,
)
from catenary_services.domain.ids import ResourceId
from catenary_services.domain.plan import ChainHop


class JoinFastestFreeChain:
    """A session takes the free chain with the largest rate 1/T_k; otherwise it waits centrally.

    A heap of ranks holds every chain that may be free, and some that no longer are: those are
    dropped when they come to the top, and return when a session leaves them. So a decision takes
    O(log K) over time. Free means fewer than c_k sessions (the paper's test) *and* enough slots in
    every cache: while sessions of an earlier plan go on, the second may fail although the first
    holds; the chain then waits for that cache, not for its own sessions. Where caches may not all
    be full, the session must find room for its tokens, too: a chain that has none for this one
    stays in the heap for others.
    """

    central = True

    def __init__(self, slots: SlotLedger) -> None:
        self._slots = slots
        self._routes: list[ChainState] = []
        self._by_hops: dict[tuple[ChainHop, ...], ChainState] = {}
        self._heap: list[int] = []
        self._blocked: dict[ResourceId, list[ChainState]] = {}

    def rebuild(self, routes: Sequence[ChainState]) -> None:
        """Ranks the routes by their rate; equal ones by their place in the plan."""
        for route in self._routes:
            route.rank = -1
        self._routes = sorted(routes, key=_by_rate)
        self._by_hops = {route.hops: route for route in self._routes}
        self._heap = list(range(len(self._routes)))
        self._blocked.clear()
        for rank in self._heap:
            route = self._routes[rank]
            route.rank = rank
            route.listed = True

    def choose(
        self,
        request: SessionRequested,
        tokens: int = 0,
        cached: CachedTokens = NOTHING,
    ) -> ChainState | None:
        """Returns the free chain on which a session takes the least time, None if none is free.

        What a chain has cached of a prompt is not computed, so the few that have some of this one
        are compared with the fastest one by the time that is left.
        """
        fastest = self._fastest(tokens)
        if fastest is None or not cached:
            return fastest
        best, least = fastest, _time_left(fastest, cached)
        for hops in cached:
            route = self._by_hops.get(hops)
            if route is not None and self._is_free(route, tokens):
                left = _time_left(route, cached)
                if left < least:
                    best, least = route, left
        return best

    def _is_free(self, route: ChainState, tokens: int) -> bool:
        is_full = route.running >= route.capacity or self._slots.probe(route.claims) is not None
        return not is_full and route.has_room(tokens)

    def _fastest(self, tokens: int) -> ChainState | None:
        """Returns the fastest free chain, None if none is free."""
        heap = self._heap
        found: ChainState | None = None
        too_full: list[int] = []
        while heap and found is None:
            route = self._routes[heap[0]]
            if route.running < route.capacity:
                lacking = self._slots.probe(route.claims)
                if lacking is None:
                    if route.has_room(tokens):
                        found = route
                    else:
                        too_full.append(heappop(heap))
                    continue
                self._blocked.setdefault(lacking.resource, []).append(route)
            heappop(heap)
            route.listed = False
        for rank in too_full:
            heappush(heap, rank)
        return found

    def offer(self, route: ChainState) -> None:
        """Notes that a session left this route: it may be free again."""
        if route.rank >= 0 and not route.listed:
            route.listed = True
            heappush(self._heap, route.rank)

    def freed(self, cache: Cache) -> None:
        """Looks again at the chains that waited for slots of this cache."""
        if self._blocked:
            for route in self._blocked.pop(cache.resource, ()):
                self.offer(route)


def _time_left(route: ChainState, cached: CachedTokens) -> tuple[float, int, int]:
    tokens = cached.get(route.hops, 0)
    # Of equally fast chains of which nothing else is known, the one that has most is taken.
    return (route.service_ns - tokens * route.prompt_token_ns, -tokens, route.index)


def _by_rate(route: ChainState) -> tuple[int, int]:
    return (route.service_ns, route.index)
