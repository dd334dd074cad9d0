"""Stores the book of reservations: one table for each resource, and one that lists these tables."""

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
    """The dispatcher as the holder of a book that notes every change."""

    def take_changes(self) -> list[ReservationChange]:
        """Returns the changes in the book since the last call."""
        ...

    def snapshot(self) -> list[Reservation]:
        """Returns every reservation in the book."""
        ...

    def restore(self, reservations: Iterable[Reservation]) -> None:
        """Enters reservations that another scheduler made."""
        ...


class BookRecords:
    """Writes and restores the reservations of one dispatcher."""

    def __init__(self, keeper: KeepsBook) -> None:
        self._keeper = keeper

    def collect(self, journal: Journal) -> None:
        """Writes the reservations that changed since the last call into the journal."""
        write_reservations(journal, self._keeper.take_changes())

    def tables(self) -> dict[str, Fields]:
        """Returns every table of the book as it is now, and marks all changes so far as written."""
        self._keeper.take_changes()
        return tables_of(self._keeper.snapshot())

    def restore(self, stored: StoredState) -> None:
        """Enters the reservations of an earlier scheduler, translated to this machine's clock."""
        if stored.anchor is None:
            return
        shift = translation_ns(stored.anchor, stored.now)
        reservations = shifted(stored.book, shift)
        self._keeper.restore(reservations)
        _log.info("book_restored", reservations=len(reservations), shift_ns=shift)
