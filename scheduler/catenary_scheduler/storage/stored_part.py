"""How the parts of a leader outlive it: each has a table, its records, and a way back from them.

Whoever writes a snapshot or takes over from a predecessor knows these protocols, and no part.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Protocol, TypeVar

from catenary_scheduler.storage.journal import Fields, Journal
from catenary_scheduler.storage.keys import RedisTable

Stored_contra = TypeVar("Stored_contra", contravariant=True)
Unusable = Sequence[str] | None
"""What of the stored could not be used and why, in words for people; None: all of it was."""


class Recorded(Protocol):
    """A part whose records are fields of one table; several parts may share a table."""

    @property
    def table(self) -> RedisTable:
        """Where its records are."""
        ...

    def records(self) -> Fields:
        """Returns all of it as Redis keeps it."""
        ...


class Collected(Recorded, Protocol):
    """A part that changes often, and knows what of it did."""

    def collect(self, journal: Journal) -> None:
        """Writes what changed since the last call into the journal."""
        ...


class StoredPart(Recorded, Protocol[Stored_contra]):
    """A part that is restored from what a predecessor's records said."""

    def restore(self, stored: Stored_contra, /) -> Awaitable[Unusable] | Unusable:
        """Takes over what a predecessor had; returns what of it could not be used."""
        ...
