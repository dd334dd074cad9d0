"""Collects the state of a leader for Redis: its changes as they come, or all of it at once."""

from __future__ import annotations

from collections.abc import Sequence

from catenary_scheduler.storage.book_records import BookRecords
from catenary_scheduler.storage.journal import Fields, Journal, JournalChanges
from catenary_scheduler.storage.keys import RedisTable
from catenary_scheduler.storage.stored_part import Collected, Recorded


class SnapshotWriter:
    """Writes changed records into the journal.

    Args:
        journal: The journal that takes the changes.
        book: The records of the book, which change with every request, in tables of their own.
        collected: Parts that change often, and know which of their records changed.
        compared: Parts that change rarely; their records are compared with those written before.
            Several parts may share a table.
    """

    def __init__(
        self,
        journal: Journal,
        book: BookRecords,
        collected: Sequence[Collected],
        compared: Sequence[Recorded],
    ) -> None:
        self._journal = journal
        self._book = book
        self._collected = collected
        self._compared = compared
        self._written: dict[RedisTable, Fields] = {}
        self._rare_changed = True

    def changed(self) -> None:
        """Notes that a compared part may have changed, so that the next `collect` compares them."""
        self._rare_changed = True

    def collect(self) -> None:
        """Writes the records that changed since the last call into the journal."""
        self._book.collect(self._journal)
        for part in self._collected:
            if part.dirty:
                part.collect(self._journal)
        if self._rare_changed:
            self._rare_changed = False
            self._collect_rare()

    def snapshot(self) -> JournalChanges:
        """Returns all present records, to replace those in Redis."""
        self._written = self._rare()
        self._rare_changed = False
        tables = self._book.tables()
        for part in self._collected:
            tables[part.table] = part.records()
        tables.update({table: dict(fields) for table, fields in self._written.items()})
        return JournalChanges(tables, [], replace=True)

    def _collect_rare(self) -> None:
        present = self._rare()
        for table, fields in present.items():
            before = self._written.get(table, {})
            for name, value in fields.items():
                if before.get(name) != value:
                    self._journal.put(table, name, value)
            for name in before.keys() - fields.keys():
                self._journal.put(table, name, None)
        self._written = present

    def _rare(self) -> dict[RedisTable, Fields]:
        found: dict[RedisTable, Fields] = {}
        for part in self._compared:
            found.setdefault(part.table, {}).update(part.records())
        return found
