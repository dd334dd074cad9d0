"""The sessions whose caches this agent sends to the ring they move to, whoever leads the move.

Every agent of a session's ring sends the rows of its blocks as they are computed. When the session
ends here, by order of the scheduler or by being handed over, its last rows leave first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from catenary_agent.generation.cache.cache_pushing import outlets_of
from catenary_agent.generation.frames.move_wire import give_up_of
from catenary_agent.generation.state.states import LEAVING
from catenary_protos.catenary.v1 import frame_pb2
from catenary_services.errors import CatenaryError, Unavailable

if TYPE_CHECKING:
    from catenary_agent.generation.cache.cache_pushing import CachePusher
    from catenary_agent.generation.migration.migration_target import Say
    from catenary_agent.generation.state.session import Session
    from catenary_agent.generation.state.sessions import SessionTable
    from catenary_services.domain.ids import Nanoseconds


class MigrationSender:
    """Sends the caches of sessions that move away.

    Invariant: a session in it is open, and all its cache sends go to the session it becomes.
    """

    def __init__(
        self,
        sessions: SessionTable,
        pushing: CachePusher,
        stall_timeout_ns: Nanoseconds,
        clock: Callable[[], Nanoseconds],
        say: Say,
    ) -> None:
        """Waits for moves; last rows that take longer than `stall_timeout_ns` are not sent."""
        self._sessions = sessions
        self._pushing = pushing
        self._patience_ns = stall_timeout_ns
        self._clock = clock
        self._say = say
        self._sending: dict[int, Session] = {}
        """Sessions that move away, by the new id each gets on the other ring."""

    def __contains__(self, session_id: int) -> bool:
        return session_id in self._sending

    def follow(self, move: frame_pb2.SessionMove) -> None:
        """Begins to send a session's caches, because the new ring has slots for it."""
        session = self._sessions.get(move.moved_session_id)
        if session is None or session.state is LEAVING:
            error = Unavailable("the session that was to move is over")
            self._sessions.fail(move.session_id, error)
            self._give_up(move.agent_id, move, error, "")
        else:
            self.begin(session, move)

    def begin(self, session: Session, move: frame_pb2.SessionMove) -> None:
        """Sends the cached and all further rows of a session to the ring of the opening."""
        for before in {cache_send.session_id for cache_send in session.cache_sends}:
            self.stop(before)
        route = move.opening.route
        session.cache_sends = outlets_of(move.session_id, session.spec.own_hop, route)
        for cache_send in session.cache_sends:
            cache_send.introduced = True  # the new ring has taken its slots already
        self._sending[move.session_id] = session
        self._pushing.begin(session)

    def has_left(self, session: Session) -> bool:
        """True if all cached rows of a session were sent, and at most one frame is in transit."""
        return all(not each.has_more and each.unsettled <= 1 for each in session.cache_sends)

    def stop(self, session_id: int) -> bool:
        """Stops sending to a session, given by its new id; False if nothing was being sent."""
        session = self._sending.pop(session_id, None)
        if session is None:
            return False
        for cache_send in session.cache_sends:
            cache_send.stop()
        session.cache_sends = ()
        self._pushing.end_if_done(session)
        return True

    def leave(self, session: Session) -> None:
        """Computes nothing more of a session; its slots are freed once its rows have left."""
        self._sessions.go(session, LEAVING)
        self._sessions.bound(session, self._clock() + self._patience_ns)
        self._pushing.end_if_done(session)

    def defer(self, session_ids: tuple[int, ...]) -> set[int]:
        """Returns which of the sessions to be closed stay until their last rows have left."""
        sending = [each for each in self._sending.values() if each.spec.session_id in session_ids]
        for session in sending:
            if session.state is not LEAVING:
                self.leave(session)
        return {session.spec.session_id for session in sending}

    def broken(self, session_id: int, error: CatenaryError, blamed: str) -> bool:
        """Fails a session whose rows could not be sent, by its new id; False if none were to be.

        The session may have been handed over already, so the first agent of its ring is told as
        well.
        """
        session = self._sending.get(session_id)
        if session is None:
            return False
        self.stop(session_id)
        self._sessions.fail(session_id, error, blamed)
        if not session.spec.is_first:
            move = frame_pb2.SessionMove(
                session_id=session_id, moved_session_id=session.spec.session_id
            )
            self._give_up(session.spec.first_agent, move, error, blamed)
        return True

    def closed(self, session: Session) -> None:
        """Forgets a session that was closed; no rows of it leave any more."""
        for cache_send in session.cache_sends:
            self._sending.pop(cache_send.session_id, None)

    def validate(self) -> None:
        """Raises AssertionError unless every session is open and sends where it moves to."""
        for session_id, session in self._sending.items():
            assert self._sessions.get(session.spec.session_id) is session
            assert {each.session_id for each in session.cache_sends} == {session_id}

    def _give_up(
        self, leader: str, move: frame_pb2.SessionMove, error: CatenaryError, blamed: str
    ) -> None:
        own = self._sessions.agent_id
        self._say(leader, give_up_of(move, own, error, blamed or own), 0)
