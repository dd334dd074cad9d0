"""Journal of changes to the book, and the order in which stored records are read back."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from catenary_scheduler.book.core import BookedInterval
from catenary_scheduler.book.reservation import Reservation, ReservationChange


class ReservationJournal:
    """Set of the uses that changed since the journal was last taken.

    Several changes of one use between two calls of `take` are one change, and a use that came and
    went in between is none. The set therefore never outgrows the book, even if nobody takes it.
    """

    __slots__ = ("_touched",)

    def __init__(self) -> None:
        self._touched: dict[BookedInterval, None] = {}

    def note(self, use: BookedInterval) -> None:
        """Records that a use is new or has changed."""
        self._touched[use] = None

    def gone(self, use: BookedInterval) -> None:
        """Records that a use was removed from the book."""
        if use.persisted:
            self._touched[use] = None
        else:
            self._touched.pop(use, None)

    def take(
        self, records: Callable[[BookedInterval], list[Reservation]]
    ) -> list[ReservationChange]:
        """Returns the changes since the last call, with each use as it is now."""
        changes = []
        for use in self._touched:
            if use.live:
                use.persisted = True
                changes += [ReservationChange("put", record) for record in records(use)]
            elif use.persisted:
                use.persisted = False
                changes += [ReservationChange("delete", record) for record in records(use)]
        self._touched.clear()
        return changes


def grouped_by_use(reservations: Iterable[Reservation]) -> list[list[Reservation]]:
    """Returns the records of each use together: real uses by hop, then the others by time."""
    groups: dict[tuple[int, int, int, int], list[Reservation]] = {}
    for record in reservations:
        groups.setdefault(record.use, []).append(record)
    return sorted(groups.values(), key=_order)


def _order(group: list[Reservation]) -> tuple[bool, int, int]:
    first = group[0]
    if first.done:  # a transfer (two links) comes before the compute of its hop
        return (False, first.position, -len(group))
    return (True, first.start_ns, 0)
