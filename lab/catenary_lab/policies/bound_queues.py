"""Queues of requests under policies that bind them on arrival: one at each chain."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from catenary_scheduler.book.caches import Cache
from catenary_scheduler.book.slots import SlotLedger
from catenary_scheduler.dispatch.chained.chain_state import ChainState
from catenary_scheduler.dispatch.chained.policies.policy import ChainPolicy
from catenary_scheduler.dispatch.chained.tracking import SequenceRequest
from catenary_services.domain.ids import Nanoseconds, ResourceId


class PerChainQueues:
    """A queue at every route; a request keeps the route it was given, unless that goes away."""

    def __init__(self, policy: ChainPolicy, slots: SlotLedger) -> None:
        self._policy = policy
        self._slots = slots
        self._sequences: dict[SequenceRequest, None] = {}
        self._queues: dict[ChainState, deque[SequenceRequest]] = {}
        """Requests that wait at each route, first come first; `ChainState.bound` is their
        number."""
        self._look: dict[ChainState, None] = {}
        """Routes at which a waiting request may be able to start."""
        self._blocked: dict[ResourceId, list[ChainState]] = {}
        """Routes that wait for slots of a cache although they are not full."""

    def __len__(self) -> int:
        return len(self._sequences)

    def push(self, sequence: SequenceRequest) -> None:
        """Binds a request to the route that the policy chooses, and has it wait there."""
        self._sequences[sequence] = None
        self._bind(sequence)

    def remove(self, sequence: SequenceRequest) -> None:
        """Removes a waiting request from its queue."""
        if sequence in self._sequences:
            del self._sequences[sequence]
            self._unbind(sequence)

    def next(self, now: Nanoseconds) -> tuple[SequenceRequest, ChainState] | None:
        """Returns the head of a queue and its route if it can start now; None if no head can."""
        while self._look:
            route = next(iter(self._look))
            queue = self._queues.get(route)
            if queue and route.running < route.capacity:
                lacking = self._slots.probe(route.claims)
                sequence = queue[0]
                if lacking is not None:
                    self._blocked.setdefault(lacking.resource, []).append(route)
                elif route.has_room(sequence.tokens):
                    self.remove(sequence)
                    return sequence, route
                else:  # any cache of the route may have too few tokens left
                    for cache in route.claims.caches:
                        self._blocked.setdefault(cache.resource, []).append(route)
            del self._look[route]
        return None

    def wakeup(self) -> Nanoseconds | None:
        """Returns None: routes become free by events only."""
        return None

    def sequences(self) -> list[SequenceRequest]:
        """Returns the waiting requests in order of arrival."""
        return sorted(self._sequences, key=_arrival)

    def rebuild(self, routes: Sequence[ChainState]) -> None:
        """Binds requests anew that wait at a route that is gone, or at none."""
        self._policy.rebuild(routes)
        here = set(routes)
        homeless = [t for t in self.sequences() if t.route is None or t.route not in here]
        for sequence in homeless:
            self._unbind(sequence)
        for sequence in homeless:
            self._bind(sequence)
        self._blocked.clear()
        self._look = dict.fromkeys(routes)

    def offer(self, route: ChainState) -> None:
        """Notes that a session left this route."""
        self._policy.offer(route)
        self._look[route] = None

    def freed(self, cache: Cache) -> None:
        """Notes that slots of this cache were freed."""
        self._policy.freed(cache)
        for route in self._blocked.pop(cache.resource, ()):
            self._look[route] = None

    def _bind(self, sequence: SequenceRequest) -> None:
        route = sequence.route = self._policy.choose(sequence.event, sequence.tokens)
        if route is None:
            return
        queue = self._queues.setdefault(route, deque())
        ahead = sum(1 for other in queue if other.again) if sequence.again else None
        queue.insert(len(queue) if ahead is None else ahead, sequence)
        route.bound = len(queue)
        self._look[route] = None

    def _unbind(self, sequence: SequenceRequest) -> None:
        route = sequence.route
        if route is None:
            return
        queue = self._queues[route]
        queue.remove(sequence)
        route.bound = len(queue)
        if not queue:
            del self._queues[route]
        sequence.route = None


def _arrival(sequence: SequenceRequest) -> tuple[bool, int]:
    return (not sequence.again, sequence.arrival_number)
