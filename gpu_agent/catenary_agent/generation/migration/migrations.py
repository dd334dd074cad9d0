"""All moves of caches and sessions between agents, behind one interface to the generation loop.

Each step of a live migration is passed to the part it concerns. Steps between two parts of the same
agent, which may be on both rings, are not sent as frames.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from catenary_agent.generation.cache.cache_borrowing import CacheBorrower
from catenary_agent.generation.cache.cache_lending import CacheLender
from catenary_agent.generation.cache.cache_pushing import CachePusher
from catenary_agent.generation.cache.cache_waiting import PendingCaches
from catenary_agent.generation.cache.shared_prompts import SharedPrompts
from catenary_agent.generation.frames.intake import move_said
from catenary_agent.generation.migration.migration_sender import MigrationSender
from catenary_agent.generation.migration.migration_source import MigrationSource
from catenary_agent.generation.migration.migration_target import MigrationTarget
from catenary_agent.generation.state.events import MoveOut
from catenary_agent.generation.state.session import ArrivalTime, SessionSpec
from catenary_agent.generation.state.states import LEAVING
from catenary_protos.catenary.v1 import frame_pb2

if TYPE_CHECKING:
    from catenary_agent.generation.cache.cache_lending import Piece, PieceEnd
    from catenary_agent.generation.context import CacheLimits
    from catenary_agent.generation.state.events import (
        CachePushed,
        CloseOrdered,
        EpochRaised,
        LoanMessage,
        MoveMessage,
    )
    from catenary_agent.generation.state.session import Session
    from catenary_agent.generation.state.sessions import SessionTable
    from catenary_services.domain.ids import Nanoseconds
    from catenary_services.errors import CatenaryError

    _Timed = PendingCaches | MigrationTarget | MigrationSource | CacheLender | CacheBorrower

_Step = frame_pb2.SessionMove


class Migrations:
    """The sessions and caches that come to this agent or leave it."""

    def __init__(
        self, sessions: SessionTable, limits: CacheLimits, clock: Callable[[], Nanoseconds]
    ) -> None:
        self._sessions = sessions
        self._clock = clock
        self._local: deque[frame_pb2.SessionMove] = deque()
        """Steps of moves that this agent has sent to itself."""
        self.ignored = 0
        """Number of steps of moves that came late, twice or for no session."""
        self.borrower = CacheBorrower(sessions, limits, clock)
        self.lender = CacheLender(sessions, limits, clock)
        self.waiting = PendingCaches(sessions, limits, clock, self._came, self.borrower)
        self.shared = SharedPrompts(sessions, self.waiting)
        self.pushing = CachePusher(sessions, limits, self.lender, self.waiting.take, self._unread)
        stall_timeout_ns = limits.stall_timeout_ns
        self._arrivals = MigrationTarget(sessions, self.waiting, stall_timeout_ns, clock, self._say)
        self._sending = MigrationSender(sessions, self.pushing, stall_timeout_ns, clock, self._say)
        self._leading = MigrationSource(sessions, self._sending, limits, clock, self._say)
        self._handlers: Mapping[int, Callable[[MoveMessage], bool]] = {
            _Step.STEP_BEGIN: self._on_begin,
            _Step.STEP_ROUND: self._arrivals.on_round,
            _Step.STEP_READY: self._leading.on_ready,
            _Step.STEP_HAND_OVER: self._arrivals.on_hand_over,
            _Step.STEP_GIVE_UP: self._on_give_up,
        }
        sessions.on_closed = self._closed
        self.lender.ended = self._piece_ended

    def on_said(self, said: MoveMessage) -> None:
        """Handles a step of a move that the gateway or another agent sent."""
        # A step that this release does not know ends the move.
        self.ignored += not self._handlers.get(said.move.step, self._on_give_up)(said)

    def on_loan(self, message: LoanMessage) -> None:
        """Handles what another agent of this host said of lent memory."""
        if message.loan.step == frame_pb2.CacheLoan.STEP_OFFER:
            self.borrower.on_offer(message)
            return
        self.ignored += not self.lender.on_said(message)

    def go_on(self, session: Session) -> None:
        """Continues a session whose newest token is known and of which no rows are in transit.

        It goes on here, or on the ring that it moves to.
        """
        if not (self._leading.moves_of and self._leading.turned(session)):
            self._sessions.resume(session)

    def broken(self, session_id: int, error: CatenaryError, blamed: str) -> bool:
        """Handles frames of a move that could not be sent; False if no move here has that id."""
        is_move = self._leading.broken(session_id, error, blamed) or self._sending.broken(
            session_id, error, blamed
        )
        self.lender.lost(blamed)
        return is_move

    def on_close_ordered(self, event: CloseOrdered) -> None:
        """Closes sessions; those whose caches are being sent close after their last rows left."""
        for session_id in event.session_ids:
            session = self._sessions.get(session_id)
            if session is not None:  # a move that is led here and was not handed over ends
                self._leading.closed(session)
        later = self._sending.defer(event.session_ids)
        self._sessions.order_closed(tuple(each for each in event.session_ids if each not in later))

    def on_epoch(self, event: EpochRaised) -> None:
        """Gives up moves that older schedulers have ordered."""
        self._leading.raise_epoch(event.epoch)

    def on_pushed(self, event: CachePushed) -> None:
        """Handles the departure of a frame of caches."""
        self._leading.pushed(event.cache.cache_send.session_id)
        self.pushing.on_pushed(event)

    def advanced(self, session: Session) -> None:
        """Handles the progress of a session after a step has cached more of it."""
        if session.cache_sends or session.state is LEAVING:
            self.pushing.advanced(session)
        if session.incoming is not None:
            self._arrivals.advanced(session)

    def renew(self) -> None:
        """Grants the cache transfers their bytes until the next step."""
        if self.waiting.arrived:
            self.waiting.renew()
        if self.pushing.lines:
            self.pushing.renew()

    def is_led(self, session: Session) -> bool:
        """Returns True while a move of a session is led here."""
        return session.spec.session_id in self._leading.moves_of

    @property
    def led(self) -> tuple[int, ...]:
        """The new ids of the sessions whose moves are led here."""
        return self._leading.led

    @property
    def is_waiting(self) -> bool:
        """True if `renew` has something to do."""
        return bool(self.waiting.arrived or (self.pushing.lines and self.pushing.is_waiting))

    def settle(self) -> None:
        """Handles the steps that this agent has sent to itself."""
        while self._local:
            move = self._local.popleft()
            arrived = ArrivalTime(self._clock())
            self._sessions.because("MoveMessage", arrived.received_ns)
            said = move_said(move, arrived, self._sessions.agent_id, (0, 0))
            if isinstance(said.spec, SessionSpec):
                self._sessions.out.opened.append(said.spec)
            self.on_said(said)

    def validate(self) -> None:
        """Raises AssertionError unless every invariant of the moves holds."""
        assert not self._local
        self.waiting.validate()
        self.shared.validate()
        self._arrivals.validate()
        self._sending.validate()
        self._leading.validate()
        self.lender.validate()
        self.borrower.validate()

    def close(self) -> None:
        """Gives back all memory that was lent or borrowed."""
        self.lender.close()
        self.borrower.close()

    def expire(self, now: Nanoseconds) -> None:
        """Gives up sessions and moves that made no progress within the stall timeout."""
        for part in self._timed():
            part.expire(now)

    def next_wakeup_ns(self) -> Nanoseconds | None:
        """Returns the moment at which `expire` or `renew` has something to do; None if never."""
        if self.is_waiting:
            return 0
        moments = [part.stall_timer.next_wakeup_ns() for part in self._timed()]
        return min((each for each in moments if each is not None), default=None)

    def _timed(self) -> list[_Timed]:
        """Returns the parts in which a stall timeout runs: mostly none, and this is asked often."""
        parts = (self.waiting, self._arrivals, self._leading, self.lender, self.borrower)
        return [part for part in parts if part.stall_timer.since]

    def _on_begin(self, said: MoveMessage) -> bool:
        if said.move.session_id in self._sending:
            return False
        if not said.move.agent_id:
            return self._leading.on_begin(said)
        self._sending.follow(said.move)
        return True

    def _on_give_up(self, said: MoveMessage) -> bool:
        session_id = said.move.session_id
        if session_id in self._leading:
            self._leading.on_give_up(said.move)
            return True
        sent = self._sending.stop(session_id)
        return self._arrivals.on_give_up(session_id) or sent

    def _say(self, peer: str, move: frame_pb2.SessionMove, deadline_ns: Nanoseconds) -> None:
        if peer != self._sessions.agent_id:
            self._sessions.out.moves.append(MoveOut(peer, move, deadline_ns))
            return
        own = frame_pb2.SessionMove()
        own.CopyFrom(move)
        if own.HasField("opening"):
            own.opening.budget_ns = deadline_ns - self._clock()
        self._local.append(own)

    def _came(self, session: Session) -> None:
        self._arrivals.advanced(session)

    def _piece_ended(self, piece: Piece, end: PieceEnd) -> None:
        self._leading.pushed(piece.cache_send.session_id)
        self.pushing.on_piece_ended(piece, end)

    def _unread(self, session: Session, session_id: int, error: CatenaryError) -> None:
        if not self.broken(session_id, error, self._sessions.agent_id):
            self._sessions.fail(session.spec.session_id, error)

    def _closed(self, session: Session, error: CatenaryError | None, blamed: str) -> None:
        if self.shared.readers:
            self.shared.closed(session)
        if session.incoming is not None:
            self._arrivals.closed(session, error, blamed)
        if self._leading.moves_of:
            self._leading.closed(session)
        if session.cache_sends:
            self._sending.closed(session)
