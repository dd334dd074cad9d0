"""Timeline of one resource: its busy intervals, and the search for a free one."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Protocol

from catenary_services.domain.ids import BatchId, Nanoseconds, ResourceId
from catenary_services.errors import InternalError


class Watcher(Protocol):
    """An observer that keeps timelines in the order in which they become free."""

    def moved(self, index: int, before: Nanoseconds, after: Nanoseconds) -> None:
        """Records that the timeline the watcher knows by `index` becomes free at another moment."""
        ...

    def shared(self, more: int) -> None:
        """Records that `more` timelines than before have steps beside batches."""
        ...


class BookedInterval:
    """One booked interval on one or several resources at once.

    Invariants: `start < end`; while it is `live` it is in every one of its timelines, afterwards
    (pruned or released) in none. `done` uses never move.
    """

    __slots__ = (
        "batch",
        "begun",
        "done",
        "end",
        "live",
        "persisted",
        "position",
        "start",
        "timelines",
    )

    def __init__(
        self,
        batch: BatchId,
        position: int,
        timelines: tuple[Timeline, ...],
        start: Nanoseconds,
        end: Nanoseconds,
    ) -> None:
        self.batch = batch
        self.position = position
        self.timelines = timelines
        self.start = start
        self.end = end
        self.begun = False
        """True once it is known when the use really started."""
        self.done = False
        self.live = False
        self.persisted = False

    @property
    def transfers(self) -> bool:
        """True for a use of the two links of a transfer, False for the use of a GPU."""
        return len(self.timelines) > 1


class Timeline:
    """Busy intervals of one resource, in order of time and never overlapping.

    `starts`, `ends` and `uses` are parallel; the first two are plain lists of integers so that
    bisection runs in C.
    """

    __slots__ = (
        "busy_until",
        "chunk_ns",
        "chunks_until",
        "done_until",
        "ends",
        "resource",
        "starts",
        "step_ns",
        "step_ratio",
        "uses",
        "watchers",
    )

    def __init__(self, resource: ResourceId) -> None:
        self.resource = resource
        self.starts: list[Nanoseconds] = []
        self.ends: list[Nanoseconds] = []
        self.uses: list[BookedInterval] = []
        self.busy_until: Nanoseconds = 0
        """End of the last interval, but at least `done_until`."""
        self.done_until: Nanoseconds = 0
        """Latest moment up to which the real use of this resource is known."""
        self.watchers: list[tuple[Watcher, int]] = []
        self.step_ns: Nanoseconds = 0
        """Step of language models that a batch may wait for; 0 if there are none (`steps`)."""
        self.step_ratio = 0
        """Time that steps take beside a batch, in 1024ths of the time of the batch."""
        self.chunk_ns: Nanoseconds = 0
        """The same as `step_ns` for batches that are ready before `chunks_until`."""
        self.chunks_until: Nanoseconds = 0

    @property
    def has_steps(self) -> bool:
        """True if batches take longer here because steps are computed between them."""
        return self.step_ns > 0 or self.chunk_ns > 0

    def take_steps(
        self,
        step_ns: Nanoseconds,
        step_ratio: int,
        chunk_ns: Nanoseconds,
        chunks_until: Nanoseconds,
    ) -> None:
        """Sets what steps take beside the batches that are booked from now on."""
        before = self.has_steps
        self.step_ns, self.step_ratio = step_ns, step_ratio
        self.chunk_ns, self.chunks_until = chunk_ns, chunks_until
        more = self.has_steps - before
        if more:
            for watcher, _ in self.watchers:
                watcher.shared(more)

    def with_steps(self, ready: Nanoseconds, duration: Nanoseconds) -> Nanoseconds:
        """Returns the time to book for a batch of `duration` that is ready at a moment."""
        if ready < self.chunks_until:
            return duration + self.chunk_ns
        more = duration * self.step_ratio >> 10
        return duration + (more if more < self.step_ns else self.step_ns)

    def insert(self, use: BookedInterval) -> None:
        """Inserts an interval at its place in time.

        Raises:
            InternalError: The interval overlaps another one.
        """
        start, end = use.start, use.end
        starts, ends = self.starts, self.ends
        if not starts or start >= ends[-1]:
            starts.append(start)
            ends.append(end)
            self.uses.append(use)
            self._ends_at(end if end > self.done_until else self.done_until)
            return
        at = bisect_right(ends, start)
        if end > starts[at] or start >= end:
            raise InternalError(f"{self.resource} is booked twice at {starts[at]}")
        starts.insert(at, start)
        ends.insert(at, end)
        self.uses.insert(at, use)

    def remove(self, use: BookedInterval) -> None:
        """Removes an interval; raises InternalError if the timeline does not hold it."""
        at = bisect_left(self.starts, use.start)
        if at == len(self.uses) or self.uses[at] is not use:
            raise InternalError(f"{self.resource}: the use at {use.start} is another one")
        del self.starts[at], self.ends[at], self.uses[at]
        if at == len(self.starts):
            self._ends_at(max(self.ends[-1] if self.ends else 0, self.done_until))

    def resize(self, use: BookedInterval, start: Nanoseconds, end: Nanoseconds) -> None:
        """Changes the bounds of an interval; neither old nor new may overlap another use."""
        at = bisect_left(self.starts, use.start)
        self.starts[at] = start
        self.ends[at] = end
        if at == len(self.ends) - 1:
            self._ends_at(max(end, self.done_until))

    def after(self, use: BookedInterval) -> BookedInterval | None:
        """Returns the first use behind `use` that can still move; None if there is none."""
        at = bisect_left(self.starts, use.start) + 1
        while at < len(self.uses):
            if not self.uses[at].done:
                return self.uses[at]
            at += 1
        return None

    def alone(self, use: BookedInterval, start: Nanoseconds, end: Nanoseconds) -> bool:
        """Returns True if `[start, end)` overlaps the interval of `use` and no other."""
        low = bisect_right(self.ends, start)
        high = bisect_left(self.starts, end, low)
        return high - low == 1 and self.uses[low] is use

    def before(self, use: BookedInterval) -> BookedInterval | None:
        """Returns the use next ahead of `use`, if one is that is not known to be over."""
        at = bisect_left(self.starts, use.start)
        return self.uses[at - 1] if at and not self.uses[at - 1].done else None

    def overlapping(self, start: Nanoseconds, end: Nanoseconds) -> list[BookedInterval]:
        """Returns the uses that share a moment with `[start, end)`."""
        low = bisect_right(self.ends, start)
        return self.uses[low : bisect_left(self.starts, end, low)]

    def ran_until(self, end: Nanoseconds) -> None:
        """Records that this resource was really in use until `end`.

        The book moves nothing to a moment before that.
        """
        self.done_until = max(self.done_until, end)
        self._ends_at(max(self.busy_until, self.done_until))

    def _ends_at(self, end: Nanoseconds) -> None:
        if end != self.busy_until:
            before, self.busy_until = self.busy_until, end
            for watcher, index in self.watchers:
                watcher.moved(index, before, end)


def enter(uses: Sequence[BookedInterval]) -> None:
    """Inserts the intervals of a batch into all of their timelines, where they are live then.

    Raises:
        InternalError: An interval is empty or overlaps another one. No timeline is changed then.
    """
    entered: list[tuple[Timeline, BookedInterval]] = []
    try:
        for use in uses:
            if use.start >= use.end:
                raise InternalError(f"batch {use.batch} books an empty interval")
            for line in use.timelines:
                line.insert(use)
                entered.append((line, use))
    except InternalError:
        for line, use in entered:
            line.remove(use)
        raise
    for use in uses:
        use.live = True


def earliest_on(timeline: Timeline, not_before: Nanoseconds, duration: Nanoseconds) -> Nanoseconds:
    """Returns the earliest start at which one resource is free for `duration`."""
    ends = timeline.ends
    if not ends or ends[-1] <= not_before:
        return not_before
    starts = timeline.starts
    at = bisect_right(ends, not_before)
    busy = len(ends)
    while at < busy and starts[at] < not_before + duration:
        not_before = ends[at]
        at += 1
    return not_before


def earliest_slot(
    timelines: Sequence[Timeline], not_before: Nanoseconds, duration: Nanoseconds
) -> Nanoseconds:
    """Returns the earliest moment from which all resources are free for `duration`.

    This is PPipe's earliestSlot(res, t, l) (Algorithm 2, lines 13 and 15). Gaps between bookings
    are used as well.
    """
    start, agreed = not_before, 0
    while agreed < len(timelines):
        for timeline in timelines:
            slot = earliest_on(timeline, start, duration)
            agreed = agreed + 1 if slot == start else 1
            start = slot
            if agreed >= len(timelines):
                break
    return start
