"""What the book looks like from outside: plain records, one per resource and use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from catenary_services.domain.ids import BatchId, Nanoseconds, ResourceId, SessionId

NO_SESSION = SessionId(0)


@dataclass(frozen=True, slots=True)
class Reservation:
    """Batch `batch` has `resource` during `[start_ns, end_ns)` for its hop `position`.

    (batch, position, resource) identifies it. The two links of a transfer are two reservations of
    the same interval; their position is that of the receiving hop.

    Of a counted resource (`slots` is not 0) a session has so many slots instead: (session,
    resource) identifies that, and there is no batch (0) and no hop (0). Batches and sessions are
    numbered apart, so that equal numbers mean nothing. It ends when it expires, or before.
    """

    batch: BatchId
    position: int
    resource: ResourceId
    start_ns: Nanoseconds
    end_ns: Nanoseconds
    expires_ns: Nanoseconds
    """Released by `expire` unless the batch is heard of before."""
    done: bool = False
    """True once corrected: this is what really happened, and it never moves again."""
    slots: int = 0
    """Block slots of a cache; 0 for what is booked by time."""
    session: SessionId = NO_SESSION
    """Who has the slots."""

    @property
    def use(self) -> tuple[BatchId, int, Nanoseconds, Nanoseconds]:
        """Equal for the two links of a transfer, different for everything else."""
        return (self.batch, self.position, self.start_ns, self.end_ns)


@dataclass(frozen=True, slots=True)
class ReservationChange:
    """One line of the journal: the reservation as it is now ("put"), or that it is gone."""

    op: Literal["put", "delete"]
    reservation: Reservation
