"""Live migration at the source: the first agent of a session's ring leads the move.

    BEGIN (gateway) -> ROUND 0 to the new ring -> READY 0 of all: there is room
                    -> by KV: BEGIN to the others, every agent sends what is cached and what will be
                    -> ROUND n to the new ring -> READY n of all, again while rounds get shorter
                    -> at its next token: HAND_OVER p to the new ring; nothing is computed here
                       any more, and the session ends here once its last rows have left

A session is handed over when a token has just returned to the leader. At that moment every agent of
its ring has cached the same tokens, and no row of it is in transit. (After a step with guesses they
do not know yet which were right; none are made while a move is led, so the next step makes them
equal.) Any failure before that leaves the session where it is; see docs/adr/0013.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from catenary_agent.generation.frames.move_wire import give_up_of
from catenary_agent.generation.migration.outgoing_migration import OutgoingMigration, why_not
from catenary_agent.generation.state.events import MoveDone
from catenary_agent.generation.state.reporting import session_moved
from catenary_agent.generation.state.stall_timer import StallTimer
from catenary_agent.generation.state.states import LEAVING
from catenary_protos.catenary.v1 import frame_pb2
from catenary_services.errors import (
    CatenaryError,
    PartitionLost,
    StaleEpoch,
    Unavailable,
    error_of_reason,
)

if TYPE_CHECKING:
    from catenary_agent.generation.context import CacheLimits
    from catenary_agent.generation.migration.migration_sender import MigrationSender
    from catenary_agent.generation.migration.migration_target import Say
    from catenary_agent.generation.state.events import MoveMessage
    from catenary_agent.generation.state.session import Session
    from catenary_agent.generation.state.sessions import SessionTable
    from catenary_services.domain.ids import Nanoseconds

_Step = frame_pb2.SessionMove


class MigrationSource:
    """The live migrations that this agent leads.

    Invariants: a session moves at most once at a time. It is handed over once, and nothing of it is
    computed here after that. Every agent that was told of a move is told how it ends.
    """

    def __init__(
        self,
        sessions: SessionTable,
        sending: MigrationSender,
        limits: CacheLimits,
        clock: Callable[[], Nanoseconds],
        say: Say,
    ) -> None:
        self._epoch = 0
        self._sessions = sessions
        self._sending = sending
        self._limits = limits
        self._clock = clock
        self._say = say
        self.stall_timer = StallTimer(limits.stall_timeout_ns)
        self._moves: dict[int, OutgoingMigration] = {}
        """Moves by the new id of the session."""
        self.moves_of: dict[int, OutgoingMigration] = {}
        """Moves by the present id of the session."""

    def __contains__(self, session_id: int) -> bool:
        """Returns True while the move that makes this session is led here."""
        return session_id in self._moves

    @property
    def led(self) -> tuple[int, ...]:
        """The new ids of the sessions whose moves are led here."""
        return tuple(self._moves)

    # -- what others say -------------------------------------------------------------------------

    def on_begin(self, said: MoveMessage) -> bool:
        """Begins to move a session; returns False if it has begun already or is over."""
        session_id = said.move.session_id
        if session_id in self._moves or self._sessions.is_over(session_id):
            return False
        session = self._sessions.get(said.move.moved_session_id)
        error = why_not(said, session, self._epoch)
        if error is not None or session is None:
            self._failed(said.move, error or Unavailable("there is no such session"))
            return True
        before = self.moves_of.get(session.spec.session_id)
        if before is not None:
            self.give_up(before, Unavailable("another move of the session began"))
        arrived = said.arrived
        deadline_ns = arrived.received_ns - arrived.transfer_ns + said.move.opening.budget_ns
        move = OutgoingMigration(session, said.move, said.epoch, deadline_ns, arrived.received_ns)
        self._moves[session_id] = self.moves_of[session.spec.session_id] = move
        self.stall_timer.touch(session_id, self._clock())
        self._introduce(move)
        return True

    def on_ready(self, said: MoveMessage) -> bool:
        """Notes that an agent of the new ring has cached the requested tokens.

        Returns False if the answer was not waited for.
        """
        move = self._moves.get(said.move.session_id)
        if move is None or said.move.tokens != move.asked or said.move.agent_id not in move.waits:
            return False
        move.waits.remove(said.move.agent_id)
        self.stall_timer.touch(move.session_id, self._clock())
        if not move.waits:
            self._next_round(move)
        return True

    def on_give_up(self, said: frame_pb2.SessionMove) -> None:
        """Gives a move up after another agent has failed and has told the scheduler."""
        error = error_of_reason(said.failure.reason, said.failure.message)
        self.give_up(self._moves[said.session_id], error, is_known=True)

    def broken(self, session_id: int, error: CatenaryError, blamed: str) -> bool:
        """Gives a move up whose frames could not be sent; False if it is not led here."""
        move = self._moves.get(session_id)
        if move is None:
            return False
        self.give_up(move, error, blamed)
        return True

    # -- what happens here -----------------------------------------------------------------------

    def turned(self, session: Session) -> bool:
        """Returns True if a session whose newest token has just arrived was handed over."""
        move = self.moves_of.get(session.spec.session_id)
        if move is None:
            return False
        if move.is_armed and not session.is_unequal:
            self._hand_over(move)
            return True
        if not move.known:
            self._introduce(move)
        return False

    def pushed(self, session_id: int) -> None:
        """Restarts the stall timeout of a move some of whose rows have left."""
        if session_id in self._moves:
            self.stall_timer.touch(session_id, self._clock())

    def closed(self, session: Session) -> None:
        """Gives up the move of a session that was closed."""
        move = self.moves_of.get(session.spec.session_id)
        if move is not None:
            self.give_up(move, Unavailable("the session that was to move is over"))

    def raise_epoch(self, epoch: int) -> None:
        """Gives up moves that older schedulers ordered, and refuses further orders of theirs.

        An epoch of 0 accepts orders of any scheduler again.
        """
        self._epoch = max(self._epoch, epoch) if epoch else 0
        for move in list(self._moves.values()):
            if move.epoch < self._epoch:
                self.give_up(move, StaleEpoch(f"epoch {move.epoch} is over"))

    def validate(self) -> None:
        """Raises AssertionError unless every session that moves is here, and moves once."""
        assert list(self._moves.values()) == list(self.moves_of.values())
        for session_id, move in self._moves.items():
            assert session_id in self.stall_timer
            assert self._sessions.get(move.session.spec.session_id) is move.session
            assert move.session.state is not LEAVING

    def expire(self, now: Nanoseconds) -> None:
        """Gives up moves that made no progress within the stall timeout."""
        for session_id in self.stall_timer.lost(now):
            move = self._moves[session_id]
            error = PartitionLost(f"the move did not get on for {self.stall_timer}")
            self.give_up(move, error, min(move.waits, default=""))

    def give_up(
        self,
        move: OutgoingMigration,
        error: CatenaryError,
        blamed: str = "",
        *,
        is_known: bool = False,
    ) -> None:
        """Ends a move; the session stays where it is.

        Args:
            move: The move.
            error: The reason.
            blamed: The agent or gateway at fault; empty for this agent.
            is_known: True if whoever saw the failure has told the scheduler.
        """
        self._forget(move)
        self._sending.stop(move.session_id)
        own = self._sessions.agent_id
        step = give_up_of(move.begin, own, error, blamed or own)
        for agent in move.told:
            self._say(agent, step, move.deadline_ns)
        self._failed(move.begin, error, blamed, is_known=is_known)

    # -- parts -----------------------------------------------------------------------------------

    def _introduce(self, move: OutgoingMigration) -> None:
        """Asks the new ring for room, once the old one has sampled a token."""
        session = move.session
        if session.incoming is None and len(session.tokens) > session.spec.history:
            move.introduce()
            self._tell(move, move.step(_Step.STEP_ROUND, self._sessions.agent_id, opens=True))

    def _next_round(self, move: OutgoingMigration) -> None:
        """Asks the new ring for what was added meanwhile, or arms the hand-over."""
        own, by_tokens, limits = self._sessions.agent_id, move.begin.by_tokens, self._limits
        least = limits.last_read_tokens if by_tokens else limits.last_round_tokens
        is_first = not move.rounds
        has_left = not by_tokens and not is_first and self._sending.has_left(move.session)
        if has_left or not move.next_round(least):
            move.is_armed = True
            return
        step = move.step(_Step.STEP_ROUND, own)
        step.tokens = move.asked
        if by_tokens:
            step.token_ids.extend(move.session.tokens[move.known : move.asked])
            move.known = move.asked
        self._tell(move, step)
        if is_first and not by_tokens:
            begin = move.step(_Step.STEP_BEGIN, own, opens=True)
            for agent in move.others:
                self._say(agent, begin, move.deadline_ns)
            self._sending.begin(move.session, move.begin)

    def _hand_over(self, move: OutgoingMigration) -> None:
        session, out = move.session, self._sessions.out
        step = move.step(_Step.STEP_HAND_OVER, self._sessions.agent_id)
        step.tokens = session.cached
        step.token_ids.extend(session.tokens[move.known :])
        self._tell(move, step)
        self._forget(move)
        now, model = self._clock(), session.batcher.key.model.name
        held_ns = max(0, now - session.arrived.received_ns)
        done = MoveDone(
            model, move.begin, session.cached, move.rounds, move.started_ns, held_ns, now
        )
        out.moved.append(done)
        out.messages.append(session_moved(done))
        self._sending.leave(session)

    def _tell(self, move: OutgoingMigration, step: frame_pb2.SessionMove) -> None:
        for agent in move.agents:
            self._say(agent, step, move.deadline_ns)

    def _forget(self, move: OutgoingMigration) -> None:
        del self._moves[move.session_id], self.moves_of[move.session.spec.session_id]
        self.stall_timer.drop(move.session_id)

    def _failed(
        self,
        begin: frame_pb2.SessionMove,
        error: CatenaryError,
        blamed: str = "",
        *,
        is_known: bool = False,
    ) -> None:
        if not is_known:
            self._sessions.fail(begin.session_id, error, blamed)
        model = begin.opening.route[0].model if begin.opening.route else ""
        self._sessions.out.moves_failed.append((model, error.reason))
