"""Live migration at the target: room for a session first, then its caches, then its next step.

    ROUND 0, opening -> slots are taken -> READY 0
    ROUND n          -> by KV its caches come, by tokens they are computed -> READY n
    HAND_OVER p      -> once all rows are here tokens [0, p) are cached; p is computed next

In a move by tokens the session is like one whose prompt is read, except that nothing is sampled
before it is handed over. Until then an error here leaves it on the old ring: the leader is told to
give the move up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from catenary_agent.generation import admission
from catenary_agent.generation.frames.move_wire import give_up_of
from catenary_agent.generation.state.events import SessionOpened
from catenary_agent.generation.state.session import IncomingMigration, SessionSpec
from catenary_agent.generation.state.stall_timer import StallTimer
from catenary_agent.generation.state.states import MIGRATING_IN, RECEIVING, WAITING
from catenary_protos.catenary.v1 import frame_pb2
from catenary_services.errors import CatenaryError, InvalidInput, PartitionLost, Unavailable

if TYPE_CHECKING:
    from catenary_agent.generation.cache.cache_waiting import PendingCaches
    from catenary_agent.generation.state.events import MoveMessage
    from catenary_agent.generation.state.session import Session
    from catenary_agent.generation.state.sessions import SessionTable
    from catenary_services.domain.ids import Nanoseconds

    Say = Callable[[str, frame_pb2.SessionMove, Nanoseconds], None]
    """Sends a step of a move to an agent, with the deadline of the session in monotonic
    nanoseconds."""


class MigrationTarget:
    """The sessions that move to this agent and were not handed over yet.

    Invariant: each of them has a stall timeout until it is handed over. It is twice the leader's,
    since the leader knows better which agent is stuck.
    """

    def __init__(
        self,
        sessions: SessionTable,
        waiting: PendingCaches,
        stall_timeout_ns: Nanoseconds,
        clock: Callable[[], Nanoseconds],
        say: Say,
    ) -> None:
        self._sessions = sessions
        self._waiting = waiting
        self._clock = clock
        self._say = say
        self.stall_timer = StallTimer(2 * stall_timeout_ns)

    # -- what the leader says --------------------------------------------------------------------

    def on_round(self, said: MoveMessage) -> bool:
        """Opens a session, or asks for a number of cached tokens; False if it comes too late."""
        session = self._sessions.get(said.move.session_id)
        if session is None:
            return self._open(said)
        incoming = session.incoming
        if incoming is None or said.spec is not None:
            return False
        incoming.asked = said.move.tokens
        self.stall_timer.touch(said.move.session_id, self._clock())
        if incoming.by_tokens:
            if session.state is MIGRATING_IN:
                self._sessions.go(session, WAITING)
            self._learn(session, incoming, said)
            self._sessions.resume(session)
        self.advanced(session)
        return True

    def on_hand_over(self, said: MoveMessage) -> bool:
        """Continues a session here from now on; False if it continues already or is over."""
        session = self._sessions.get(said.move.session_id)
        if session is None or session.incoming is None:
            return False
        session.arrived = said.arrived
        try:
            self._learn(session, session.incoming, said)
            self._end_at(session, session.incoming, said.move.tokens)
        except CatenaryError as error:
            self._sessions.fail(said.move.session_id, error)
            return True
        session.incoming = None
        session.batcher.be_gentle(self._clock())
        self.stall_timer.drop(said.move.session_id)
        if session.state is MIGRATING_IN:
            self._sessions.go(session, RECEIVING if session.pending_cache else WAITING)
        if session.pending_cache is not None:
            self._waiting.begin(session)
            self._waiting.advanced(session)
            return True
        if session.spec.is_first:
            since_ns = said.arrived.received_ns - said.arrived.transfer_ns
            waited_ns = max(0, self._clock() - since_ns)
            waited = (session.batcher.key.model.name, "tokens", waited_ns)
            self._sessions.out.taken_over.append(waited)
        self._sessions.resume(session, is_awaited=True)
        return True

    def on_give_up(self, session_id: int) -> bool:
        """Drops a session, which stays on its old ring; False if none moves here by that id."""
        session = self._sessions.get(session_id)
        if session is None or session.incoming is None:
            return False
        session.incoming = None
        self.stall_timer.drop(session_id)
        self._sessions.order_closed((session_id,))
        return True

    # -- what happens here -----------------------------------------------------------------------

    def advanced(self, session: Session) -> None:
        """Tells the leader when as many tokens of a session are cached as it asked for."""
        incoming = session.incoming
        if incoming is None:
            return
        if session.spec.session_id in self.stall_timer:
            self.stall_timer.touch(session.spec.session_id, self._clock())
        pending_cache = session.pending_cache
        come = session.cached if pending_cache is None else pending_cache.progress.come
        if incoming.asked is not None and come >= incoming.asked:
            ready = self._step(session, incoming, frame_pb2.SessionMove.STEP_READY)
            ready.tokens, incoming.asked = incoming.asked, None
            if ready.tokens:
                session.batcher.be_gentle(self._clock())
            self._say(incoming.leader, ready, session.spec.deadline_ns)

    def closed(self, session: Session, error: CatenaryError | None, blamed: str) -> None:
        """Tells the leader to give up if a session was closed before it was handed over."""
        incoming, session.incoming = session.incoming, None
        self.stall_timer.drop(session.spec.session_id)
        if incoming is not None:
            why = error or Unavailable("it was closed where it was to go")
            step = self._step(session, incoming, frame_pb2.SessionMove.STEP_GIVE_UP)
            self._give_up(incoming.leader, step, why, blamed)

    def validate(self) -> None:
        """Raises AssertionError unless the stall timeout of every session runs."""
        for session in self._sessions:
            is_timed = session.spec.session_id in self.stall_timer
            assert is_timed == (session.incoming is not None)

    def expire(self, now: Nanoseconds) -> None:
        """Fails sessions of whose move nothing was heard within the stall timeout."""
        for session_id in self.stall_timer.lost(now):
            session = self._sessions.get(session_id)
            if session is not None and session.incoming is not None:
                error = PartitionLost(f"nothing was heard of its move for {self.stall_timer}")
                self._sessions.fail(session_id, error, session.incoming.leader)

    # -- parts -----------------------------------------------------------------------------------

    def _open(self, said: MoveMessage) -> bool:
        """Takes slots for a session; if there are none, the leader is told why."""
        move, spec, sessions = said.move, said.spec, self._sessions
        if spec is None:
            return False
        if sessions.is_over(move.session_id):
            sessions.out.gone.append(move.session_id)
            self._give_up(move.agent_id, move, Unavailable("it is over where it was to go"))
            return True
        made: Session | CatenaryError
        if isinstance(spec, SessionSpec):
            known = len(move.opening.token_ids)
            incoming = IncomingMigration(
                move.agent_id, move.moved_session_id, move.by_tokens, known
            )
            made = admission.try_admit(
                SessionOpened(spec, said.arrived), sessions.batchers, incoming
            )
        else:
            made = spec
        if isinstance(made, CatenaryError):
            sessions.fail(move.session_id, made)
            self._give_up(move.agent_id, move, made)
            return True
        sessions.add(made)
        self.stall_timer.touch(move.session_id, self._clock())
        self.advanced(made)
        return True

    def _learn(self, session: Session, incoming: IncomingMigration, said: MoveMessage) -> None:
        session.learn(said.move.token_ids)
        incoming.known += len(said.move.token_ids)

    def _end_at(self, session: Session, incoming: IncomingMigration, tokens: int) -> None:
        """Notes how many tokens the old ring has cached at the hand-over.

        Raises:
            InvalidInput: The number contradicts earlier messages.
        """
        if incoming.known != tokens + 1:
            raise InvalidInput("tokens", f"{tokens} are cached, and {incoming.known} are known")
        if session.pending_cache is None:
            return
        session.pending_cache.progress.end_at(tokens)
        came = sum(len(chunk.rows) for chunk in session.chunks)
        if came and session.expected - came != tokens:
            raise InvalidInput("position", f"{session.expected - came}; {tokens} comes next")
        session.expected = tokens + came

    def _step(
        self,
        session: Session,
        incoming: IncomingMigration,
        step: frame_pb2.SessionMove.Step.ValueType,
    ) -> frame_pb2.SessionMove:
        return frame_pb2.SessionMove(
            session_id=session.spec.session_id,
            moved_session_id=incoming.moved,
            step=step,
            by_tokens=incoming.by_tokens,
            agent_id=self._sessions.agent_id,
        )

    def _give_up(
        self, leader: str, move: frame_pb2.SessionMove, error: CatenaryError, blamed: str = ""
    ) -> None:
        own = self._sessions.agent_id
        self._say(leader, give_up_of(move, own, error, blamed or own), 0)
