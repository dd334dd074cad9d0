"""Ledger of cache slots, the resource of the book that is counted instead of timed.

A *cache* is what one agent keeps for one partition; its capacity is in block slots, one slot being
the key-value cache of one session in one block. A *reservation* gives a session slots in every
cache along its chain, until they are released one agent after the other. The verbs are those of the
book:

    probe    find the first cache of a chain that has too few slots left (books nothing)
    reserve  take slots in every cache of a chain, or in none
    confirm  keep the slots of a session that is alive until a later moment
    correct  enter the number of slots that an agent really holds for a session
    release  free the slots of a session, everywhere or on one agent
    expire   release every session that was not confirmed in time

The memory is the agents', so in the ordinary course only an agent's report, or its loss, frees
slots. The expiry is a safety net for sessions that everybody has forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heappop, heappush

from catenary_scheduler.book.caches import Cache, SlotClaims, cache_of, place_of
from catenary_scheduler.book.core import Timeline
from catenary_scheduler.book.reservation import Reservation, ReservationChange
from catenary_scheduler.book.steps import CacheSteps, DeviceSteps, StepLine
from catenary_services.domain.ids import (
    AgentId,
    BatchId,
    Nanoseconds,
    PartitionKey,
    ResourceId,
    SessionId,
)
from catenary_services.errors import InternalError

_FEWEST_STALE = 64
"""Number of outdated heap entries up to which a sweep of the expiry heap is not worth its cost."""


class _Holding:
    """The slots of one session in every cache. Bit i of the masks stands for `caches[i]`."""

    __slots__ = ("caches", "changed", "expires", "held", "session", "since", "slots", "written")

    def __init__(self, session: SessionId, since: Nanoseconds, expires: Nanoseconds) -> None:
        self.session = session
        self.since = since
        self.expires = expires
        self.caches: tuple[Cache, ...] = ()
        self.slots: tuple[int, ...] = ()
        self.held = 0
        """Mask of the caches in which slots are still held."""
        self.written = 0
        """Mask of the caches in which readers of the journal know slots to be held."""
        self.changed = 0
        """Mask of the caches whose reservation has changed since the journal was last taken."""


class SlotLedger:
    """A ledger of caches and of what every session holds in them.

    Invariants: the use of a cache is the sum of what sessions hold of it; `reserve` never makes it
    exceed the capacity; replaying the journal gives `snapshot()`.

    Attributes:
        devices: Devices that compute both batches and steps, by resource.
        prompts: Number of prompts for which time was reserved there.
    """

    def __init__(self) -> None:
        self._caches: dict[ResourceId, Cache] = {}
        self._holdings: dict[SessionId, _Holding] = {}
        self._expiries: list[tuple[Nanoseconds, SessionId]] = []
        self._touched: dict[_Holding, None] = {}
        self._timelines: dict[AgentId, Timeline] = {}
        self.devices: dict[ResourceId, DeviceSteps] = {}
        self.prompts = 0

    # Resources

    def cache(self, agent: AgentId, partition: PartitionKey) -> Cache:
        """Returns the cache of a partition on an agent, made on first use, without capacity."""
        cache = self._caches.get(cache_of(agent, partition))
        if cache is None:
            cache = Cache(agent, partition)
            self._caches[cache.resource] = cache
            self._share(cache)
        return cache

    def caches(self) -> list[Cache]:
        """Returns every known cache, including those that `forget_unused` would drop."""
        return list(self._caches.values())

    def forget_unused(self) -> None:
        """Drops caches that have neither capacity nor sessions."""
        for cache in self.caches():
            if not cache.capacity and not cache.used:
                del self._caches[cache.resource]
                if cache.steps is not None:
                    cache.steps.leave()

    # Time on devices that compute batches too

    def computes_batches(self, agent: AgentId, timeline: Timeline) -> None:
        """Has the steps of sessions on this agent reserve time beside the batches of its device."""
        if agent not in self._timelines:
            self._timelines[agent] = timeline
            for cache in self.caches():
                self._share(cache)

    def take_line(self, cache: Cache, line: StepLine | None) -> None:
        """Takes the times of the steps of a cache's sessions; None if they are not known."""
        if cache.steps is not None:
            cache.steps.line = line
            cache.steps.count(cache.used, cache.tokens)

    def prompt_comes(self, claims: SlotClaims, tokens: int, now: Nanoseconds) -> None:
        """Reserves the time of a prompt on every device along a chain that computes batches too."""
        self.prompts += 1
        for cache in claims.caches:
            if cache.steps is not None:
                cache.steps.count(cache.used, cache.tokens)
                cache.steps.prompt(tokens, now)

    def contexts_grew(self) -> None:
        """Reserves the time of steps by the tokens that sessions have cached by now."""
        for cache in self._caches.values() if self.devices else ():
            if cache.steps is not None and cache.used:
                cache.steps.count(cache.used, cache.tokens)

    def wait_ns(self, claims: SlotClaims, now: Nanoseconds) -> float:
        """Returns how long a step on a chain waits for batches, on all its devices together."""
        waits = 0.0
        for cache in claims.caches:
            if cache.steps is not None:
                waits += cache.steps.wait_ns(now)
        return waits

    # The verbs

    def probe(self, claims: SlotClaims) -> Cache | None:
        """Returns the first cache with too few slots left; None if all have enough."""
        for at, cache in enumerate(claims.caches):
            if cache.used + claims.slots[at] > cache.capacity:
                return cache
        return None

    def reserve(
        self, session: SessionId, claims: SlotClaims, now: Nanoseconds, expires_ns: Nanoseconds
    ) -> None:
        """Takes slots in every cache of a chain.

        Raises:
            InternalError: The session has a reservation already, or a cache has too few slots left.
                The ledger is unchanged then.
        """
        if session in self._holdings:
            raise InternalError(f"session {session} has a reservation already")
        lacking = self.probe(claims)
        if lacking is not None:
            raise InternalError(f"session {session} finds too few slots in {lacking.resource}")
        for at, cache in enumerate(claims.caches):
            cache.use(claims.slots[at])
        holding = _Holding(session, now, expires_ns)
        holding.caches = claims.caches
        holding.slots = claims.slots
        holding.held = holding.changed = (1 << len(claims.caches)) - 1
        self._enter(holding)

    def confirm(self, session: SessionId, expires_ns: Nanoseconds) -> None:
        """Keeps the slots of a session that is alive: it does not expire before `expires_ns`.

        Ignores an unknown session, and never makes the expiry earlier.
        """
        holding = self._holdings.get(session)
        if holding is not None and expires_ns > holding.expires:
            self.expire_at(session, expires_ns)

    def correct(
        self,
        session: SessionId,
        cache: Cache,
        slots: int,
        now: Nanoseconds,
        expires_ns: Nanoseconds,
    ) -> None:
        """Enters what an agent really holds for a session, whether or not it fits.

        Args:
            session: The session; it may be unknown so far.
            cache: The cache that holds the slots.
            slots: The number of slots; 0 is the same as a release.
            now: The start of the reservation if the session is new.
            expires_ns: The expiry of the session if it is new.
        """
        holding = self._holdings.get(session)
        if holding is None:
            if slots <= 0:
                return
            holding = _Holding(session, now, expires_ns)
            self._enter(holding)
        if cache not in holding.caches:
            holding.caches = (*holding.caches, cache)
            holding.slots = (*holding.slots, 0)
        at = holding.caches.index(cache)
        if holding.held >> at & 1:
            cache.use(-holding.slots[at])
        bit = 1 << at
        holding.changed |= bit
        holding.slots = (*holding.slots[:at], slots, *holding.slots[at + 1 :])
        if slots > 0:
            cache.use(slots)
            holding.held |= bit
        else:
            holding.held &= ~bit
        self._note(holding)

    def release(self, session: SessionId, agent: AgentId | None = None) -> list[Cache]:
        """Frees the slots of a session, on all agents or only on `agent`.

        Returns the caches in which slots were freed.
        """
        holding = self._holdings.get(session)
        freed: list[Cache] = []
        if holding is None:
            return freed
        for at, cache in enumerate(holding.caches):
            bit = 1 << at
            if holding.held & bit and (agent is None or cache.agent == agent):
                cache.use(-holding.slots[at])
                holding.held &= ~bit
                holding.changed |= bit
                freed.append(cache)
        if freed:
            self._note(holding)
        return freed

    def expire(self, now: Nanoseconds) -> list[SessionId]:
        """Releases the sessions whose expiry is at or before `now`, and returns them."""
        expired = []
        while (moment := self.next_expiry()) is not None and moment <= now:
            session = heappop(self._expiries)[1]
            self.release(session)
            expired.append(session)
        return expired

    # Around the verbs

    def expire_at(self, session: SessionId, moment: Nanoseconds) -> None:
        """Sets the expiry of a session, even to an earlier moment.

        It is used once the end of the session was ordered.
        """
        holding = self._holdings.get(session)
        if holding is not None and moment != holding.expires:
            holding.expires = moment
            holding.changed |= holding.held
            self._touched[holding] = None
            self._expire_later(holding)

    def overdue(self, now: Nanoseconds) -> list[SessionId]:
        """Returns the sessions that `expire` would release, so that some can be confirmed first."""
        found = []
        entries = []
        while (moment := self.next_expiry()) is not None and moment <= now:
            entries.append(heappop(self._expiries))
            found.append(entries[-1][1])
        for entry in entries:
            heappush(self._expiries, entry)
        return list(dict.fromkeys(found))

    def next_expiry(self) -> Nanoseconds | None:
        """Returns the moment at which `expire` next releases a session; None if there is none."""
        heap = self._expiries
        while heap:
            moment, session = heap[0]
            holding = self._holdings.get(session)
            if holding is not None and holding.expires == moment:
                return moment
            heappop(heap)
        return None

    def agents(self, session: SessionId) -> list[AgentId]:
        """Returns the agents that hold slots for a session, each once."""
        holding = self._holdings.get(session)
        if holding is None:
            return []
        found = [c.agent for at, c in enumerate(holding.caches) if holding.held >> at & 1]
        return list(dict.fromkeys(found))

    def holds(self, session: SessionId) -> list[tuple[AgentId, PartitionKey, int]]:
        """Returns the slots that a session holds: agent, partition and number."""
        holding = self._holdings.get(session)
        if holding is None:
            return []
        return [
            (cache.agent, cache.partition, holding.slots[at])
            for at, cache in enumerate(holding.caches)
            if holding.held >> at & 1
        ]

    def sessions_at(self, agent: AgentId) -> list[SessionId]:
        """Returns the sessions that hold slots on an agent, in order of their ids."""
        return sorted(each for each in self._holdings if agent in self.agents(each))

    def sessions(self) -> list[SessionId]:
        return list(self._holdings)

    def __contains__(self, session: SessionId) -> bool:
        return session in self._holdings

    def __len__(self) -> int:
        return len(self._holdings)

    def snapshot(self) -> list[Reservation]:
        """Returns every reservation, in the order of sessions."""
        return [
            _record(holding, at)
            for session in sorted(self._holdings)
            for holding in (self._holdings[session],)
            for at in range(len(holding.caches))
            if holding.held >> at & 1
        ]

    def take_changes(self) -> list[ReservationChange]:
        """Returns what changed since the last call, one line per session and cache."""
        changes = []
        for holding in self._touched:
            for at in range(len(holding.caches)):
                bit = 1 << at
                if not holding.changed & bit:
                    continue
                if holding.held & bit:
                    changes.append(ReservationChange("put", _record(holding, at)))
                elif holding.written & bit:
                    changes.append(ReservationChange("delete", _record(holding, at)))
            holding.written = holding.held
            holding.changed = 0
        self._touched.clear()
        return changes

    def restore(self, reservations: Iterable[Reservation]) -> None:
        """Enters what another scheduler has booked, with all times on this scheduler's clock.

        Sessions that hold slots here, and resources that are not caches, are skipped. Capacities
        are set by the plan.
        """
        known = set(self._holdings)
        for record in reservations:
            place = place_of(record.resource)
            if record.session in known or place is None or record.slots <= 0:
                continue
            cache = self.cache(*place)
            self.correct(record.session, cache, record.slots, record.start_ns, record.expires_ns)
            holding = self._holdings[record.session]
            holding.written = holding.held

    # Inside

    def _share(self, cache: Cache) -> None:
        timeline = self._timelines.get(cache.agent)
        if timeline is None or cache.steps is not None:
            return
        device = self.devices.get(timeline.resource)
        if device is None:
            device = self.devices[timeline.resource] = DeviceSteps(timeline)
        cache.steps = CacheSteps(device)

    def _enter(self, holding: _Holding) -> None:
        self._holdings[holding.session] = holding
        self._touched[holding] = None
        self._expire_later(holding)

    def _note(self, holding: _Holding) -> None:
        """Marks a session for the journal, and forgets it if it holds nothing."""
        if holding.held:
            self._touched[holding] = None
            return
        self._holdings.pop(holding.session, None)
        if holding.written:
            self._touched[holding] = None
        else:
            self._touched.pop(holding, None)

    def _expire_later(self, holding: _Holding) -> None:
        heap = self._expiries
        heappush(heap, (holding.expires, holding.session))
        # Sessions usually end long before they expire. Without a sweep their heap entries would
        # pile up.
        if len(heap) > 2 * len(self._holdings) + _FEWEST_STALE:
            live = [(each.expires, each.session) for each in self._holdings.values()]
            self._expiries = live
            heapify(live)


def _record(holding: _Holding, at: int) -> Reservation:
    return Reservation(
        BatchId(0),
        0,
        holding.caches[at].resource,
        holding.since,
        holding.expires,
        holding.expires,
        slots=holding.slots[at],
        session=holding.session,
    )
