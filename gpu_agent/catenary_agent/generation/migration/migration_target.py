"""Live migration where a session moves to: room first, then its caches, then it goes on.

    ROUND 0, opening -> slots are taken -> READY 0
    ROUND n          -> by KV its caches come, by tokens they are computed -> READY n
    HAND_OVER p      -> once all rows are here tokens [0, p) are cached; p is computed next

By tokens the session is one whose prompt is read, only that nothing is sampled before it is handed
over. Until then whatever goes wrong here leaves it where it is: the leader is told to give up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from catenary_agent.generation import admission
from catenary_agent.generation.frames.move_wire import give_up_of
from catenary_agent.generation.state.events import SessionOpened
from catenary_agent.generation.state.session import IncomingMigration, SessionSpec
from catenary_agent.generation.state.stall_timer import StallTimer
from catenary_protos.catenary.v1 import frame_pb2
from catenary_services.errors import CatenaryError, InvalidInput, PartitionLost, Unavailable

if TYPE_CHECKING:
    from catenary_agent.generation.cache.cache_waiting import PendingCaches
    from catenary_agent.generation.state.events import MoveMessage
    from catenary_agent.generation.state.session import Session
    from catenary_agent.generation.state.sessions import SessionTable
    from catenary_services.domain.ids import Nanoseconds

    Say = Callable[[str, frame_pb2.SessionMove, Nanoseconds], None]
    """Tells an agent a step of a move; with the deadline of the session."""


class MigrationTarget:
    """The sessions that move to this agent and were not handed over yet.

    Invariant: each of them has our patience until then, twice that of its leader, who knows better
    which agent does not get on.
    """

    def __init__(
        self,
        sessions: SessionTable,
        waiting: PendingCaches,
        patience_ns: Nanoseconds,
        clock: Callable[[], Nanoseconds],
        say: Say,
    ) -> None:
        self._sessions = sessions
        self._waiting = waiting
        self._clock = clock
        self._say = say
        self._patience = StallTimer(2 * patience_ns)

    # -- what the leader says --------------------------------------------------------------------

    def on_round(self, said: MoveMessage) -> bool:
        """Is asked for room, or for a number of cached tokens; False if it comes too late."""
        session = self._sessions.get(said.move.session_id)
        if session is None:
            return self._open(said)
        arriving = session.arriving
        if arriving is None or said.facts is not None:
            return False
        arriving.asked = said.move.tokens
        self._patience.touch(said.move.session_id, self._clock())
        if arriving.by_tokens:
            had = session.pending
            arriving.begun = True
            self._learn(session, arriving, said)
            if session.pending and not had:
                session.lane.queue(session, self._clock())
        self.advanced(session)
        return True

    def on_hand_over(self, said: MoveMessage) -> bool:
        """It goes on here; False if it does already, or is over."""
        session = self._sessions.get(said.move.session_id)
        if session is None or session.arriving is None:
            return False
        session.arrived = said.arrived
        had = session.pending
        try:
            self._learn(session, session.arriving, said)
            self._end_at(session, session.arriving, said.move.tokens)
        except CatenaryError as error:
            self._sessions.fail(said.move.session_id, error)
            return True
        session.arriving = None
        session.lane.be_gentle(self._clock())
        self._patience.drop(said.move.session_id)
        if session.awaited is not None:
            session.awaited.word = False
            self._waiting.begin(session)
            self._waiting.advanced(session, session.awaited)
            return True
        if session.facts.is_first:
            since_ns = said.arrived.received_ns - said.arrived.transfer_ns
            waited_ns = max(0, self._clock() - since_ns)
            waited = (session.lane.key.model.name, "tokens", waited_ns)
            self._sessions.out.taken_over.append(waited)
        if session.pending and not had:
            session.lane.queue_first(session, self._clock())
        return True

    def on_give_up(self, session_id: int) -> bool:
        """It stays where it was; False if it is none that moves here."""
        session = self._sessions.get(session_id)
        if session is None or session.arriving is None:
            return False
        session.arriving = None
        self._sessions.order_closed((session_id,))
        return True

    # -- what happens here -----------------------------------------------------------------------

    def advanced(self, session: Session) -> None:
        """More of a session that moves here is cached: whoever asked for so much is told."""
        arriving = session.arriving
        if arriving is None:
            return
        if session.facts.session_id in self._patience:
            self._patience.touch(session.facts.session_id, self._clock())
        awaited = session.awaited
        come = session.cached if awaited is None else awaited.caches.come
        if arriving.asked is not None and come >= arriving.asked:
            ready = self._step(session, arriving, frame_pb2.SessionMove.STEP_READY)
            ready.tokens, arriving.asked = arriving.asked, None
            if ready.tokens:
                session.lane.be_gentle(self._clock())
            self._say(arriving.leader, ready, session.facts.deadline_ns)

    def closed(self, session: Session, error: CatenaryError | None, blamed: str) -> None:
        """A session was closed: if it was to move here, it cannot."""
        arriving, session.arriving = session.arriving, None
        self._patience.drop(session.facts.session_id)
        if arriving is not None:
            why = error or Unavailable("it was closed where it was to go")
            step = self._step(session, arriving, frame_pb2.SessionMove.STEP_GIVE_UP)
            self._give_up(arriving.leader, step, why, blamed)

    def expire(self, now: Nanoseconds) -> None:
        """Fails sessions of which nothing was heard for too long."""
        for session_id in self._patience.lost(now):
            session = self._sessions.get(session_id)
            if session is not None and session.arriving is not None:
                error = PartitionLost(f"nothing was heard of its move for {self._patience}")
                self._sessions.fail(session_id, error, session.arriving.leader)

    def next_wakeup_ns(self) -> Nanoseconds | None:
        """Returns when `expire` has something to do; None if never."""
        return self._patience.next_wakeup_ns()

    # -- parts -----------------------------------------------------------------------------------

    def _open(self, said: MoveMessage) -> bool:
        """Takes slots for a session; if there are none, the leader hears why."""
        move, facts, sessions = said.move, said.facts, self._sessions
        if facts is None:
            return False
        if sessions.is_over(move.session_id):
            sessions.out.gone.append(move.session_id)
            self._give_up(move.agent_id, move, Unavailable("it is over where it was to go"))
            return True
        made: Session | CatenaryError
        if isinstance(facts, SessionSpec):
            known = len(move.opening.token_ids)
            arriving = IncomingMigration(
                move.agent_id, move.moved_session_id, move.by_tokens, known
            )
            made = admission.try_admit(SessionOpened(facts, said.arrived), sessions.lanes, arriving)
        else:
            made = facts
        if isinstance(made, CatenaryError):
            sessions.fail(move.session_id, made)
            self._give_up(move.agent_id, move, made)
            return True
        sessions.add(made)
        self._patience.touch(move.session_id, self._clock())
        self.advanced(made)
        return True

    def _learn(self, session: Session, arriving: IncomingMigration, said: MoveMessage) -> None:
        session.learn(said.move.token_ids)
        arriving.known += len(said.move.token_ids)

    def _end_at(self, session: Session, arriving: IncomingMigration, tokens: int) -> None:
        """Takes in how many tokens the other ring has cached.

        Raises:
            InvalidInput: That contradicts what was said before.
        """
        if arriving.known != tokens + 1:
            raise InvalidInput("tokens", f"{tokens} are cached, and {arriving.known} are known")
        if session.awaited is None:
            return
        session.awaited.caches.end_at(tokens)
        came = sum(len(chunk.rows) for chunk in session.chunks)
        if came and session.expected - came != tokens:
            raise InvalidInput("position", f"{session.expected - came}; {tokens} comes next")
        session.expected = tokens + came

    def _step(
        self,
        session: Session,
        arriving: IncomingMigration,
        step: frame_pb2.SessionMove.Step.ValueType,
    ) -> frame_pb2.SessionMove:
        return frame_pb2.SessionMove(
            session_id=session.facts.session_id,
            moved_session_id=arriving.moved,
            step=step,
            by_tokens=arriving.by_tokens,
            agent_id=self._sessions.agent_id,
        )

    def _give_up(
        self, leader: str, move: frame_pb2.SessionMove, error: CatenaryError, blamed: str = ""
    ) -> None:
        own = self._sessions.agent_id
        self._say(leader, give_up_of(move, own, error, blamed or own), 0)
