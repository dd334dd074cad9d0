"""Rows that wait for a batch, in the order in which they are served."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from itertools import islice

from catenary_scheduler.dispatch.pooled.routes import Route
from catenary_scheduler.dispatch.pooled.text_batches import TextBatch, least_size, pack_texts
from catenary_scheduler.dispatch.pooled.tracking import Request, RowRange
from catenary_services.domain.ids import ModelKey, Nanoseconds
from catenary_services.domain.model import TokenUnits

_Key = tuple[int, Nanoseconds, int, int]

_MOST_LOOKED_AT = 256
"""The most ranges of texts that are looked at for one batch."""


class WaitingRows:
    """Waiting rows that may go in one batch.

    Attributes:
        size: Size of that batch, in units or rows; without units perhaps more than may go at once.
        is_full: True if a batch of them has no room left.
        leaves_rows: True if rows wait that should not go with them, because of their lengths.
    """

    __slots__ = ("is_full", "leaves_rows", "size")

    def __init__(self, size: int, is_full: bool, leaves_rows: bool) -> None:
        self.size = size
        self.is_full = is_full
        self.leaves_rows = leaves_rows


class RowQueue:
    """Waiting rows of one model.

    The order is by priority, then earlier deadline, then arrival. Rows that come back from a failed
    batch keep their deadline, which puts them ahead of everything that arrived later with the same
    SLO.

    Rows that made a device fail are served alone, so that it shows what is to blame. Rows that
    should avoid agents are served together with rows that avoid no other agents.
    """

    __slots__ = ("_entries", "_priorities", "lingering_since", "model", "rows", "wake", "wary")

    def __init__(self, model: ModelKey) -> None:
        self.model = model
        self.rows = 0
        self.wake: Nanoseconds | None = None
        """Moment at which to look again without an event; None while the queue is empty."""
        self.lingering_since: Nanoseconds | None = None
        """Moment since which rows have waited for a full batch; None if none do."""
        self.wary = 0
        """Number of entries that may not share a batch with all others."""
        self._entries: list[tuple[_Key, RowRange]] = []
        self._priorities: dict[int, int] = {}

    def __bool__(self) -> bool:
        return bool(self._entries)

    @property
    def head(self) -> RowRange:
        """The rows to be served first."""
        return self._entries[0][1]

    @property
    def head_key(self) -> _Key:
        """Urgency of the head, for comparison with other queues."""
        return self._entries[0][0]

    def push(self, rows: RowRange) -> None:
        """Inserts rows at their place in the order."""
        request = rows.request
        insort(self._entries, (_key(rows), rows))
        self.rows += rows.count
        self.wary += bool(rows.avoid)
        request.queued_rows += rows.count
        self._priorities[request.priority] = self._priorities.get(request.priority, 0) + 1

    def least_size(self, units: TokenUnits | None) -> int:
        """Returns the size of the smallest batch that has room for the first row."""
        return least_size(self.head, units)

    def size(self, units: TokenUnits | None) -> int:
        """Returns the size of a batch that is large enough for all rows."""
        return self.rows if units is None else self.rows * units.per_text

    def due(self, route: Route, limit: int, finish: Nanoseconds) -> WaitingRows:
        """Returns what may be in a batch of at most `limit` that ends at `finish`."""
        units = route.units
        if units is None:
            rows = self._rows_due(finish)
            return WaitingRows(rows, rows >= limit, False)
        _, batch = self._packed(route, units, limit, finish)
        size = units.of(batch.rows, batch.tokens)
        return WaitingRows(size, batch.is_full, batch.leaves_rows)

    def _packed(
        self, route: Route, units: TokenUnits, limit: int, finish: Nanoseconds
    ) -> tuple[list[int], TextBatch]:
        """Returns the places of the entries looked at, and the batch that is made of these."""
        places = list(islice(self._joining(finish), _MOST_LOOKED_AT))
        ranges = [self._entries[at][1] for at in places]
        return places, pack_texts(ranges, units, limit, route.chain.least_work_ns)

    def _joining(self, finish: Nanoseconds) -> Iterator[int]:
        """Yields the places of entries that may be in a batch that ends at `finish`."""
        head = self.head
        for at, (_, rows) in enumerate(self._entries):
            if rows is head or (rows.request.deadline >= finish and _go_together(head, rows)):
                yield at

    def _rows_due(self, finish: Nanoseconds) -> int:
        if len(self._priorities) == 1 and not self.wary:
            return self.rows  # no deadline is before the head's
        head = self.head
        return sum(
            [
                rows.count
                for _, rows in self._entries
                if rows.request.deadline >= finish and _go_together(head, rows)
            ]
        )

    def take(self, route: Route, size: int, finish: Nanoseconds) -> tuple[list[RowRange], int]:
        """Removes the first rows that fit a batch of a size that ends at `finish`.

        Returns:
            The rows, and the size of the batch in units; 0 without units.
        """
        if route.units is None:
            return self._take_rows(size, finish), 0
        places, batch = self._packed(route, route.units, size, finish)
        taken: list[RowRange] = []
        # Places behind one that is dropped change.
        for at, count in zip(reversed(places), reversed(batch.counts), strict=True):
            if count:
                taken.append(self._take_from(at, count))
        taken.reverse()
        self.lingering_since = None
        return taken, route.units.of(batch.rows, batch.tokens)

    def _take_from(self, at: int, count: int) -> RowRange:
        """Removes and returns the first rows of an entry."""
        rows = self._entries[at][1]
        if rows.count == count:
            self._drop(at)
            return rows
        part = rows.part(count)
        rows.first += count
        rows.count -= count
        self._entries[at] = (_key(rows), rows)
        self.rows -= count
        rows.request.queued_rows -= count
        return part

    def _take_rows(self, count: int, finish: Nanoseconds) -> list[RowRange]:
        taken: list[RowRange] = []
        entries = self._entries
        head = self.head
        at = 0
        while count and at < len(entries):
            rows = entries[at][1]
            if rows.request.deadline < finish or not _go_together(head, rows):
                at += 1
                continue
            taken.append(self._take_from(at, min(count, rows.count)))
            count -= taken[-1].count
        self.lingering_since = None
        return taken

    def remove(self, request: Request) -> None:
        at = len(self._entries) - 1
        while request.queued_rows and at >= 0:
            if self._entries[at][1].request is request:
                self._drop(at)
            at -= 1

    def requests(self) -> list[Request]:
        """Returns the requests with waiting rows, each once."""
        return list(dict.fromkeys(rows.request for _, rows in self._entries))

    def _drop(self, at: int) -> None:
        rows = self._entries.pop(at)[1]
        self.rows -= rows.count
        self.wary -= bool(rows.avoid)
        rows.request.queued_rows -= rows.count
        priority = rows.request.priority
        self._priorities[priority] -= 1
        if not self._priorities[priority]:
            del self._priorities[priority]
        if not self._entries:
            self.wake = self.lingering_since = None


def _go_together(head: RowRange, rows: RowRange) -> bool:
    """True if rows may be in a batch whose first rows are `head`."""
    if rows is head:
        return True
    if head.failures or rows.failures:
        return head.request is rows.request
    return rows.avoid <= head.avoid


def _key(rows: RowRange) -> _Key:
    request = rows.request
    return (-request.priority, request.deadline, request.sequence, rows.first)
