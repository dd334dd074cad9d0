"""Policy "least-time": a request takes the chain on which it delays the ends of all sessions least.

It is the policy "slo" with another order of the chains. Requests with objectives are refused, held
back and placed under the same constraints, and among the chains on which these hold they take the
one with the least added time; those without objectives take the free chain with the least. Where
the latency lines of a chain are not known, nothing can be predicted, and the fastest free chain is
taken (JFFC), the one with the fewest sessions if several are equally fast.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from catenary_scheduler.book.caches import Cache
from catenary_scheduler.book.slots import SlotLedger
from catenary_scheduler.dispatch.chained.chain_state import ChainState
from catenary_scheduler.dispatch.chained.placement.chain_ranking import ChainRanking, added_on
from catenary_scheduler.dispatch.chained.placement.slo_placer import SloPlacer
from catenary_scheduler.dispatch.placing.best_fit import (
    NOBODY,
    PlacementRequest,
    least_loaded,
)
from catenary_services.domain.ids import Nanoseconds


class LeastTimePlacer(SloPlacer):
    """Places the requests of one model where they add the least time.

    Args:
        slots: The slots of the book.

    Attributes:
        ranking: The free chains in the order of what a session would add to them.
    """

    def __init__(self, slots: SlotLedger) -> None:
        super().__init__(slots)
        self.ranking = ChainRanking(slots)
        self._request = PlacementRequest(1, 1.0)
        """The request in hand."""
        self._answer_ns = math.inf
        """The least time that its answer adds to a chain that only generates; infinity if none of
        them is free."""

    def rebuild(self, routes: Sequence[ChainState]) -> None:
        """Takes the routes to be used from now on; sessions on other routes still count there."""
        super().rebuild(routes)
        self.ranking.rebuild(self.workers.routes, self.workers.open, self.workers.has_lines)

    def wait_for_batches(self, now: Nanoseconds) -> None:
        """Takes in how long steps wait for batches; chains are put in order anew if that helps."""
        if self.workers.wait_for_batches(self._slots, now):
            self.ranking.rebuild(self.workers.routes, self.workers.open, self.workers.has_lines)

    def offer(self, route: ChainState) -> None:
        """Notes that a session left this route: it may be free again."""
        self.ranking.offer(route)

    def freed(self, cache: Cache) -> None:
        """Looks again at the routes that waited for slots of this cache."""
        self.ranking.freed(cache)

    @property
    def has_room(self) -> bool:
        """True if a worker has a free slot."""
        return self.ranking.has_room

    def _unpacked(self, placement_request: PlacementRequest) -> int:
        """Returns the worker for a request without objectives that nobody is packed with."""
        self._take(placement_request)
        if not (self.workers.decode_routes and self.workers.has_lines):
            return self.ranking.best(placement_request, self._tokens)
        best, least = NOBODY, math.inf
        for index in range(len(self.workers.routes)):
            added = self._added(index)
            if added < least and self._is_open(index):
                best, least = index, added
        return best

    def _least_loaded(
        self, placement_request: PlacementRequest, now: Nanoseconds, theta: float
    ) -> int:
        """Returns the worker for a request with objectives, among those on which c-e hold."""
        self._take(placement_request)
        load = self._added if self.workers.has_lines else None
        return least_loaded(self.workers.open, placement_request, now, theta, self._is_open, load)

    def _least_loaded_decode(self, generating: PlacementRequest, now: Nanoseconds) -> int:
        """Returns the worker that generates for a session whose prompt runs elsewhere."""
        self._request = generating
        load = self._added_decode if self.workers.has_lines else None
        workers, is_open = self.workers.decode_open, self._is_decode_open
        return least_loaded(workers, generating, now, 1.0, is_open, load)

    def _added(self, index: int) -> float:
        """Returns the added time on a worker, with that of the answer where only prompts run."""
        added = self.ranking.added_ns(index, self._request)
        return added + self._answer_ns if self.workers.routes[index].role == "prefill" else added

    def _added_decode(self, index: int) -> float:
        return added_on(
            self.workers.decode_routes[index],
            self.workers.decode_open[index],
            self._request.prompt_tokens,
            self._request.predicted_tokens,
        )

    def _take(self, placement_request: PlacementRequest) -> None:
        """Takes a request in hand.

        Chains are put in order anew if their lines became known since, or unknown.
        """
        if self.ranking.has_lines != self.workers.has_lines:
            self.ranking.rebuild(self.workers.routes, self.workers.open, self.workers.has_lines)
        self._request = placement_request
        if self.workers.decode_routes:
            # A prompt's chain is chosen with the best one that generates behind it.
            decoding = range(len(self.workers.decode_routes))
            self._answer_ns = min(
                [self._added_decode(index) for index in decoding if self._is_decode_open(index)],
                default=math.inf,
            )
