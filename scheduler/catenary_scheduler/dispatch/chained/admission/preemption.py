"""Relieves chains whose sessions would outgrow their memory: by a move, else by preemption.

This happens only where there are more slots than memory holds at full length. A move is asked for
early, since it takes a while: of the smallest session whose leaving is enough, to a chain with room
(where sessions are packed or balanced, the packing does this once an epoch). If the chain is about
to overflow all the same, the youngest session is *preempted*: its request waits at the head of the
queue and goes on from its history where there is room again. That is nobody's fault, so it counts
neither as a lost session nor against an agent. The oldest request of a chain never has to wait, so
all come to an end. An agent that runs out of memory before any of this fails its youngest session
as CACHE_FULL, which is treated as a preemption.
"""

from __future__ import annotations

from catenary_scheduler.dispatch.chained.chain_state import ChainState
from catenary_scheduler.dispatch.chained.migration.moving import SessionMigration
from catenary_scheduler.dispatch.chained.sessions.chain_offers import ChainOffers
from catenary_scheduler.dispatch.chained.sessions.closing import SessionClosing
from catenary_scheduler.dispatch.chained.sessions.kv_budget import expected_tokens, measure_growth
from catenary_scheduler.dispatch.chained.sessions.ledger import RequestLedger
from catenary_scheduler.dispatch.chained.sessions.session_table import SessionTable
from catenary_scheduler.dispatch.chained.states import PREEMPTED, UNWANTED
from catenary_scheduler.dispatch.chained.tracking import SequenceRequest, Session
from catenary_scheduler.dispatch.events import CachesReported
from catenary_services.domain.ids import NANOSECONDS_PER_MILLISECOND, AgentId, ModelKey, Nanoseconds

_MOVE_HORIZON_NS = 2_000 * NANOSECONDS_PER_MILLISECOND
"""Sessions move away from a chain that would overflow within this time: an epoch, and the move
itself."""
_MOVE_LEAST_TOKENS = 16
"""Tokens that every session of a chain is taken to get until then, at least."""
_PREEMPT_HORIZON_NS = 250 * NANOSECONDS_PER_MILLISECOND
"""The youngest session waits if a chain would overflow within this time: two reports of its
gateways."""
_PREEMPT_LEAST_TOKENS = 4
_TARGET_SPARE_TOKENS = 64
"""Each session must have this much room to grow at the target, lest it move again soon."""
_MOST_TRIED = 4
"""Sessions for which a place is looked for at a time."""


class SessionPreemption:
    """Handles chains on which more was promised than memory holds.

    Args:
        table: The state.
        closing: Ends sessions.
        ledger: Has requests wait again.
        migration: Begins moves.
        offers: Tells the queues what was freed.
    """

    def __init__(
        self,
        table: SessionTable,
        closing: SessionClosing,
        ledger: RequestLedger,
        migration: SessionMigration,
        offers: ChainOffers,
    ) -> None:
        self._table = table
        self._closing = closing
        self._ledger = ledger
        self._migration = migration
        self._offers = offers

    def relieve_pressure(self, routes: dict[ChainState, ModelKey]) -> None:
        """Relieves chains whose sessions have grown."""
        for route, model in routes.items():
            measure_growth(route, self._table.now)
            while self._excess(route, _PREEMPT_HORIZON_NS, _PREEMPT_LEAST_TOKENS) > 0:
                if not self._preempt_youngest(route):
                    break
            if self._table.model_queue(model).packing == "off":
                excess = self._excess(route, _MOVE_HORIZON_NS, _MOVE_LEAST_TOKENS)
                if excess > 0:
                    self._send_away(route, model, excess)

    def preempt(self, sequence: SequenceRequest, why: str) -> None:
        """Makes a request wait until there is room for its session again."""
        self._table.counters["preempted_sessions"] += 1
        sequence.preempted += 1
        self._ledger.again(sequence, PREEMPTED, why)

    def cache_was_full(self, session: Session, agent: AgentId | None) -> None:
        """Handles that an agent had no memory left for a session."""
        for hop in session.hops:
            if hop.agent == agent:
                self._table.kv_budget.is_full(self._table.slots.cache(hop.agent, hop.partition))
        if session.sequence is not None:
            self.preempt(session.sequence, f"{agent} has no memory left")
        else:
            self._closing.close(session, UNWANTED, "there is no memory for it")

    def caches_reported(self, event: CachesReported) -> None:
        """Takes in how much an agent has cached."""
        cache = self._table.slots.cache(event.agent, event.partition)
        if self._table.kv_budget.reported(cache, event.block_tokens):
            self._offers.were_freed([cache])

    def _excess(self, route: ChainState, horizon_ns: Nanoseconds, least: int) -> int:
        """Returns by how many tokens a chain will overflow, without the sessions that move away."""
        expected = expected_tokens(route, horizon_ns, least) - route.cache_tokens
        return expected - self._moving_tokens(route) if expected > 0 else expected

    def _preempt_youngest(self, route: ChainState) -> bool:
        """Preempts the youngest session; False if none could wait for the others."""
        staying = [
            sequence
            for sequence in self._staying(route)
            if sequence.session is not None and sequence.session.moving is None
        ]
        if len(staying) < 2:
            return False
        self.preempt(max(staying, key=_by_arrival), f"{route.chain_id} is about to overflow")
        return True

    def _send_away(self, route: ChainState, model: ModelKey, excess: int) -> None:
        """Moves the smallest session that is large enough, or else the largest."""
        sized = []
        for sequence in self._staying(route):
            session = sequence.session
            if session is not None and session.moving is None:
                tokens = self._table.kv_budget.tokens_of(session.session_id)
                sized.append((tokens < excess, abs(tokens - excess), session, sequence))
        sized.sort(key=_by_fit)
        for _, _, session, sequence in sized[:_MOST_TRIED]:
            target = self._roomiest(route, model, session, sequence)
            if target is not None and self._migration.move(
                session.session_id, target, "kv", "kv_pressure"
            ):
                self._table.counters["overflow_moves"] += 1
                return

    def _roomiest(
        self, route: ChainState, model: ModelKey, session: Session, sequence: SequenceRequest
    ) -> ChainState | None:
        """Returns the chain with most room of those a session can move to."""
        if self._migration.obstacle(session.session_id):
            return None
        best: ChainState | None = None
        most = 0
        for other in self._table.model_queue(model).offered:
            left = (other.cache_tokens or 1 << 62) - other.tokens
            if (
                other is not route
                and left > most
                and other.has_room(sequence.tokens, _TARGET_SPARE_TOKENS)
                and not self._migration.obstacle(session.session_id, other)
            ):
                best, most = other, left
        return best

    def _moving_tokens(self, route: ChainState) -> int:
        """Returns the tokens of sessions that are moving to another chain."""
        found = 0
        for sequence in self._staying(route):
            session = sequence.session
            if session is not None and session.moving is not None:
                found += self._table.kv_budget.tokens_of(session.session_id)
        return found

    def _staying(self, route: ChainState) -> list[SequenceRequest]:
        """Returns the requests whose sessions run on a route, and are not closing."""
        found = []
        for session_id in self._table.kv_budget.sessions_on(route):
            session = self._table.sessions.get(session_id)
            if session is not None and session.sequence is not None:
                found.append(session.sequence)
        return found


def _by_arrival(sequence: SequenceRequest) -> tuple[bool, int, int]:
    """Sort key of the age of a request; those that have waited before are older than the others."""
    return (not sequence.again, -sequence.priority, sequence.arrival_number)


def _by_fit(entry: tuple[bool, int, Session, SequenceRequest]) -> tuple[bool, int]:
    return entry[:2]
