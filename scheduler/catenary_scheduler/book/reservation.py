"""Reservations as the book exports them: plain records, one per resource and use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from catenary_services.domain.ids import BatchId, Nanoseconds, ResourceId, SessionId

NO_SESSION = SessionId(0)


@dataclass(frozen=True, slots=True)
class Reservation:
    """One booking: `batch` has `resource` during `[start_ns, end_ns)` for its hop `position`.

    (batch, position, resource) identifies a reservation. The two links of a transfer are two
    reservations of the same interval, and their position is that of the receiving hop.

    Where `slots` is not 0, the resource is counted and a session holds that many slots of it:
    (session, resource) identifies the reservation, and `batch` and `position` are 0. Batches and
    sessions are numbered independently, so equal numbers mean nothing. `end_ns` is then the expiry.
    """

    batch: BatchId
    position: int
    resource: ResourceId
    start_ns: Nanoseconds
    end_ns: Nanoseconds
    expires_ns: Nanoseconds
    """Moment at which `expire` releases the reservation, unless its batch or session is confirmed
    before."""
    done: bool = False
    """True once the use was corrected: the interval is what really happened, and never moves
    again."""
    slots: int = 0
    """Number of block slots in a cache; 0 for a resource that is booked by time."""
    session: SessionId = NO_SESSION
    """Session that holds the slots; `NO_SESSION` for a resource that is booked by time."""

    @property
    def use(self) -> tuple[BatchId, int, Nanoseconds, Nanoseconds]:
        """Key of the use. The two links of a transfer have the same one, all others differ."""
        return (self.batch, self.position, self.start_ns, self.end_ns)


@dataclass(frozen=True, slots=True)
class ReservationChange:
    """One line of the journal: a reservation that is new or changed ("put"), or gone ("delete")."""

    op: Literal["put", "delete"]
    reservation: Reservation
