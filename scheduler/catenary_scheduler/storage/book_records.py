"""The book of reservations as it is stored: a table for each resource, and one that lists them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from catenary_scheduler.book import Reservation, ReservationChange
from catenary_scheduler.storage.clock import translation_ns
from catenary_scheduler.storage.journal import Fields, Journal
from catenary_scheduler.storage.store import StoredState
from catenary_scheduler.storage.values.records import shifted, tables_of, write_reservations
from catenary_services.log import get_logger

_log = get_logger(__name__)


class KeepsBook(Protocol):
    """Whoever books, and notes every change."""

    def take_changes(self) -> list[ReservationChange]:
        """Returns what changed in the book since the last call."""
        ...

    def snapshot(self) -> list[Reservation]:
        """Returns every reservation there is."""
        ...

    def restore(self, reservations: Iterable[Reservation]) -> None:
        """Enters reservations that somebody else made."""
        ...


class BookRecords:
    """Writes and restores what one dispatcher booked."""

    def __init__(self, keeper: KeepsBook) -> None:
        self._keeper = keeper

    def collect(self, journal: Journal) -> None:
        """Writes what changed since the last call into the journal."""
        write_reservations(journal, self._keeper.take_changes())

    def tables(self) -> dict[str, Fields]:
        """Returns every table of the book as it is now; what changed until now is in them."""
        self._keeper.take_changes()
        return tables_of(self._keeper.snapshot())

    def restore(self, stored: StoredState) -> None:
        """Enters what a predecessor had booked, translated to our clock."""
        if stored.anchor is None:
            return
        shift = translation_ns(stored.anchor, stored.now)
        reservations = shifted(stored.book, shift)
        self._keeper.restore(reservations)
        _log.info("book_restored", reservations=len(reservations), shift_ns=shift)
