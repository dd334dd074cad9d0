"""The queue of requests that are placed under objectives; requests in it may be overtaken.

Requests that lost a session come first; then order is by priority, then by arrival. A prompt that
fits nowhere yet does not delay those behind it: the first few are all tried in turn. None starves,
because a request that has waited as long as its objective allows is placed wherever there is room
(reading R14) before others are tried. Where memory is short and not slots, small requests could
overtake a large one all the time; so one that lost a session, or has waited for long, is not
overtaken then.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from catenary_scheduler.book.caches import Cache
from catenary_scheduler.dispatch.chained.chain_state import ChainState
from catenary_scheduler.dispatch.chained.placement.slo_placer import SloPlacer
from catenary_scheduler.dispatch.chained.tracking import SequenceRequest
from catenary_services.domain.ids import (
    NANOSECONDS_PER_MILLISECOND,
    NANOSECONDS_PER_SECOND,
    Nanoseconds,
)

_LOOK_AHEAD = 32
"""Number of requests that are tried from the head of the queue on."""
_LOOK_NS = 20 * NANOSECONDS_PER_MILLISECOND
"""Interval between tries while requests wait and there are free slots: what sessions have saved
grows."""

_LONGEST_OVERTAKEN_NS = 2 * NANOSECONDS_PER_SECOND
"""A request for which there is no memory is overtaken for this long at most."""

_Entry = tuple[int, int, int]


class PlacementQueue:
    """Implements `WaitQueue` for a placer."""

    def __init__(self, placer: SloPlacer) -> None:
        self._placer = placer
        self._order: list[_Entry] = []
        self._waiting: dict[_Entry, SequenceRequest] = {}
        self._keys: dict[SequenceRequest, _Entry] = {}
        self._seen: Nanoseconds = -1
        """Moment at which all requests that can be tried had to wait; -1 if something changed
        since."""
        self._at = 0
        """Requests at the head of the queue that were found to have to wait at `_moment`."""
        self._moment: Nanoseconds = -1
        self._has_room = False

    def __len__(self) -> int:
        return len(self._order)

    def push(self, sequence: SequenceRequest) -> None:
        """Adds a waiting request."""
        self._placer.requests.prepare(sequence)
        key = (0 if sequence.again else 1, -sequence.priority, sequence.arrival_number)
        at = bisect_left(self._order, key)
        self._order.insert(at, key)
        self._waiting[key] = sequence
        self._keys[sequence] = key
        self._at = min(self._at, at)
        self._seen = -1

    def remove(self, sequence: SequenceRequest) -> None:
        """Removes a waiting request."""
        key = self._keys.pop(sequence, None)
        if key is not None:
            at = bisect_left(self._order, key)
            del self._order[at]
            del self._waiting[key]
            if at < self._at:
                self._at -= 1

    def next(self, now: Nanoseconds) -> tuple[SequenceRequest, ChainState] | None:
        """Removes and returns the first request for which there is a place, with that place."""
        if now != self._moment:
            self._moment, self._at = now, 0
        self._has_room = self._placer.has_room
        if self._has_room:
            for at in range(self._at, min(len(self._order), _LOOK_AHEAD)):
                sequence = self._waiting[self._order[at]]
                route = self._placer.choose(sequence, now)
                if route is not None:
                    self._at = at
                    self.remove(sequence)
                    return sequence, route
                if self._keeps_others_waiting(sequence, now):
                    self._has_room = False  # until a session leaves; nothing else helps
                    break
            self._at = min(len(self._order), _LOOK_AHEAD)
        self._seen = now
        return None

    def _keeps_others_waiting(self, sequence: SequenceRequest, now: Nanoseconds) -> bool:
        waited = sequence.again or now - sequence.arrived >= _LONGEST_OVERTAKEN_NS
        return waited and self._placer.is_short_of_tokens(sequence)

    def wakeup(self) -> Nanoseconds | None:
        """Returns when a request must be placed, or others may have saved enough for one."""
        if not self._order or not self._has_room or self._seen < 0:
            return None
        look = self._seen + _LOOK_NS
        for key in self._order[:_LOOK_AHEAD]:
            due = self._waiting[key].must_start
            if self._seen < due < look:
                look = due
        return look

    def sequences(self) -> list[SequenceRequest]:
        """Returns the waiting requests, in order."""
        return [self._waiting[key] for key in self._order]

    def rebuild(self, routes: Sequence[ChainState]) -> None:
        """Takes the routes to be used from now on."""
        self._placer.rebuild(routes)
        for sequence in self._keys:
            self._placer.requests.prepare(sequence)
        self._again()

    def offer(self, route: ChainState) -> None:
        """Notes that a session left this route."""
        self._placer.offer(route)
        self._again()

    def freed(self, cache: Cache) -> None:
        """Notes that slots of this cache were freed."""
        self._placer.freed(cache)
        self._again()

    def _again(self) -> None:
        self._at = 0
