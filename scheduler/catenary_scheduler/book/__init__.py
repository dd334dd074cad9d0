"""The book: who uses which device and which link when, now and in the future.

One `Timeline` per time-shared resource ("gpu/<agent>", "uplink/<server>", "downlink/<server>").
A *use* is one interval on one resource, or the same interval on the two links of a transfer; a
batch books a chain of uses. The verbs are

    probe    where would a batch of this size run, and when would it finish (books nothing)
    reserve  book the chain a probe found
    confirm  the batch is alive: keep its bookings until a later moment
    correct  a use really ran from a to b: mend the book, push out what that displaces
    release  the batch needs nothing more
    expire   release every batch that was not heard of in time

Cache slots of generating sessions are counted, not timed: `slots.SlotLedger`, reached as
`Book.slots`, has the same verbs for them.

Memory is authoritative; `take_changes` hands the journal to whoever writes it to Redis.
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

__all__ = [
    "COMPILED",
    "Book",
    "BookedInterval",
    "Cache",
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
    "Timeline",
    "cache_of",
    "earliest_slot",
]
