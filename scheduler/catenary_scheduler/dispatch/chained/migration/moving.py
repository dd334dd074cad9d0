"""Live migration: moves sessions to other chains while they generate.

A session S1 that moves gets a second identity S2 on the other chain, with slots of its own from the
beginning: source and target both hold it until it is handed over, also where the two chains share a
cache (completion G15 of Mell). S1 is the session of its request until an agent says `SessionMoved`;
then S2 is, and S1 is closed. A failure of S2 before that leaves S1 as it was and closes S2; a
failure of S1 or the end of the request closes both.
"""

from __future__ import annotations

from collections.abc import Iterable

from catenary_scheduler.dispatch.chained.chain_state import ChainState
from catenary_scheduler.dispatch.chained.sessions.booking import SessionBooking
from catenary_scheduler.dispatch.chained.sessions.chain_offers import ChainOffers
from catenary_scheduler.dispatch.chained.sessions.closing import SessionClosing
from catenary_scheduler.dispatch.chained.sessions.ledger import RequestLedger
from catenary_scheduler.dispatch.chained.sessions.misplaced import MisplacedSessions
from catenary_scheduler.dispatch.chained.sessions.session_table import SessionTable
from catenary_scheduler.dispatch.chained.states import (
    ENDED,
    MOVE_BEGAN,
    MOVED_AWAY,
    RESERVED,
    TOOK_OVER,
    UNWANTED,
    SessionState,
)
from catenary_scheduler.dispatch.chained.tracking import Move, SequenceRequest, Session
from catenary_scheduler.dispatch.events import MoveMode, SessionFailed, SessionMoved, StartSession
from catenary_services.domain.ids import Nanoseconds, SessionId
from catenary_services.domain.plan import ChainHop
from catenary_services.errors import Unavailable


class SessionMigration:
    """Begins and ends moves.

    Args:
        table: The state.
        booking: Books the slots of successors.
        closing: Ends sessions, and moves that fail.
        ledger: Begins requests again.
        offers: Has chains used or avoided.
        misplaced: Looks whether a session that has moved must move again.
    """

    def __init__(
        self,
        table: SessionTable,
        booking: SessionBooking,
        closing: SessionClosing,
        ledger: RequestLedger,
        offers: ChainOffers,
        misplaced: MisplacedSessions,
    ) -> None:
        self._table = table
        self._booking = booking
        self._closing = closing
        self._ledger = ledger
        self._offers = offers
        self._misplaced = misplaced

    def move(self, session_id: SessionId, route: ChainState, mode: MoveMode, reason: str) -> bool:
        """Begins to move a session to another chain of its model.

        Args:
            session_id: The session of a request.
            route: The target, one of `ModelQueue.offered`.
            mode: What travels; to and from engines tokens do in any case.
            reason: The purpose of the move, e.g. "packing".

        Returns:
            True if the move has begun; False, and a count, if it cannot begin (`obstacle` says
                why).
        """
        table = self._table
        session = table.sessions.get(session_id)
        if self.obstacle(session_id, route) or session is None or session.sequence is None:
            table.counters["refused_moves"] += 1
            return False
        sequence = session.sequence
        if table.migration_budget.must_read_again(session.hops, route.hops):
            mode = "tokens"
        target = self._booking.book(sequence, route)
        move = Move(
            sequence,
            session,
            target,
            mode,
            reason,
            table.now + table.config.move_deadline_ns,
        )
        table.moves.begin(move)
        table.session_goes(target, RESERVED, route.chain_id)
        table.session_goes(session, MOVE_BEGAN, reason)
        session.ordered = target.ordered = table.event
        table.counters["started_moves"] += 1
        placer = table.placer_of(sequence.model)
        objectives = sequence.event.objectives
        if placer is not None:
            objectives = placer.requests.objectives_of(sequence.event)
            placer.loads.reserve(sequence, route, table.now, runs_again=mode == "tokens")
        table.commands.append(
            StartSession(
                target.session_id,
                sequence.request,
                route.chain_id,
                route.hops,
                objectives=objectives,
                moves=session.session_id,
                move_mode=mode,
                cause=table.event,
            )
        )
        return True

    def obstacle(self, session_id: SessionId, route: ChainState | None = None) -> str:
        """Returns in words why a session cannot be moved now, to a chain if one is named."""
        table = self._table
        session = table.sessions.get(session_id)
        fault = _unmovable(session)
        if fault or session is None or session.sequence is None:
            return fault
        if len(table.moves) >= table.config.max_moves:
            return "too many sessions move at the moment"
        if not self.may_concern(session.hops):
            return "too many sessions move away from its agents at the moment"
        return self._no_way(session, route) if route is not None else ""

    def _no_way(self, session: Session, route: ChainState) -> str:
        """Returns in words why a session cannot be moved to a chain; empty if it can."""
        model_queue = (
            self._table.model_queue(session.sequence.model)
            if session.sequence is not None
            else None
        )
        if route is session.route:
            return "it is there already"
        if model_queue is None or route not in model_queue.offered:
            return "that chain cannot be used at the moment"
        if not self.has_slot(route):
            return "that chain has no free slot"
        if session.sequence is not None and not route.has_room(session.sequence.tokens):
            return "that chain has no memory left for it"
        busy = "too many sessions move to the agents of that chain at the moment"
        return "" if self.may_concern(route.hops) else busy

    def has_slot(self, route: ChainState) -> bool:
        """True if one more session fits a chain by number and by slots."""
        return route.running < route.capacity and self._table.slots.probe(route.claims) is None

    def may_concern(self, hops: Iterable[ChainHop]) -> bool:
        """True if each agent of these hops may take part in one more move."""
        return self._table.moves.may_concern(hops, self._table.config.max_moves_per_agent)

    # How it ends

    def session_moved(self, event: SessionMoved) -> None:
        """Handles an agent's message that it has handed a session over."""
        table = self._table
        target = table.sessions.get(event.session)
        move = table.moves.to(event.session)
        if move is not None:
            self.arrived(move, event.cached_tokens)
            return
        source = table.sessions.get(event.moved)
        if source is not None and source.sequence is not None:
            self._moved_unexpectedly(source, target, event)
            return
        if target is not None and event.session in table.unclaimed:
            target.was = event.moved  # a gateway that comes back may still name the old one
        if source is not None and source.state is SessionState.UNCLAIMED:
            self._closing.close(source, UNWANTED, "it has moved")

    def arrived(self, move: Move, cached_tokens: int = 0) -> None:
        """Completes a move: the session generates at its target.

        Args:
            move: The move.
            cached_tokens: See `SessionMoved`.
        """
        self._table.moves.end(move)
        sequence, source, target = move.sequence, move.source, move.target
        self._table.dirty[sequence.model] = None
        self._table.counters["kv_moves" if move.mode == "kv" else "tokens_moves"] += 1
        placer = self._table.placer_of(sequence.model)
        if placer is not None:
            placer.loads.moved(sequence.request)
        self._becomes(sequence, source, target, cached_tokens)

    def move_failed(self, session: Session, event: SessionFailed) -> None:
        """Handles the failure of a move at an agent or the gateway."""
        move = self._table.moves.ongoing[session.session_id]
        # The agent that leads the move only reports: it is not to blame, and it still generates.
        old = {hop.agent for hop in move.source.hops}
        blamed = event.agent
        is_gone = event.reason == Unavailable.reason and blamed is not None and blamed not in old
        if is_gone and blamed is not None and self._table.backoff.failed(blamed, self._table.now):
            self._offers.refresh()
        self._closing.fail_move(move, "agent")

    def end_moves(self) -> None:
        """Gives up the moves that took too long."""
        moves, now = self._table.moves, self._table.now
        for move in list(moves.ongoing.values()):
            if move.deadline <= now and moves.to(move.target.session_id) is move:
                self._closing.fail_move(move, "deadline")

    def next_move_end(self) -> Nanoseconds | None:
        """Returns when `end_moves` has something to do; None if nothing moves."""
        return min([move.deadline for move in self._table.moves.ongoing.values()], default=None)

    def _becomes(
        self, sequence: SequenceRequest, source: Session, target: Session, cached_tokens: int
    ) -> None:
        """Makes another session the one that answers a request."""
        source.sequence = None
        self._table.assign(target, sequence)
        self._table.session_goes(target, TOOK_OVER, f"from {source.session_id}")
        self._table.awaits_tokens(sequence)
        target.was = source.session_id
        # The gateway may yet report tokens of the old chain: they are none of the new one's.
        handed_over = cached_tokens + 1 - sequence.event.prompt_tokens if cached_tokens else 0
        target.carried_tokens = max(sequence.generated_tokens, handed_over)
        sequence.check_later = None
        self._closing.close(source, MOVED_AWAY, f"to {target.session_id}")
        self._misplaced.look_at(target)

    def _moved_unexpectedly(
        self, source: Session, target: Session | None, event: SessionMoved
    ) -> None:
        """Handles a move that was given up here, or begun by an earlier scheduler, and was done."""
        table, target_id = self._table, event.session
        sequence = source.sequence
        assert sequence is not None
        if target is not None and target.state is SessionState.UNCLAIMED:
            table.unclaimed.pop(target_id, None)
            placer = table.placer_of(sequence.model)
            if placer is not None:
                placer.loads.leave(sequence.request)
            if target.hops:
                target.route = table.model_queue(sequence.model).route_of(target.hops)
                target.route.running += 1
                table.kv_budget.begins(target_id, [target.route], sequence.tokens)
                if placer is not None:
                    placer.loads.start(sequence, target.route, table.now)
            table.slots.confirm(target_id, sequence.deadline + table.config.deadline_grace_ns)
            self._becomes(sequence, source, target, event.cached_tokens)
            if any(hop.agent not in table.agents for hop in target.hops):
                table.check_later(sequence, table.config.claim_grace_ns)
        elif source.closed_move == target_id:  # it may have ended there with its whole answer
            if source.state is not SessionState.DELIVERING:
                table.session_goes(source, ENDED, f"as {target_id}")
            table.check_later(sequence, table.config.delivery_grace_ns)
        else:
            self._ledger.restart(sequence, f"moved to {target_id}, which is not known")


def _unmovable(session: Session | None) -> str:
    """Returns why a session cannot be moved to any chain; empty if it can."""
    if session is None or session.sequence is None:
        return "no request is answered by it"
    if session.moving is not None:
        return "it moves already"
    if session.state is SessionState.DELIVERING:
        return "it is about to end"
    if session.prefill is not None or session.state is not SessionState.DECODING:
        return "its prompt is not done"
    if session.route is None or not session.hops:
        return "its chain is not known"
    return ""
