"""The reservation book of one scheduler: its resources, and what each batch has booked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from catenary_scheduler.book.cascade import Cascade
from catenary_scheduler.book.core import (
    BookedInterval,
    Path,
    PathHop,
    Pool,
    PoolChain,
    PoolMember,
    Timeline,
    earliest_slot,
    enter,
    uses_of,
)
from catenary_scheduler.book.journal import ReservationJournal, grouped_by_use
from catenary_scheduler.book.reservation import Reservation, ReservationChange
from catenary_scheduler.book.slots import SlotLedger
from catenary_services.domain.ids import AgentId, BatchId, Nanoseconds, ResourceId
from catenary_services.domain.plan import Agent
from catenary_services.errors import InternalError


class Correction(NamedTuple):
    """Difference between a booked and a real use, and the batches that it displaced."""

    drift_ns: Nanoseconds
    """Real end of the use minus its booked end."""
    displaced: tuple[BatchId, ...]
    """Batches whose later uses were moved, each once."""


class StartWindow(NamedTuple):
    """The moment from which a booked use may start: nothing is booked until its booked start."""

    earliest_ns: Nanoseconds
    """End of the use that is booked ahead of it; 0: there is none."""
    behind: BatchId
    """Batch of the use ahead of it; 0: there is none. Once that is over, it may start."""


_AT_ONCE = StartWindow(0, BatchId(0))


class _Booking:
    """The intervals one batch has booked, in order of time, and when they expire."""

    __slots__ = ("expires", "is_held", "uses")

    def __init__(self, uses: list[BookedInterval], expires: Nanoseconds) -> None:
        self.uses = uses
        self.expires = expires
        self.is_held = False
        """True if it was booked by `hold`."""


class Book:
    """Timelines of all resources, the chain of uses of every batch, and the ledger of cache slots.

    `slots` books cache slots, which are counted instead of timed, by session and with the same
    verbs. `snapshot`, `take_changes` and `restore` cover both kinds.

    Invariants: no two uses overlap on a resource; within a batch no use that can still move starts
    before the one ahead of it ends; replaying the journal gives `snapshot()`.
    """

    def __init__(self) -> None:
        self.slots = SlotLedger()
        self._timelines: dict[ResourceId, Timeline] = {}
        self._bookings: dict[BatchId, _Booking] = {}
        self._expiries: list[tuple[Nanoseconds, BatchId]] = []
        self._history: list[tuple[Nanoseconds, int, BookedInterval]] = []
        self._followed: list[Pool] = []
        self._corrections = 0
        self._journal = ReservationJournal()

    # Resources

    def timeline(self, resource: ResourceId) -> Timeline:
        """Returns the timeline of a resource, and makes it on first use."""
        line = self._timelines.get(resource)
        if line is None:
            line = self._timelines[resource] = Timeline(resource)
        return line

    def member(self, agent: Agent) -> PoolMember:
        """Returns the timelines and the link speed of an agent, as a member of a pool."""
        gpu = self.timeline(gpu_of(agent.agent_id))
        self.slots.computes_batches(agent.agent_id, gpu)
        return PoolMember(
            agent.agent_id,
            gpu,
            self.timeline(ResourceId(f"uplink/{agent.server}")),
            self.timeline(ResourceId(f"downlink/{agent.server}")),
            max(1, agent.link_bytes_per_second),
        )

    def follow(self, pools: Iterable[Pool]) -> None:
        """Attaches these pools, which are then kept in order, and detaches all others.

        A pool that is detached must not be probed any more.
        """
        for pool in self._followed:
            pool.detach()
        self._followed = list(pools)
        for pool in self._followed:
            pool.attach()

    # The verbs

    def probe(self, chain: PoolChain, rows: int, now: Nanoseconds) -> Path:
        """Returns where a batch of `rows` would run if it were dispatched now. Books nothing."""
        return chain.probe(rows, now)

    def reserve(self, batch: BatchId, steps: Sequence[PathHop], expires_ns: Nanoseconds) -> None:
        """Books every transfer and compute interval of a path; without steps, only the expiry.

        Raises:
            InternalError: An interval is not free, or the batch has a booking already. The book is
                unchanged then.
        """
        self._enter(batch, uses_of(batch, steps), expires_ns)

    def hold(
        self,
        batch: BatchId,
        position: int,
        lines: tuple[Timeline, ...],
        start_ns: Nanoseconds,
        end_ns: Nanoseconds,
    ) -> None:
        """Books one interval on some resources at once; it expires at its end.

        Raises:
            InternalError: As by `reserve`.
        """
        self._enter(batch, [BookedInterval(batch, position, lines, start_ns, end_ns)], end_ns)
        self._bookings[batch].is_held = True

    def resize(self, batch: BatchId, end_ns: Nanoseconds) -> bool:
        """Moves the end of what `hold` booked; an end that is not behind its start releases it.

        Returns False, and changes nothing, if the booking is over or something is booked behind it
        that is in the way.
        """
        booking = self._bookings.get(batch)
        if booking is None or len(booking.uses) != 1 or booking.uses[0].done:
            return False
        use = booking.uses[0]
        if end_ns <= use.start:
            return self.release(batch)
        if end_ns > use.end and any(line.ends[-1] > use.end for line in use.timelines):
            return False
        for line in use.timelines:
            line.resize(use, use.start, end_ns)
        use.end = end_ns
        self._postpone(batch, booking, end_ns)
        return True

    def confirm(self, batch: BatchId, expires_ns: Nanoseconds) -> None:
        """Keeps the bookings of a batch that is alive: it does not expire before `expires_ns`.

        Ignores a batch without a booking, and never makes the expiry earlier.
        """
        booking = self._bookings.get(batch)
        if booking is not None and expires_ns > booking.expires:
            self._postpone(batch, booking, expires_ns)

    def correct(
        self,
        batch: BatchId,
        position: int,
        start_ns: Nanoseconds,
        end_ns: Nanoseconds | None,
        *,
        transfer: bool = False,
    ) -> Correction | None:
        """Replaces a booked interval by the one that really happened, or has begun to.

        * The real interval takes the place of the booked one. Where a real use of the same resource
          is known already, what is known stays and only the rest is entered.
        * Uses that overlap it and have not been reported move behind its end. They in turn displace
          later uses of the same resources and of the same batches (both links of a transfer
          together), which move as well and keep their order. If the last use of a batch moves, the
          expiry of the batch moves by as much.
        * If it ended earlier than booked, the rest is free. Later uses stay where they are: agents
          run early when they can, and then report so.
        * Uses of this batch ahead of this one that were never reported are over: they end, at the
          latest, where this one starts.
        * Without an end, only the start is known. The interval keeps its length, and its end is
          still to come. Others that have begun on the same resource end, at the latest, where it
          starts.

        Returns:
            The drift and the displaced batches, or None if there is no such booking (released,
            pruned, or corrected before).
        """
        booking = self._bookings.get(batch)
        if booking is None:
            return None
        for use in booking.uses:
            if use.position == position and use.transfers == transfer:
                break
        else:
            return None
        if use.done:
            return None
        if end_ns is None:
            self._end_ahead(booking, use, start_ns)
            return self._begin(use, start_ns)
        end_ns = max(end_ns, start_ns + 1)
        if not transfer and self.slots.devices:
            device = self.slots.devices.get(use.timelines[0].resource)
            if device is not None:
                device.computed(start_ns, end_ns)
        drift = end_ns - use.end
        self._end_ahead(booking, use, start_ns)
        return Correction(drift, self._settle(use, start_ns, end_ns))

    def release(self, batch: BatchId) -> bool:
        """Frees everything a batch has booked. Returns False if it has no booking."""
        booking = self._bookings.pop(batch, None)
        if booking is None:
            return False
        for use in booking.uses:
            self._take_out(use)
        return True

    def expire(self, now: Nanoseconds) -> list[BatchId]:
        """Releases the batches whose expiry is at or before `now`, and returns them."""
        expired = []
        while (moment := self.next_expiry()) is not None and moment <= now:
            batch = heappop(self._expiries)[1]
            self.release(batch)
            expired.append(batch)
        return expired

    # Around the verbs

    def next_expiry(self) -> Nanoseconds | None:
        """Returns the moment at which `expire` next releases a batch; None without any booking."""
        heap = self._expiries
        while heap:
            moment, batch = heap[0]
            booking = self._bookings.get(batch)
            if booking is not None and booking.expires == moment:
                return moment
            heappop(heap)
        return None

    def prune(self, now: Nanoseconds) -> None:
        """Forgets uses that really happened and ended by `now`.

        The cost is constant if there are none.
        """
        while self._history and self._history[0][0] <= now:
            use = heappop(self._history)[2]
            if use.live:
                self._bookings[use.batch].uses.remove(use)
                self._take_out(use)

    def start_windows(self, batch: BatchId) -> list[StartWindow]:
        """Returns what each booked use of a batch has to let go first, in order of time.

        Nothing waits for what `hold` has booked: whether that time is used is not known.
        """
        booking = self._bookings.get(batch)
        found = []
        for use in booking.uses if booking is not None else ():
            ahead = use.timelines[0].before(use)
            if len(use.timelines) > 1:
                other = use.timelines[1].before(use)
                if ahead is None or (other is not None and other.end > ahead.end):
                    ahead = other
            if ahead is None or self._bookings[ahead.batch].is_held:
                found.append(_AT_ONCE)
            else:
                found.append(StartWindow(ahead.end, ahead.batch))
        return found

    def finish(self, batch: BatchId) -> Nanoseconds | None:
        """Returns when the last booked use of a batch ends; None if it has booked nothing."""
        booking = self._bookings.get(batch)
        return booking.uses[-1].end if booking and booking.uses else None

    def __contains__(self, batch: BatchId) -> bool:
        return batch in self._bookings

    def __len__(self) -> int:
        return len(self._bookings)

    def batches(self) -> list[BatchId]:
        """Returns the batches that have a booking."""
        return list(self._bookings)

    def ahead(self, batch: BatchId) -> list[ResourceId]:
        """Returns the resources that a batch has booked and was not yet reported to have used."""
        booking = self._bookings.get(batch)
        uses = booking.uses if booking is not None else []
        return [line.resource for use in uses if not use.done for line in use.timelines]

    def pending_on(self, resource: ResourceId) -> list[BatchId]:
        """Returns the batches with a use of `resource` that was not reported yet."""
        line = self._timelines.get(resource)
        uses = line.uses if line else []
        return list(dict.fromkeys(use.batch for use in uses if not use.done))

    def last_position(self, batch: BatchId) -> int | None:
        """Returns the position of the last hop that a batch has booked; None if there is none."""
        booking = self._bookings.get(batch)
        return booking.uses[-1].position if booking and booking.uses else None

    def snapshot(self) -> list[Reservation]:
        """Returns every reservation: those of batches by batch and time, then those of sessions."""
        timed = [
            record
            for batch in sorted(self._bookings)
            for use in self._bookings[batch].uses
            for record in self._records(use)
        ]
        return timed + self.slots.snapshot()

    def take_changes(self) -> list[ReservationChange]:
        """Returns what changed since the last call, one line per reservation, in order."""
        return self._journal.take(self._records) + self.slots.take_changes()

    def restore(self, reservations: Iterable[Reservation]) -> None:
        """Enters what another scheduler has booked, with all times on this scheduler's clock.

        An interval that overlaps another (a journal may end in the middle of a cascade) is put into
        the next free slot. Batches that have a booking here are skipped.
        """
        timed: list[Reservation] = []
        counted: list[Reservation] = []
        for record in reservations:
            (counted if record.slots else timed).append(record)
        self.slots.restore(counted)
        known = set(self._bookings)
        ready: dict[BatchId, Nanoseconds] = {}
        for records in grouped_by_use(timed):
            batch, position, start, end = records[0].use
            if batch in known or start >= end:
                continue
            lines = tuple(self.timeline(record.resource) for record in records)
            done = records[0].done
            not_before = start if done else max(start, ready.get(batch, start))
            slot = earliest_slot(lines, not_before, end - start)
            use = BookedInterval(batch, position, lines, slot, slot + end - start)
            if not done:
                ready[batch] = use.end
            booking = self._bookings.get(batch)
            if booking is None:
                self._enter(batch, [], records[0].expires_ns)
                booking = self._bookings[batch]
            self._put_in(use)
            booking.uses.append(use)
            use.persisted = True
            if done:
                self._close(use)

    # Inside

    def _enter(self, batch: BatchId, uses: list[BookedInterval], expires: Nanoseconds) -> None:
        if batch in self._bookings:
            raise InternalError(f"batch {batch} has a booking already")
        enter(uses)
        for use in uses:
            self._journal.note(use)
        self._bookings[batch] = _Booking(uses, expires)
        heappush(self._expiries, (expires, batch))

    def _put_in(self, use: BookedInterval) -> None:
        enter((use,))
        self._journal.note(use)

    def _take_out(self, use: BookedInterval) -> None:
        for line in use.timelines:
            line.remove(use)
        use.live = False
        self._journal.gone(use)

    def _settle(
        self, use: BookedInterval, start: Nanoseconds, end: Nanoseconds
    ) -> tuple[BatchId, ...]:
        """Turns a booked use into a real one and moves the uses that are in its way.

        Returns the batches whose uses moved.
        """
        booking = self._bookings[use.batch]
        following = self._successor(use)
        start = max(start, *(line.done_until for line in use.timelines), 0)
        undisturbed = start < end and (following is None or following.start >= end)
        if undisturbed and all(line.alone(use, start, end) for line in use.timelines):
            for line in use.timelines:
                line.resize(use, start, end)
            use.start, use.end = start, end
            self._journal.note(use)
            self._close(use)
            return ()
        self._take_out(use)
        if start >= end:
            booking.uses.remove(use)
        cascade = Cascade(self._successor)
        for line in use.timelines:
            for other in line.overlapping(start, end) if start < end else ():
                cascade.displace(other, end)
            if start < end:
                line.ran_until(end)
        cascade.displace(following, end)
        moves = cascade.moves()
        for moved, _ in moves:
            self._take_out(moved)
        if start < end:
            use.start, use.end = start, end
            self._put_in(use)
            self._close(use)
        for moved, new_start in moves:
            self._move(moved, new_start)
        return tuple(dict.fromkeys(moved.batch for moved, _ in moves))

    def _end_ahead(self, booking: _Booking, use: BookedInterval, start: Nanoseconds) -> None:
        for ahead in booking.uses[: booking.uses.index(use)]:
            if not ahead.done:
                self._settle(ahead, ahead.start, min(ahead.end, start))

    def _begin(self, use: BookedInterval, start: Nanoseconds) -> Correction:
        """Moves a use that has begun to its real start, and what is in its way behind it."""
        use.begun = True
        uses = self._bookings[use.batch].uses
        at = uses.index(use)
        if at:  # clocks differ: its data cannot have been there earlier
            start = max(start, uses[at - 1].end)
        start = max(start, *(line.done_until for line in use.timelines), 0)
        later = start - use.start
        if not later:
            return Correction(0, ())
        end = use.end + later
        following = self._successor(use)
        self._take_out(use)
        cascade = Cascade(self._successor)
        for line in use.timelines:
            for other in line.overlapping(start, end):
                if other.begun and other.start < start:
                    for each in other.timelines:
                        each.resize(other, other.start, start)
                    other.end = start
                    self._journal.note(other)
                else:
                    cascade.displace(other, end)
        cascade.displace(following, end)
        moves = cascade.moves()
        for moved, _ in moves:
            self._take_out(moved)
        use.start, use.end = start, end
        self._put_in(use)
        for moved, new_start in moves:
            self._move(moved, new_start)
        return Correction(later, tuple(dict.fromkeys(moved.batch for moved, _ in moves)))

    def _close(self, use: BookedInterval) -> None:
        use.done = True
        self._corrections += 1
        heappush(self._history, (use.end, self._corrections, use))
        for line in use.timelines:
            line.ran_until(use.end)

    def _move(self, use: BookedInterval, start: Nanoseconds) -> None:
        later = start - use.start
        use.start, use.end = start, use.end + later
        self._put_in(use)
        booking = self._bookings[use.batch]
        if booking.uses[-1] is use:
            self._postpone(use.batch, booking, booking.expires + later)

    def _postpone(self, batch: BatchId, booking: _Booking, expires: Nanoseconds) -> None:
        booking.expires = expires
        heappush(self._expiries, (expires, batch))
        for use in booking.uses:
            self._journal.note(use)

    def _successor(self, use: BookedInterval) -> BookedInterval | None:
        uses = self._bookings[use.batch].uses
        for other in uses[uses.index(use) + 1 :]:
            if not other.done:
                return other
        return None

    def _records(self, use: BookedInterval) -> list[Reservation]:
        booking = self._bookings.get(use.batch)
        expires = booking.expires if booking else use.end
        return [
            Reservation(
                use.batch, use.position, line.resource, use.start, use.end, expires, use.done
            )
            for line in use.timelines
        ]


def gpu_of(agent: AgentId) -> ResourceId:
    return ResourceId(f"gpu/{agent}")


def agents_of(resources: Iterable[ResourceId]) -> tuple[AgentId, ...]:
    """Returns the agents whose GPUs are among some resources."""
    parts = [resource.partition("/") for resource in resources]
    return tuple([AgentId(owner) for kind, _, owner in parts if kind == "gpu"])
