"""The sessions that generate text: recorded in Redis, and asked about before an agent goes.

The book says what they hold; this module knows the request and the chain of each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from catenary_scheduler.book import SlotLedger
from catenary_scheduler.dispatch.chained.sessions.views import SessionView
from catenary_scheduler.dispatch.events import (
    Event,
    SessionMoved,
    SessionRequested,
    SessionsClosed,
    StartSession,
)
from catenary_scheduler.storage.journal import Journal
from catenary_scheduler.storage.keys import RedisTable
from catenary_scheduler.storage.values.codec import encode_document
from catenary_scheduler.storage.values.stored import Hops, StoredSession, StoredSessionHop
from catenary_services.domain.ids import (
    AgentId,
    ModelKey,
    Nanoseconds,
    PartitionKey,
    RequestId,
    SessionId,
)


@dataclass(frozen=True, slots=True)
class _Entry:
    request: RequestId
    chain_id: str
    """The chain, or "first+second" for a session with two; empty for a session of an earlier
    scheduler."""
    hops: Hops
    prompt_hops: int = 0
    """Number of leading hops that only run the prompt (split phase); 0: every hop also
    generates."""


class LiveSessions:
    """All sessions that hold cache slots somewhere.

    Args:
        slots: The slots that sessions hold by the book.
        view_of: Returns a session as the dispatcher knows it; None if it does not.
    """

    observes = (SessionsClosed, SessionRequested, SessionMoved)
    table = RedisTable.SESSIONS

    def __init__(
        self,
        slots: SlotLedger,
        view_of: Callable[[SessionId], SessionView | None] = lambda _: None,
    ) -> None:
        self._slots = slots
        self._view_of = view_of
        self._sessions: dict[SessionId, _Entry] = {}
        self.dirty: set[SessionId] = set()
        """The sessions that began or ended since the last `collect`."""
        self._remembered: dict[SessionId, Hops] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def __contains__(self, session: SessionId) -> bool:
        return session in self._sessions

    def on_event(self, event: Event, now: Nanoseconds) -> None:
        """Follows sessions once the dispatcher has decided on an event about them."""
        if isinstance(event, SessionsClosed):
            self.may_be_over(event.sessions)
        elif isinstance(event, SessionRequested):
            if event.in_flight is not None:
                self.adopted(event.in_flight.session, event.request, event.in_flight.hops)
        elif isinstance(event, SessionMoved):  # perhaps one of an earlier leader
            view = self._view_of(event.session)
            if view is not None:
                self.adopted(view.session, view.request, view.hops)

    def started(self, command: StartSession) -> None:
        hops = command.hops + command.decode_hops
        prompt_hops = len(command.hops) if command.decode_hops else 0
        self._enter(command.session, _Entry(command.request, command.chain_id, hops, prompt_hops))

    def adopted(self, session: SessionId, request: RequestId, hops: Hops) -> None:
        """Notes a session of an earlier scheduler if the book says that it still holds slots."""
        if session not in self._sessions and session in self._slots:
            self._enter(session, _Entry(request, "", hops))

    def may_be_over(self, sessions: Iterable[SessionId]) -> None:
        """Forgets those of the given sessions that hold nothing any more."""
        for session in sessions:
            if session in self._sessions and session not in self._slots:
                del self._sessions[session]
                self.dirty.add(session)

    def tick(self, now: Nanoseconds) -> None:
        """Forgets the sessions that hold nothing any more."""
        self.may_be_over(list(self._sessions))

    def uses_agent(self, agent: AgentId) -> bool:
        """Returns True if a session holds cache slots at an agent."""
        return any(cache.used for cache in self._slots.caches() if cache.agent == agent)

    def count_at(self, agent: AgentId) -> int:
        """Returns how many sessions hold cache slots at an agent."""
        return len(self._slots.sessions_at(agent))

    def uses_partition(self, agent: AgentId, partition: PartitionKey) -> bool:
        """Returns True if a session holds cache slots of a partition on an agent."""
        return any(
            cache.used
            for cache in self._slots.caches()
            if cache.agent == agent and cache.partition == partition
        )

    def using(self, agent: AgentId, partition: PartitionKey) -> list[SessionId]:
        """Returns the sessions that run through a partition of an agent."""
        return [
            session
            for session in self._slots.sessions_at(agent)
            if session in self._sessions
            and any(
                hop.agent == agent and hop.partition == partition
                for hop in self._sessions[session].hops
            )
        ]

    def request_of(self, session: SessionId) -> RequestId | None:
        entry = self._sessions.get(session)
        return entry.request if entry is not None else None

    def hops_of(self, session: SessionId) -> Hops:
        entry = self._sessions.get(session)
        return entry.hops if entry is not None else ()

    def split(self) -> list[SessionId]:
        """Returns the sessions whose prompts run on another chain than their decode steps."""
        return [session for session, entry in self._sessions.items() if entry.prompt_hops]

    def by_chain(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for session, entry in self._sessions.items():
            if not entry.prompt_hops:
                found[entry.chain_id] += 1
                continue
            mark = f"+{entry.hops[0].partition.model}/"
            prefill, _, number = entry.chain_id.rpartition(mark)
            found[mark[1:] + number] += 1
            holders = self._slots.agents(session)
            if any(hop.agent in holders for hop in entry.hops[: entry.prompt_hops]):
                found[prefill] += 1
        return found

    def by_model(self) -> Counter[ModelKey]:
        """Returns the requests with a session by model; a session that moves counts once."""
        models = {each.request: each.hops[0].partition.model for each in self._sessions.values()}
        return Counter(models.values())

    # ---- Redis ----

    def collect(self, journal: Journal) -> None:
        """Writes the sessions that changed since the last call; one that came and went is free."""
        for session in self.dirty:
            entry = self._sessions.get(session)
            journal.put(
                RedisTable.SESSIONS, str(session), None if entry is None else _record(entry)
            )
        self.dirty.clear()

    def records(self) -> dict[str, str | None]:
        self.dirty.clear()
        return {str(session): _record(entry) for session, entry in self._sessions.items()}

    def restore(self, sessions: Mapping[SessionId, Hops]) -> None:
        """Takes over the hops that an earlier scheduler recorded for its sessions."""
        self._remembered.update(sessions)

    def remembered(self, session: SessionId) -> Hops:
        """Returns the hops that an earlier scheduler recorded for a session; () if none."""
        return self._remembered.get(session, ())

    def _enter(self, session: SessionId, entry: _Entry) -> None:
        self._sessions[session] = entry
        self.dirty.add(session)


def _record(entry: _Entry) -> str:
    hops = [
        StoredSessionHop(hop.agent, str(hop.partition), hop.first_block, hop.last_block)
        for hop in entry.hops
    ]
    return encode_document(StoredSession(hops, str(entry.request), entry.chain_id))
