"""Protocols of the parts of a leader that outlive it: a table, records, and a way to restore them.

The code that writes a snapshot or takes over from an earlier leader knows these protocols only, not
the parts.
"""

from __future__ import annotations

from collections.abc import Awaitable, Collection, Sequence
from typing import Protocol, TypeVar

from catenary_scheduler.storage.journal import Fields, Journal
from catenary_scheduler.storage.keys import RedisTable

Stored_contra = TypeVar("Stored_contra", contravariant=True)
Unusable = Sequence[str] | None
"""Reasons, in words for people, why some stored records could not be used; None: all of them
were."""


class Recorded(Protocol):
    """A part whose records are fields of one table; several parts may share a table."""

    @property
    def table(self) -> RedisTable:
        """The Redis table that holds the records."""
        ...

    def records(self) -> Fields:
        """Returns all records in the form in which Redis keeps them."""
        ...


class Collected(Recorded, Protocol):
    """A part that changes often, and knows which of its records changed."""

    @property
    def dirty(self) -> Collection[object]:
        """The records that changed since the last `collect`; empty if it has nothing to write."""
        ...

    def collect(self, journal: Journal) -> None:
        """Writes the records that changed since the last call into the journal."""
        ...


class StoredPart(Recorded, Protocol[Stored_contra]):
    """A part that can be restored from the records of an earlier leader."""

    def restore(self, stored: Stored_contra, /) -> Awaitable[Unusable] | Unusable:
        """Takes over the records of an earlier leader; returns what of them could not be used."""
        ...
