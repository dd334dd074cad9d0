"""The queue of the requests of a model, one for all its chains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from typing import Protocol

from catenary_scheduler.book.caches import Cache
from catenary_scheduler.book.slots import SlotLedger
from catenary_scheduler.dispatch.chained.chain_state import ChainState
from catenary_scheduler.dispatch.chained.placement.slo_placer import SloPlacer
from catenary_scheduler.dispatch.chained.policies.policy import ChainPolicy
from catenary_scheduler.dispatch.chained.tracking import SequenceRequest
from catenary_services.domain.ids import Nanoseconds

_FEWEST_STALE = 64


class WaitQueue(Protocol):
    """The waiting requests of one model, in the order in which they start."""

    def __len__(self) -> int: ...

    def push(self, sequence: SequenceRequest) -> None:
        """Adds a waiting request; ahead of the others if it had a session before."""
        ...

    def remove(self, sequence: SequenceRequest) -> None:
        """Removes a waiting request."""
        ...

    def next(self, now: Nanoseconds) -> tuple[SequenceRequest, ChainState] | None:
        """Removes the request whose turn it is, and returns it with the free route it takes."""
        ...

    def wakeup(self) -> Nanoseconds | None:
        """Returns when `next` may succeed without an event; None if only events help."""
        ...

    def sequences(self) -> list[SequenceRequest]:
        """Returns the waiting requests, in order."""
        ...

    def rebuild(self, routes: Sequence[ChainState]) -> None:
        """Takes the routes to be used from now on."""
        ...

    def offer(self, route: ChainState) -> None:
        """Notes that a session left this route."""
        ...

    def freed(self, cache: Cache) -> None:
        """Notes that slots of this cache were freed."""
        ...


PolicyFactory = Callable[[SlotLedger], WaitQueue | SloPlacer]
"""Makes the decider of one model: a queue around a policy, or a placer. It gets the book's
slots."""


class CentralQueue:
    """One queue for all chains, ordered by lost sessions, then priority, then arrival."""

    def __init__(self, policy: ChainPolicy) -> None:
        self._policy = policy
        self._heap: list[tuple[int, int, int, int, SequenceRequest]] = []
        self._turns = 0
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def push(self, sequence: SequenceRequest) -> None:
        self._turns += 1
        sequence.turn = self._turns
        self._length += 1
        late = 0 if sequence.again else 1
        heappush(
            self._heap, (late, -sequence.priority, sequence.arrival_number, self._turns, sequence)
        )

    def remove(self, sequence: SequenceRequest) -> None:
        """Removes a waiting request; its entry is dropped when it comes to the top."""
        if sequence.turn:
            sequence.turn = 0
            self._length -= 1
            if len(self._heap) > 2 * self._length + _FEWEST_STALE:
                self._heap = [entry for entry in self._heap if entry[4].turn == entry[3]]
                heapify(self._heap)

    def next(self, now: Nanoseconds) -> tuple[SequenceRequest, ChainState] | None:
        """Removes and returns the head of the queue, with the route that the policy chooses."""
        heap = self._heap
        while heap and heap[0][4].turn != heap[0][3]:
            heappop(heap)
        if not heap:
            return None
        sequence = heap[0][4]
        route = self._policy.choose(sequence.event, sequence.tokens, sequence.cached())
        if route is None:
            return None
        heappop(heap)
        sequence.turn = 0
        self._length -= 1
        return sequence, route

    def wakeup(self) -> Nanoseconds | None:
        """Returns None: routes become free by events only."""
        return None

    def sequences(self) -> list[SequenceRequest]:
        return [entry[4] for entry in sorted(self._heap) if entry[4].turn == entry[3]]

    def rebuild(self, routes: Sequence[ChainState]) -> None:
        self._policy.rebuild(routes)

    def offer(self, route: ChainState) -> None:
        self._policy.offer(route)

    def freed(self, cache: Cache) -> None:
        self._policy.freed(cache)
