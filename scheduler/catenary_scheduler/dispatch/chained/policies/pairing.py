"""Split phase: chooses a chain that runs the prompt and one that generates, together.

It wraps a policy for single chains. Where a plan has chains of both roles, the least loaded free
one of each is taken; where one role has no usable chain, chains of the other do both, and the
wrapped policy chooses among them. So losing every prefill agent slows a model down and does not
stop it.
"""

from __future__ import annotations

from collections.abc import Sequence

from catenary_scheduler.book.caches import Cache
from catenary_scheduler.book.slots import SlotLedger
from catenary_scheduler.dispatch.chained.chain_state import ChainState, paired
from catenary_scheduler.dispatch.chained.policies.policy import ChainPolicy
from catenary_scheduler.dispatch.events import SessionRequested
from catenary_scheduler.dispatch.placing.prefix_directory import (
    NOTHING,
    CachedTokens,
)


class PairPolicy:
    """Chooses least-loaded pairs where both roles have chains, and else asks the wrapped policy."""

    def __init__(self, policy: ChainPolicy, slots: SlotLedger) -> None:
        self._policy = policy
        self._slots = slots
        self._prefill: list[ChainState] = []
        self._decode: list[ChainState] = []
        self._has_mixed = True
        self._pairs: dict[tuple[ChainState, ChainState], ChainState] = {}

    @property
    def central(self) -> bool:
        """Same as the wrapped policy."""
        return self._policy.central

    def rebuild(self, routes: Sequence[ChainState]) -> None:
        """Sorts the routes by their roles."""
        self._prefill = [route for route in routes if route.role == "prefill"]
        self._decode = [route for route in routes if route.role == "decode"]
        mixed = [route for route in routes if route.role == "mixed"]
        if not (self._prefill and self._decode):
            self._prefill, self._decode, mixed = [], [], list(routes)
        self._has_mixed = bool(mixed)
        here = set(routes)
        self._pairs = {
            halves: pair for halves, pair in self._pairs.items() if here.issuperset(halves)
        }
        self._policy.rebuild(mixed)

    def choose(
        self,
        request: SessionRequested,
        tokens: int = 0,
        cached: CachedTokens = NOTHING,
    ) -> ChainState | None:
        """Returns a pair, or a single route where that suffices, or is all there is."""
        if not self._prefill:
            return self._policy.choose(request, tokens, cached)
        prefill = self._least(self._prefill, tokens)
        decode = self._least(self._decode, tokens) if request.max_tokens > 1 else prefill
        if prefill is None or decode is None:
            return self._policy.choose(request, tokens, cached) if self._has_mixed else None
        if decode is prefill:  # one token: there is nothing to hand over
            return prefill
        pair = self._pairs.get((prefill, decode))
        if pair is None:
            pair = self._pairs[prefill, decode] = paired(prefill, decode)
        return pair

    def offer(self, route: ChainState) -> None:
        """Notes that a session left this route."""
        self._policy.offer(route)

    def freed(self, cache: Cache) -> None:
        """Notes that slots of this cache were freed."""
        self._policy.freed(cache)

    def _least(self, routes: Sequence[ChainState], tokens: int) -> ChainState | None:
        free = [
            route
            for route in routes
            if route.running < route.capacity
            and self._slots.probe(route.claims) is None
            and route.has_room(tokens)
        ]
        if not free and not self.central:  # a request bound to the route waits there
            free = list(routes)
        return min(free, key=_load, default=None)


def _load(route: ChainState) -> tuple[float, int, int]:
    return (route.jobs / max(1, route.capacity), route.service_ns, route.index)
