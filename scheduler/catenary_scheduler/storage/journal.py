"""Changes on their way to Redis: coalesced by field, bounded in number.

Writing a field twice before it is flushed costs one write. While Redis is away the journal holds
at most `limit` entries; beyond that it forgets them all and asks for a snapshot instead, which
holds the whole state anyway.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Fields = dict[str, str | None]
"""Values to write by field of a hash; None deletes the field."""


@dataclass(slots=True)
class JournalChanges:
    """One batch of changes: hash fields to set or delete, and entries for the event stream."""

    tables: dict[str, Fields] = field(default_factory=dict)
    """Changed fields by table, which is a `keys.RedisTable` or a `keys.book_table`."""
    events: list[dict[str, str]] = field(default_factory=list)
    replace: bool = False
    """True for a snapshot: all tables are emptied before it is written."""

    def __len__(self) -> int:
        return sum(map(len, self.tables.values())) + len(self.events)


class Journal:
    """Collects changes between two flushes; never blocks and never raises."""

    def __init__(self, limit: int = 50_000) -> None:
        self._limit = limit
        self._changes = JournalChanges()
        self._count = 0
        self.needs_snapshot = False
        """True when the journal has dropped changes, so that only a full snapshot can update
        Redis."""

    def __bool__(self) -> bool:
        return self._count > 0 or self.needs_snapshot

    def __len__(self) -> int:
        return self._count

    def put(self, table: str, name: str, value: str | None) -> None:
        """Sets a field, or deletes it if `value` is None."""
        if self.needs_snapshot:
            return
        fields = self._changes.tables.setdefault(table, {})
        if name not in fields:
            self._grow(1)
            if self.needs_snapshot:
                return
        fields[name] = value

    def event(self, kind: str, facts: Mapping[str, str]) -> None:
        """Appends an entry to the event stream."""
        if self.needs_snapshot:
            return
        self._grow(1)
        if not self.needs_snapshot:
            self._changes.events.append({"kind": kind, **facts})

    def take(self) -> JournalChanges:
        """Removes and returns everything collected so far."""
        changes, self._changes, self._count = self._changes, JournalChanges(), 0
        return changes

    def put_back(self, changes: JournalChanges) -> None:
        """Takes back a batch that was not written; newer values of the same fields win.

        The batch may have arrived nevertheless; then its stream entries are there twice.
        """
        if changes.replace:
            self.require_snapshot()
        if self.needs_snapshot:
            return
        newer = self._changes
        for table, fields in newer.tables.items():
            changes.tables.setdefault(table, {}).update(fields)
        changes.events.extend(newer.events)
        self._changes, self._count = changes, len(changes)
        self._grow(0)

    def require_snapshot(self) -> None:
        """Drops what was collected: the next flush must write the whole state."""
        self._changes, self._count = JournalChanges(), 0
        self.needs_snapshot = True

    def snapshot_taken(self) -> None:
        """Collects changes again, on top of a snapshot of this very moment."""
        self._changes, self._count = JournalChanges(), 0
        self.needs_snapshot = False

    def _grow(self, by: int) -> None:
        self._count += by
        if self._count > self._limit:
            self.require_snapshot()
