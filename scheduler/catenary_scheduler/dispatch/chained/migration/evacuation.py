"""Moves misplaced sessions away, when an agent drains or the plan changes.

A *misplaced session* runs over an agent that is draining, or over a partition that the plan in
force does not have any more. Misplaced sessions move before waiting requests get a slot: an
operator who drains an agent waits for its device, and a request in the queue loses a moment where a
misplaced session that is cut off loses its work. The requests do not lose slots for good either,
since what misplaced sessions leave is not used again.
"""

from __future__ import annotations

from catenary_scheduler.book.slots import SlotLedger
from catenary_scheduler.dispatch.availability import Availability
from catenary_scheduler.dispatch.chained.chain_state import ChainState
from catenary_scheduler.dispatch.chained.config import ChainedConfig
from catenary_scheduler.dispatch.chained.migration.destinations import best_route, load_of
from catenary_scheduler.dispatch.chained.migration.moving import ChainMigration
from catenary_scheduler.dispatch.chained.queues.model_queue import ModelQueue
from catenary_scheduler.dispatch.chained.queues.wait_queue import PolicyFactory
from catenary_scheduler.dispatch.chained.tracking import SequenceRequest, Session
from catenary_scheduler.dispatch.events import MoveMode, MoveRequested
from catenary_services.domain.ids import AgentId, ModelKey, Nanoseconds, PartitionKey, SessionId
from catenary_services.domain.plan import Plan

_LOOK_AHEAD = 8
"""After this many misplaced sessions without a place the others are not tried this time."""


class ChainEvacuation(ChainMigration):
    """Finds the sessions that must move, and makes moves that name no chain.

    Attributes:
        hosted: Partitions of the plan in force, by agent.
    """

    def __init__(
        self,
        config: ChainedConfig,
        slots: SlotLedger,
        availability: Availability,
        policy: PolicyFactory,
        first_session: int,
    ) -> None:
        super().__init__(config, slots, availability, policy, first_session)
        self.hosted: set[tuple[AgentId, PartitionKey]] = set()

    def move_requested(self, event: MoveRequested) -> None:
        """Handles the request for a move."""
        self.counters["wanted_moves"] += 1
        session = self.sessions.get(event.session)
        sequence = session.sequence if session is not None else None
        route = None
        if session is not None and sequence is not None:
            model_queue = self.model_queue(sequence.model)
            if event.chain_id:
                route = model_queue.route_named(event.chain_id)
            elif not self.obstacle(event.session):
                route = self.destination(model_queue, session, sequence)
        if session is None or sequence is None or route is None:
            self.counters["refused_moves"] += 1
        else:
            mode = event.mode or self.mode_of(session, route)
            self.move(event.session, route, mode, "requested")

    def problem(self, session_id: SessionId, chain_id: str) -> str:
        """Returns in words why a session cannot be moved to a chain now; empty if it can.

        Args:
            session_id: The session.
            chain_id: The chain to move to; empty: the best one.
        """
        session = self.sessions.get(session_id)
        sequence = session.sequence if session is not None else None
        if session is None or sequence is None:
            return self.obstacle(session_id)
        model_queue = self.model_queue(sequence.model)
        route = model_queue.route_named(chain_id) if chain_id else None
        if chain_id and route is None:
            return f"the plan has no chain {chain_id!r} for {sequence.model}"
        fault = self.obstacle(session_id, route)
        if not fault and route is None and self.destination(model_queue, session, sequence) is None:
            return "no other chain has room for it"
        return fault

    def hosted_by(self, plan: Plan) -> None:
        """Notes the partitions of a plan."""
        self.hosted = {
            (each.agent, each.partition) for model in plan.models for each in model.caches
        }
        for model in plan.models:
            for chain in model.chains:
                self.hosted.update([(hop.agent, hop.partition) for hop in chain.hops])

    def find_misplaced(self) -> None:
        """Finds all misplaced sessions after a change of agents or plan."""
        self.misplaced = {}
        for session_id, session in self.sessions.items():
            if session.sequence is not None and self._is_misplaced(session):
                self.misplaced[session_id] = None
                self.dirty[session.sequence.model] = None

    def settled(self, session: Session) -> None:
        """Checks whether a session is misplaced that generates on a chain it was not started on."""
        if session.sequence is not None and self._is_misplaced(session):
            self.misplaced[session.session_id] = None
            self.dirty[session.sequence.model] = None

    def _is_misplaced(self, session: Session) -> bool:
        if any(hop.agent in self.draining for hop in session.hops):
            return True
        route = session.route
        if route is None or route.capacity > 0 or self.plan is None:
            return False
        return any((hop.agent, hop.partition) not in self.hosted for hop in session.hops)

    def evacuate(self, model: ModelKey) -> None:
        """Moves misplaced sessions of a model, the largest first: they take longest."""
        model_queue = self.model_queues.get(model)
        found = []
        for session_id in self.misplaced:
            session = self.sessions[session_id]
            sequence = session.sequence
            if sequence is None or sequence.model != model or session.move_after > self.now:
                continue
            if not self.obstacle(session_id):
                found.append((-sequence.tokens, session_id, session, sequence))
        misses = 0
        for _, session_id, session, sequence in sorted(found, key=lambda each: each[:2]):
            if model_queue is None or misses >= _LOOK_AHEAD or self.obstacle(session_id):
                return
            route = self.destination(model_queue, session, sequence)
            if route is None:
                misses += 1
            else:
                self.move(session_id, route, self.mode_of(session, route), "evacuation")

    def destination(
        self, model_queue: ModelQueue, session: Session, sequence: SequenceRequest
    ) -> ChainState | None:
        """Returns the best chain a session can move to now; None if there is none."""
        routes = [
            route
            for route in model_queue.offered
            if route is not session.route
            and self.has_slot(route)
            and route.has_room(sequence.tokens)
            and self.may_concern(route.hops)
            and not any(hop.agent in self.draining for hop in route.hops)
        ]
        return best_route(model_queue, sequence, routes)

    def mode_of(self, session: Session, route: ChainState) -> MoveMode:
        """Returns what should travel if a session moves to a chain now: whatever is faster."""
        sequence = session.sequence
        if sequence is None or session.route is None:
            return "kv"
        cost = self.migration_budget.cost(session.hops, route.hops, sequence.tokens)
        if cost is None:
            return "kv"
        number, source = int(session.session_id), session.route.chain_id
        move = cost.move(number, source, route.chain_id)
        load = load_of(self.model_queue(sequence.model), route)
        return self.migration_budget.choose_mode(self.now, move, load, must=True) or "kv"

    def look_at_misplaced(self) -> None:
        """Tries the misplaced sessions again that waited after a failed move."""
        for session_id in self.misplaced:
            session = self.sessions[session_id]
            if session.sequence is not None and 0 < session.move_after <= self.now:
                session.move_after = 0
                self.dirty[session.sequence.model] = None

    def next_misplaced(self) -> Nanoseconds | None:
        """Returns when `look_at_misplaced` has something to do."""
        moments = [self.sessions[each].move_after for each in self.misplaced]
        return min([moment for moment in moments if moment > 0], default=None)
