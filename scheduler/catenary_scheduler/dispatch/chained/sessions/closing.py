"""Ends sessions, and the moves they take part in.

The promise kept here: a session never finds an agent full, because slots are given again only when
their agent has released them.
"""

from __future__ import annotations

from catenary_scheduler.dispatch.chained.sessions.chain_offers import ChainOffers
from catenary_scheduler.dispatch.chained.sessions.move_table import MoveFailure
from catenary_scheduler.dispatch.chained.sessions.session_table import SessionTable
from catenary_scheduler.dispatch.chained.states import (
    MIGRATING_IN,
    MIGRATING_OUT,
    MOVE_FAILED,
    NOT_TAKEN,
    RELEASED,
    UNWANTED,
    SessionState,
    Transition,
)
from catenary_scheduler.dispatch.chained.tracking import Move, SequenceRequest, Session
from catenary_services.domain.ids import AgentId, SessionId


class SessionClosing:
    """Closes sessions, and frees what they held.

    Args:
        table: The state.
        offers: Tells the queues what was freed.
    """

    def __init__(self, table: SessionTable, offers: ChainOffers) -> None:
        self._table = table
        self._offers = offers

    def close(self, session: Session, way: Transition[SessionState], why: str = "") -> None:
        """Orders all agents that hold slots of a session to free them.

        Slots stay booked until then. The session that it is to become by a move is closed, too.

        Args:
            session: The session.
            way: The transition that takes it to its end.
            why: Particulars for its story.
        """
        table, session_id = self._table, session.session_id
        if session.moving is not None:
            self.fail_move(session.moving, "over")
        sequence = session.sequence
        if sequence is not None:
            self.leaves(sequence)
            sequence.session = session.sequence = None
        table.unclaimed.pop(session_id, None)
        table.misplaced.pop(session_id, None)
        table.session_goes(session, way, why)
        self.free(session)

    def free(self, session: Session) -> None:
        """Orders all agents that hold slots of a closing session, perhaps again, to free them."""
        table, session_id = self._table, session.session_id
        session.attempts = 0
        table.kv_budget.leaves(session_id)
        for agent in table.slots.agents(session_id):
            if agent not in table.present:  # if it connects, it says what it holds
                self._offers.were_freed(table.slots.release(session_id, agent))
        if session_id in table.slots:
            self.order_close(session)
        else:
            self.is_over(session_id)

    def leaves(self, sequence: SequenceRequest) -> None:
        """Stops counting the session of a request as load of its worker."""
        model_queue = self._table.model_queues.get(sequence.model)
        if model_queue is not None and model_queue.placer is not None:
            model_queue.placer.loads.leave(sequence.request)

    def order_close(self, session: Session) -> None:
        """Orders the agents of a session, perhaps again, to close it."""
        table = self._table
        session.attempts += 1
        session.ordered = table.event
        for agent in table.slots.agents(session.session_id):
            table.tell_to_close(agent, session.session_id)
        table.slots.expire_at(session.session_id, table.now + table.config.close_patience_ns)

    def let_go(self, session_id: SessionId, agent: AgentId) -> None:
        """Handles that an agent holds nothing of a session any more."""
        slots = self._table.slots
        self._offers.were_freed(slots.release(session_id, agent))
        if session_id not in slots:
            self.is_over(session_id)
            return
        session = self._table.sessions.get(session_id)
        if session is not None and session.prefill is not None:
            holders = slots.agents(session_id)
            if not any(each in holders for each in session.prefill_agents):
                self._handed_over(session)

    def is_over(self, session_id: SessionId) -> None:
        """Ends a session of which no agent holds anything: its place on the chain is free.

        If a request is still open for it, the request waits for the gateway's word, and may be
        started again.
        """
        table = self._table
        session = table.sessions.get(session_id)
        if session is None:
            return
        if session.state is MIGRATING_IN:
            self.fail_move(table.moves.ongoing[session_id], "closed")
            return
        if session.sequence is not None:
            self.leaves(session.sequence)
        else:
            table.session_goes(session, RELEASED)
            table.history.session_ended(session)
            del table.sessions[session_id]
            table.unclaimed.pop(session_id, None)
        self._handed_over(session)
        table.kv_budget.ends(session_id)
        route, session.route = session.route, None
        if route is not None:
            route.running -= 1
            self._offers.session_left(route, is_end=True)

    def _handed_over(self, session: Session) -> None:
        """Frees its place on the prompt's chain, whose agents have all released it."""
        prefill, session.prefill = session.prefill, None
        if prefill is None:
            return
        prefill.running -= 1
        self._table.kv_budget.left(session.session_id, prefill)
        if session.route is not None:
            session.hops = session.route.hops
        self._offers.session_left(prefill)

    def expire(self) -> None:
        """Repeats orders to close that were not obeyed in time; in the end writes the slots off."""
        table = self._table
        for session_id in table.slots.overdue(table.now):
            session = table.sessions[session_id]
            move = table.moves.to(session_id)
            sequence = move.sequence if move is not None else session.sequence
            if sequence is not None:
                last = sequence.deadline + table.config.deadline_grace_ns
                table.slots.confirm(session_id, last)
            elif session.state is not SessionState.CLOSING:
                table.counters["unclaimed_sessions"] += 1
                self.close(session, UNWANTED, "nobody claimed it")
            elif session.attempts < table.config.close_attempts:
                self.order_close(session)
        expired = table.slots.expire(table.now)
        for session_id in expired:
            table.counters["abandoned_sessions"] += 1
            self.is_over(session_id)
        if expired:
            self._offers.refresh()

    # Moves

    def fail_move(self, move: Move, why: MoveFailure) -> None:
        """Gives a move up: the session stays where it is, if it still runs."""
        table, source, target = self._table, move.source, move.target
        table.counters["failed_moves"] += 1
        table.counters[f"failed_moves_{why}"] += 1
        table.moves.failed(move, why)
        table.dirty[move.sequence.model] = None
        placer = table.placer_of(move.sequence.model)
        if placer is not None:
            placer.loads.unreserve(move.sequence.request)
        if why != "over":
            if source.state is MIGRATING_OUT:
                table.session_goes(source, MOVE_FAILED, why)
            config = table.config
            pause = config.move_pause_ns << min(source.failed_moves, 16)
            source.move_after = table.now + min(config.longest_move_pause_ns, pause)
            source.failed_moves += 1
            if source.hops and source.hops[0].agent in table.present:
                # The agent leads the move; agents that do not know a session answer that it is
                # closed.
                table.tell_to_close(source.hops[0].agent, target.session_id)
            source.closed_move = target.session_id if why == "closed" else None
        self.close(target, NOT_TAKEN, why)
