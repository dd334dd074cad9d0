"""The book: who uses which device and which link when, now and in the future.

There is one `Timeline` per time-shared resource ("gpu/<agent>", "uplink/<server>",
"downlink/<server>"). A *use* is one interval on one resource, or the same interval on the two links
of a transfer. A batch books a chain of uses. The verbs are

    probe    find where a batch of this size would run, and when it would finish (books nothing)
    reserve  book the path that a probe found
    confirm  keep the bookings of a batch that is alive until a later moment
    correct  replace a booked use by the real one, and move what that displaces
    release  free everything a batch has booked
    expire   release every batch that was not confirmed in time

Cache slots of generating sessions are counted, not timed: `slots.SlotLedger`, reached as
`Book.slots`, has the same verbs for them. Where a session's device computes batches too, its slots
also reserve a share of the device's time for its steps (`steps`).

Memory is authoritative; `take_changes` returns the journal for the writer to Redis.
"""

from catenary_scheduler.book.book import Book
from catenary_scheduler.book.caches import Cache, SlotClaims, cache_of
from catenary_scheduler.book.core import (
    COMPILED,
    BookedInterval,
    Path,
    PathHop,
    Pool,
    PoolChain,
    PoolMember,
    Timeline,
    earliest_slot,
)
from catenary_scheduler.book.probe import ProbeStage
from catenary_scheduler.book.reservation import Reservation, ReservationChange
from catenary_scheduler.book.slots import SlotLedger
from catenary_scheduler.book.steps import DeviceSteps, StepLine

__all__ = [
    "COMPILED",
    "Book",
    "BookedInterval",
    "Cache",
    "DeviceSteps",
    "Path",
    "PathHop",
    "Pool",
    "PoolChain",
    "PoolMember",
    "ProbeStage",
    "Reservation",
    "ReservationChange",
    "SlotClaims",
    "SlotLedger",
    "StepLine",
    "Timeline",
    "cache_of",
    "earliest_slot",
]
