"""Stores the book of reservations: one table for each resource, and one that lists these tables."""

from __future__ import annotations

from catenary_scheduler.dispatch import CombinedDispatcher
from catenary_scheduler.storage.clock import translation_ns
from catenary_scheduler.storage.journal import Fields, Journal
from catenary_scheduler.storage.keys import RedisTable, book_table
from catenary_scheduler.storage.store import StoredState
from catenary_scheduler.storage.values.records import shifted, tables_of, write_reservations
from catenary_services.domain.ids import ResourceId
from catenary_services.log import get_logger

_log = get_logger(__name__)


class BookRecords:
    """Writes and restores the reservations of one dispatcher."""

    def __init__(self, dispatcher: CombinedDispatcher) -> None:
        self._dispatcher = dispatcher
        self._listed: dict[ResourceId, str] = {}
        """The tables of the resources that Redis lists, once the journal is written."""

    def collect(self, journal: Journal) -> None:
        """Writes the reservations that changed since the last call into the journal."""
        write_reservations(journal, self._dispatcher.take_changes(), self._listed)

    def tables(self) -> dict[str, Fields]:
        """Returns every table of the book as it is now, and marks all changes so far as written."""
        self._dispatcher.take_changes()
        tables = tables_of(self._dispatcher.snapshot())
        resources = map(ResourceId, tables[RedisTable.RESOURCES])
        self._listed = {resource: book_table(resource) for resource in resources}
        return tables

    def restore(self, stored: StoredState) -> None:
        """Enters the reservations of an earlier scheduler, translated to this machine's clock."""
        if stored.anchor is None:
            return
        shift = translation_ns(stored.anchor, stored.now)
        reservations = shifted(stored.book, shift)
        self._dispatcher.restore(reservations)
        _log.info("book_restored", reservations=len(reservations), shift_ns=shift)
