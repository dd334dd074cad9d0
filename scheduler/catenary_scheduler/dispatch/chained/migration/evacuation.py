"""Moves misplaced sessions away, when an agent drains or the plan changes.

A *misplaced session* runs over an agent that is draining, or over a partition that the plan in
force does not have any more. Misplaced sessions move before waiting requests get a slot: an
operator who drains an agent waits for its device, and a request in the queue loses a moment where a
misplaced session that is cut off loses its work. The requests do not lose slots for good either,
since what misplaced sessions leave is not used again.
"""

from __future__ import annotations

from catenary_scheduler.dispatch.chained.chain_state import ChainState
from catenary_scheduler.dispatch.chained.migration.destinations import best_route, load_of
from catenary_scheduler.dispatch.chained.migration.moving import SessionMigration
from catenary_scheduler.dispatch.chained.queues.model_queue import ModelQueue
from catenary_scheduler.dispatch.chained.sessions.session_table import SessionTable
from catenary_scheduler.dispatch.chained.tracking import SequenceRequest, Session
from catenary_scheduler.dispatch.events import MoveMode, MoveRequested
from catenary_services.domain.ids import ModelKey, Nanoseconds, SessionId

_LOOK_AHEAD = 8
"""After this many misplaced sessions without a place the others are not tried this time."""


class SessionEvacuation:
    """Moves misplaced sessions, and makes moves that name no chain.

    Args:
        table: The state.
        migration: Begins moves.
    """

    def __init__(self, table: SessionTable, migration: SessionMigration) -> None:
        self._table = table
        self._migration = migration

    def move_requested(self, event: MoveRequested) -> None:
        """Handles the request for a move."""
        table = self._table
        table.counters["wanted_moves"] += 1
        session = table.sessions.get(event.session)
        sequence = session.sequence if session is not None else None
        route = None
        if session is not None and sequence is not None:
            model_queue = table.model_queue(sequence.model)
            if event.chain_id:
                route = model_queue.route_named(event.chain_id)
            elif not self._migration.obstacle(event.session):
                route = self.destination(model_queue, session, sequence)
        if session is None or sequence is None or route is None:
            table.counters["refused_moves"] += 1
        else:
            mode = event.mode or self.mode_of(session, route)
            self._migration.move(event.session, route, mode, "requested")

    def problem(self, session_id: SessionId, chain_id: str) -> str:
        """Returns in words why a session cannot be moved to a chain now; empty if it can.

        Args:
            session_id: The session.
            chain_id: The chain to move to; empty: the best one.
        """
        session = self._table.sessions.get(session_id)
        sequence = session.sequence if session is not None else None
        if session is None or sequence is None:
            return self._migration.obstacle(session_id)
        model_queue = self._table.model_queue(sequence.model)
        route = model_queue.route_named(chain_id) if chain_id else None
        if chain_id and route is None:
            return f"the plan has no chain {chain_id!r} for {sequence.model}"
        fault = self._migration.obstacle(session_id, route)
        if not fault and route is None and self.destination(model_queue, session, sequence) is None:
            return "no other chain has room for it"
        return fault

    def evacuate(self, model: ModelKey) -> None:
        """Moves misplaced sessions of a model, the largest first: they take longest."""
        table = self._table
        model_queue = table.model_queues.get(model)
        found = []
        for session_id in table.misplaced:
            session = table.sessions[session_id]
            sequence = session.sequence
            if sequence is None or sequence.model != model or session.move_after > table.now:
                continue
            if not self._migration.obstacle(session_id):
                found.append((-sequence.tokens, session_id, session, sequence))
        misses = 0
        for _, session_id, session, sequence in sorted(found, key=lambda each: each[:2]):
            if model_queue is None or misses >= _LOOK_AHEAD or self._migration.obstacle(session_id):
                return
            route = self.destination(model_queue, session, sequence)
            if route is None:
                misses += 1
            else:
                self._migration.move(session_id, route, self.mode_of(session, route), "evacuation")

    def destination(
        self, model_queue: ModelQueue, session: Session, sequence: SequenceRequest
    ) -> ChainState | None:
        """Returns the best chain a session can move to now; None if there is none."""
        routes = [
            route
            for route in model_queue.offered
            if route is not session.route
            and self._migration.has_slot(route)
            and route.has_room(sequence.tokens)
            and self._migration.may_concern(route.hops)
            and not any(hop.agent in self._table.draining for hop in route.hops)
        ]
        return best_route(model_queue, sequence, routes)

    def mode_of(self, session: Session, route: ChainState) -> MoveMode:
        """Returns what should travel if a session moves to a chain now: whatever is faster."""
        table = self._table
        sequence = session.sequence
        if sequence is None or session.route is None:
            return "kv"
        cost = table.migration_budget.cost(session.hops, route.hops, sequence.tokens)
        if cost is None:
            return "kv"
        number, source = int(session.session_id), session.route.chain_id
        move = cost.move(number, source, route.chain_id)
        load = load_of(table.model_queue(sequence.model), route)
        return table.migration_budget.choose_mode(table.now, move, load, must=True) or "kv"

    def look_at_misplaced(self) -> None:
        """Tries the misplaced sessions again that waited after a failed move."""
        table = self._table
        for session_id in table.misplaced:
            session = table.sessions[session_id]
            if session.sequence is not None and 0 < session.move_after <= table.now:
                session.move_after = 0
                table.dirty[session.sequence.model] = None

    def next_misplaced(self) -> Nanoseconds | None:
        """Returns when `look_at_misplaced` has something to do."""
        moments = [self._table.sessions[each].move_after for each in self._table.misplaced]
        return min([moment for moment in moments if moment > 0], default=None)
