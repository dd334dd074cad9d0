"""Free chains in the order of the time that one more session adds to all, and the best of them.

A chain is looked at for the request in hand, with the load that it has at that moment: the time
of a step by the sessions and the context there, the prompts that wait, and how long its sessions
will go on (`placing.added_time`). Chains share devices by block slots, so sessions of other chains
on the same devices count by the share of the blocks that they have there; the book knows both
slots and tokens of every cache.

Looking at every chain would cost a microsecond for a dozen of them. So the free ones are kept in
the order of what a typical request of late would add, and `CANDIDATES` are looked at from the
head of that order on. The choice among so many free chains is exact; behind them are chains that
were worse for the typical request when they were last put into the order. Chains are put into it
anew when sessions begin or end on them, and all of them in turn, one with every decision, since
sessions also grow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from catenary_scheduler.book.caches import Cache
from catenary_scheduler.book.slots import SlotLedger
from catenary_scheduler.dispatch.chained.chain_state import ChainState
from catenary_scheduler.dispatch.placing.added_time import added_ns
from catenary_scheduler.dispatch.placing.best_fit import (
    COMMON_WEIGHT,
    NOBODY,
    SAVED_WEIGHT,
    PlacementRequest,
)
from catenary_scheduler.dispatch.placing.worker import Worker
from catenary_services.domain.ids import ResourceId

CANDIDATES: Final = 16
"""Number of free chains among which a choice is exact."""
_RENEWED: Final = 4
"""Number of chains with changed load that one decision puts in order anew, at most."""
_SMOOTHING: Final = 64.0
"""A new request counts as one in this many of the typical one."""


class ChainRanking:
    """The chains of one model that may be used, in order.

    Invariant: every chain with fewer sessions than its capacity is in the order, or waits in
    `blocked` for slots of a cache that it shares with others. The order may also hold full chains.

    Args:
        slots: The slots of the book.

    Attributes:
        has_lines: True if times are known; else chains are in the order of their service times.
        blocked: Chains that wait for slots of a cache, by the cache.
    """

    def __init__(self, slots: SlotLedger) -> None:
        self.has_lines = False
        self._slots = slots
        self._routes: list[ChainState] = []
        self._workers: list[Worker] = []
        self._index_of: dict[Worker, int] = {}
        self._keys: list[float] = []
        """The key of each chain when it was last put in order."""
        self._order: list[int] = []
        """Indices of chains, by key; of equals that of the plan."""
        self._ordered_keys: list[float] = []
        """The keys in that order, apart: numbers are compared faster than pairs."""
        self._changed: dict[int, None] = {}
        """Chains whose load has changed since they were put in order."""
        self._turn = 0
        self.blocked: dict[ResourceId, list[ChainState]] = {}
        self._prompt_tokens = 256.0
        self._answer_tokens = 256.0

    def rebuild(
        self, routes: Sequence[ChainState], workers: Sequence[Worker], has_lines: bool
    ) -> None:
        """Takes the chains to be used from now on, in order of the plan, with their workers."""
        for route in self._routes:
            route.rank = -1
        self._routes, self._workers = list(routes), list(workers)
        self._index_of = {worker: index for index, worker in enumerate(self._workers)}
        self.has_lines = has_lines
        self.blocked.clear()
        self._changed.clear()
        for index, route in enumerate(self._routes):
            route.rank = index
            route.listed = True
        self._keys = [self._key(index) for index in range(len(self._routes))]
        ordered = sorted([(key, index) for index, key in enumerate(self._keys)])
        self._order = [index for _, index in ordered]
        self._ordered_keys = [key for key, _ in ordered]

    def offer(self, route: ChainState) -> None:
        """Notes that a session left this chain."""
        index = route.rank
        if index < 0:
            return
        if route.listed:
            self._changed[index] = None
            return
        route.listed = True
        self._insert(index, self._key(index))

    def freed(self, cache: Cache) -> None:
        """Looks again at the chains that waited for slots of this cache."""
        if self.blocked:
            for route in self.blocked.pop(cache.resource, ()):
                self.offer(route)

    @property
    def has_room(self) -> bool:
        """True if a chain has a free slot."""
        while self._order:
            if self._is_free(self._order[0], 0):
                return True
        return False

    def best(self, placement_request: PlacementRequest, tokens: int) -> int:
        """Returns the free chain to which a request adds the least time; `NOBODY` if none is free.

        Args:
            placement_request: The request.
            tokens: Tokens that its session will have cached when its prompt has run.
        """
        best = (
            self._least_added(placement_request, tokens)
            if self.has_lines
            else self._fastest(tokens)
        )
        if best != NOBODY:
            self._changed[best] = None
        return best

    def _least_added(self, placement_request: PlacementRequest, tokens: int) -> int:
        self._renew(placement_request)
        best, least = NOBODY, math.inf
        if placement_request.cached:
            best, least = self._least_of_cached(placement_request, tokens)
        order, routes = self._order, self._routes
        at = seen = 0
        while at < len(order) and seen < CANDIDATES:
            index = order[at]
            if not self._is_free(index, at):
                continue
            at += 1
            if not routes[index].has_room(tokens):
                continue
            seen += 1
            added = self.added_ns(index, placement_request)
            if added < least or (added == least and index < best):
                best, least = index, added
        return best

    def _least_of_cached(
        self, placement_request: PlacementRequest, tokens: int
    ) -> tuple[int, float]:
        """Returns the best of the free chains that have cached some of a prompt, and its time.

        They may be anywhere in the order.
        """
        best, least = NOBODY, math.inf
        for worker in placement_request.cached:
            index = self._index_of.get(worker, NOBODY)
            if index == NOBODY or not self._has_slot(index):
                continue
            added = self.added_ns(index, placement_request)
            if added < least and self._routes[index].has_room(tokens):
                best, least = index, added
        return best, least

    def _fastest(self, tokens: int) -> int:
        """Returns the fastest free chain, of equally fast ones that with the fewest sessions."""
        best, fewest, pace = NOBODY, 0, 0.0
        at = seen = 0
        while at < len(self._order) and seen < CANDIDATES:
            key, index = self._ordered_keys[at], self._order[at]
            if best != NOBODY and key > pace:
                break
            if not self._is_free(index, at):
                continue
            at += 1
            route = self._routes[index]
            if not route.has_room(tokens):
                continue
            seen += 1
            if best == NOBODY or route.running < fewest:
                best, fewest, pace = index, route.running, key
        return best

    def added_ns(self, index: int, placement_request: PlacementRequest) -> float:
        """Returns by how many nanoseconds a request on this chain moves the ends of all sessions.

        Of a chain that only runs prompts, the answer is another chain's. What is saved by what the
        chain has cached counts `SAVED_WEIGHT` times.
        """
        answer = placement_request.predicted_tokens
        if self._routes[index].role == "prefill":
            answer = 1.0
        prompt = placement_request.prompt_tokens
        added = added_on(self._routes[index], self._workers[index], prompt, answer)
        if not placement_request.cached:
            return added
        cached = placement_request.cached.get(self._workers[index], 0)
        if not cached:
            return added
        common = min(cached, placement_request.common_tokens)
        behind_common = self._added_ns(index, prompt, answer, common)
        left = self._added_ns(index, prompt, answer, cached)
        return (
            added - COMMON_WEIGHT * (added - behind_common) - SAVED_WEIGHT * (behind_common - left)
        )

    def _added_ns(
        self, index: int, prompt_tokens: int, answer_tokens: float, cached_tokens: int = 0
    ) -> float:
        route, worker = self._routes[index], self._workers[index]
        return added_on(route, worker, prompt_tokens, answer_tokens, cached_tokens)

    def _key(self, index: int) -> float:
        if not self.has_lines:
            return float(self._routes[index].service_ns)
        return self._added_ns(index, round(self._prompt_tokens), self._answer_tokens)

    def _has_slot(self, index: int) -> bool:
        route = self._routes[index]
        return route.running < route.capacity and self._slots.probe(route.claims) is None

    def _is_free(self, index: int, at: int) -> bool:
        """Returns whether a chain has a free slot; if not, it is taken out of the order."""
        route = self._routes[index]
        if route.running < route.capacity:
            lacking = self._slots.probe(route.claims)
            if lacking is None:
                return True
            self.blocked.setdefault(lacking.resource, []).append(route)
        route.listed = False
        del self._order[at], self._ordered_keys[at]
        return False

    def _renew(self, placement_request: PlacementRequest) -> None:
        """Puts chains in order anew that have changed, and the next one in turn."""
        self._prompt_tokens += (placement_request.prompt_tokens - self._prompt_tokens) / _SMOOTHING
        self._answer_tokens += (
            placement_request.predicted_tokens - self._answer_tokens
        ) / _SMOOTHING
        if len(self._order) <= CANDIDATES:
            return
        self._turn = (self._turn + 1) % len(self._routes)
        self._put(self._turn)
        for _ in range(min(_RENEWED, len(self._changed))):
            index = next(iter(self._changed))
            del self._changed[index]
            self._put(index)

    def _put(self, index: int) -> None:
        if not self._routes[index].listed:
            return
        key, before = self._key(index), self._keys[index]
        if key != before:
            at = self._place(before, index)
            del self._order[at], self._ordered_keys[at]
            self._insert(index, key)

    def _insert(self, index: int, key: float) -> None:
        at = self._place(key, index)
        self._order.insert(at, index)
        self._ordered_keys.insert(at, key)
        self._keys[index] = key

    def _place(self, key: float, index: int) -> int:
        """Returns the place of a chain in the order, if it has that key.

        `bisect` would be called up to three times: for the key, its equals, and the index.
        """
        keys, order = self._ordered_keys, self._order
        low, high = 0, len(keys)
        while low < high:
            middle = (low + high) >> 1
            other = keys[middle]
            if other < key or (other == key and order[middle] < index):
                low = middle + 1
            else:
                high = middle
        return low


def added_on(
    route: ChainState,
    worker: Worker,
    prompt_tokens: int,
    answer_tokens: float,
    cached_tokens: int = 0,
) -> float:
    """Returns by how many nanoseconds a session on this chain moves the ends of all sessions."""
    used = tokens = 0
    for cache in route.claims.caches:
        used += cache.used
        tokens += cache.tokens
    blocks = route.claims.blocks
    used -= route.running * blocks
    others = others_tokens = 0.0
    if used > 0:
        others = used / blocks
        others_tokens = max(0, tokens - route.tokens * blocks) / blocks
    return added_ns(worker, prompt_tokens, answer_tokens, others, others_tokens, cached_tokens)
