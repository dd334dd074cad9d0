"""Rows that wait for a batch, in the order in which they are served."""

from __future__ import annotations

from bisect import insort

from catenary_scheduler.dispatch.pooled.tracking import Request, RowRange
from catenary_services.domain.ids import ModelKey, Nanoseconds

_Key = tuple[int, Nanoseconds, int, int]


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

    def rows_due(self, finish: Nanoseconds) -> int:
        """Returns how many rows may be in a batch that ends at `finish`."""
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

    def take(self, count: int, finish: Nanoseconds) -> list[RowRange]:
        """Removes and returns the first `count` rows that fit a batch ending at `finish`."""
        taken: list[RowRange] = []
        entries = self._entries
        head = self.head
        at = 0
        while count and at < len(entries):
            rows = entries[at][1]
            if rows.request.deadline < finish or not _go_together(head, rows):
                at += 1
                continue
            if rows.count > count:
                part = rows.part(count)
                rows.first += count
                rows.count -= count
                entries[at] = (_key(rows), rows)
                self.rows -= count
                rows.request.queued_rows -= count
                taken.append(part)
                break
            taken.append(rows)
            count -= rows.count
            self._drop(at)
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
