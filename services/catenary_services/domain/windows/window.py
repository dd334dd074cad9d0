"""One dispatch window: the time that a gateway has on a path, and the batches it has sent into it.

The scheduler keeps the time free in its book (ADR 0058). Whoever sends batches into it counts here
when each hop will be free again, by the times that the book would have reserved for them.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from catenary_services.domain.ids import (
    NANOSECONDS_PER_MILLISECOND,
    AgentId,
    BatchId,
    ModelKey,
    Nanoseconds,
    PartitionKey,
)

MOST_LEAD_NS = 2 * NANOSECONDS_PER_MILLISECOND
"""A batch never leaves more than this before its device is free."""
LINGER_NS = 2 * NANOSECONDS_PER_MILLISECOND
"""While a batch is under way, rows wait for company for so long after it left, at least."""
SLOW_NS = 10 * NANOSECONDS_PER_MILLISECOND
"""Nothing is sent behind a batch without an answer this long after it should have finished."""
LATE_NS = 50 * NANOSECONDS_PER_MILLISECOND
"""A batch without an answer is late this long after it should have finished."""


class WindowHop(NamedTuple):
    """One hop of a window's path, with the time on it."""

    agent: AgentId
    partition: PartitionKey
    compute_ns: tuple[Nanoseconds, ...]
    """Compute time of a batch by its rows, up to the largest batch; index 0 is one row."""
    transfer_ns: tuple[Nanoseconds, ...]
    """Time of the transfer into this hop by rows; empty if nothing is transferred."""
    start_ns: Nanoseconds
    """Start of the time on the device, and on the links of the transfer."""
    end_ns: Nanoseconds
    """End of the time on the device. That on the links ends earlier by the compute time of the
    largest batch."""


class WindowBatch(NamedTuple):
    """A batch at its place in a window."""

    batch: BatchId
    rows: int
    starts_ns: tuple[Nanoseconds, ...]
    """Start of its compute on every hop."""
    finish_ns: Nanoseconds


class DispatchWindow:
    """A window, and when each hop of its path is free for the next batch.

    Batches pass the path in the order in which they were sent. None is placed that would use a
    device or a link after the end of the window's time on it.

    Args:
        window: The id of the window.
        model: The model whose rows may be sent.
        hops: The path.
        batches: The first id of its batches, and how many there are; each is used once.
        most_wait_ns: The longest that a batch may wait for the first device.
    """

    __slots__ = (
        "_end_batch",
        "_free",
        "_left_ns",
        "_links_free",
        "_sent",
        "batch_rows",
        "hops",
        "lead_ns",
        "model",
        "most_wait_ns",
        "next_batch",
        "window",
    )

    def __init__(
        self,
        window: BatchId,
        model: ModelKey,
        hops: tuple[WindowHop, ...],
        batches: tuple[BatchId, int],
        most_wait_ns: Nanoseconds,
    ) -> None:
        self.window = window
        self.model = model
        self.hops = hops
        self.batch_rows = len(hops[0].compute_ns)
        self.most_wait_ns = most_wait_ns
        self.lead_ns = min(MOST_LEAD_NS, hops[0].compute_ns[0] // 4)
        self.next_batch = batches[0]
        self._end_batch = BatchId(batches[0] + batches[1])
        self._free = [hop.start_ns for hop in hops]
        self._links_free = [hop.start_ns for hop in hops]
        self._left_ns: Nanoseconds = 0
        self._sent: deque[WindowBatch] = deque()
        """Batches without an answer, in order."""

    @property
    def end_ns(self) -> Nanoseconds:
        """The moment from which no batch leaves any more."""
        return self.hops[0].end_ns

    @property
    def batches_left(self) -> int:
        """Number of batches that may still be sent."""
        return self._end_batch - self.next_batch

    @property
    def idle_ns(self) -> Nanoseconds:
        """The moment from which a batch need not wait for more rows.

        A batch under way and its answer take longer than a small model computes: a few rows now and
        then would go singly, each at the cost of a batch.
        """
        free = self._free[0] - self.lead_ns
        return max(free, self._left_ns + LINGER_NS) if self._sent else free

    def place(self, rows: int, now: Nanoseconds) -> WindowBatch | None:
        """Returns where a batch would run if it left now; None if there is no place for it."""
        if not 1 <= rows <= self.batch_rows or self.next_batch >= self._end_batch:
            return None
        if self._sent and now > self._sent[0].finish_ns + SLOW_NS:
            return None  # the path is slower than it was booked
        return self._placed(self.next_batch, rows, now)

    def send(self, placed: WindowBatch, now: Nanoseconds) -> None:
        """Notes that a batch leaves now, which was placed just now."""
        self._left_ns = now
        self.next_batch = BatchId(placed.batch + 1)
        self._enter(placed)

    def answered(self, batch: BatchId, now: Nanoseconds) -> None:
        """Notes that the result of a batch is there, and that of all sent before it has been."""
        if not any(sent.batch == batch for sent in self._sent):
            return
        while self._sent.popleft().batch != batch:
            pass
        later = list(self._sent)
        self._sent.clear()
        for at, hop in enumerate(self.hops):
            free = max(now, hop.start_ns)
            self._free[at] = min(self._free[at], free)
            self._links_free[at] = min(self._links_free[at], free)
        for sent in later:
            again = self._walked(sent.batch, sent.rows, now)
            starts = tuple(map(min, sent.starts_ns, again.starts_ns))
            finish = min(sent.finish_ns, again.finish_ns)
            self._enter(WindowBatch(sent.batch, sent.rows, starts, finish))

    def extend(self, ends_ns: tuple[Nanoseconds, ...]) -> None:
        """Makes the window longer, by a new end for every hop."""
        if len(ends_ns) != len(self.hops):
            return
        self.hops = tuple(
            [
                hop._replace(end_ns=max(hop.end_ns, end))
                for hop, end in zip(self.hops, ends_ns, strict=True)
            ]
        )

    def busy_ns(self, now: Nanoseconds) -> tuple[Nanoseconds, ...]:
        """Returns how long every hop will be at work on what was sent."""
        if not self._sent:
            return tuple([0 for _ in self.hops])
        return tuple([max(0, free - now) for free in self._free])

    def _placed(self, batch: BatchId, rows: int, now: Nanoseconds) -> WindowBatch | None:
        placed = self._walked(batch, rows, now)
        if placed.starts_ns[0] - now > self.most_wait_ns:
            return None
        for start, hop in zip(placed.starts_ns, self.hops, strict=True):
            if start + hop.compute_ns[rows - 1] > hop.end_ns:
                return None
            if hop.transfer_ns and start > hop.end_ns - hop.compute_ns[-1]:
                return None  # the transfer may end as late as that
        return placed

    def _walked(self, batch: BatchId, rows: int, now: Nanoseconds) -> WindowBatch:
        """Returns where a batch runs that leaves now, behind all that were sent."""
        moment = now
        starts = []
        for hop, free, link_free in zip(self.hops, self._free, self._links_free, strict=True):
            if hop.transfer_ns:
                moment = max(moment, link_free) + hop.transfer_ns[rows - 1]
            moment = max(moment, free)
            starts.append(moment)
            moment += hop.compute_ns[rows - 1]
        return WindowBatch(batch, rows, tuple(starts), moment)

    def _enter(self, placed: WindowBatch) -> None:
        self._sent.append(placed)
        for at, hop in enumerate(self.hops):
            start = placed.starts_ns[at]
            self._links_free[at] = max(self._links_free[at], start)
            self._free[at] = max(self._free[at], start + hop.compute_ns[placed.rows - 1])
