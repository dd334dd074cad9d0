"""Lending of caches to agents of this host: the memory that each borrows, and what lies in it.

A peer of this host is offered memory whose first bytes are random. Once it has said what they are,
parts of caches pass in that memory: rows are gathered there, the peer copies them to its slots and
returns the piece, and the next one can be written.

    offer -> OFFERED -> accept -> READY -> a piece is written -> LENT -> return -> READY

Nobody waits here for a peer: until it has answered, caches leave as frames, one at a time. Whatever
fails ends the loan and bars the peer for a while; what it could not read leaves as frames, too.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import itertools
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from catenary_agent.generation.state.events import LentOut, LoanOut, PieceDone
from catenary_agent.generation.state.incidents import incident
from catenary_agent.generation.state.stall_timer import StallTimer
from catenary_protos.catenary.v1 import frame_pb2
from catenary_services.errors import CatenaryError
from catenary_services.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from catenary_agent.generation.context import CacheLimits
    from catenary_agent.generation.state.events import LoanMessage
    from catenary_agent.generation.state.session import Session
    from catenary_agent.generation.state.sessions import SessionTable
    from catenary_agent.kv import CacheSendProgress, CacheSpan
    from catenary_agent.kv.lending import CacheLending, LentMemory, MemorySource
    from catenary_services.domain.ids import Nanoseconds

_log = get_logger("catenary_agent.generation")
MARK_BYTES = 16
"""Size of the random beginning of offered memory."""
_MOST_LOANS = 8
"""The most peers that borrow memory at the same time; caches for others leave as frames."""
_BAR_NS = 60_000_000_000
"""The time for which a peer is offered nothing after something has failed."""
_Step = frame_pb2.CacheLoan


class LoanState(enum.StrEnum):
    """A state of the memory that is lent to a peer."""

    OFFERED = "offered"
    """The peer has not said yet whether it can read the memory."""
    READY = "ready"
    """A piece may be written."""
    LENT = "lent"
    """The peer may be reading."""


OFFERED, READY, LENT = LoanState.OFFERED, LoanState.READY, LoanState.LENT
LOAN_CHANGES: Mapping[LoanState, Mapping[LoanState, str]] = {
    OFFERED: {READY: "the peer has read the mark"},
    READY: {LENT: "a piece was written"},
    LENT: {READY: "the piece was returned"},
}
"""Every change there is, and what happened. In each state a loan may end."""


class PieceEnd(enum.Enum):
    """The outcome of a part of caches that was put into lent memory."""

    PASSED = "passed"
    """The peer has copied its rows to caches of its own."""
    REJECTED = "rejected"
    """The peer could not read it: its rows are to be sent otherwise."""
    LOST = "lost"
    """Nobody knows whether it was read. The move fails by its own timeout."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a session's caches in lent memory."""

    session: Session
    cache_send: CacheSendProgress
    spans: list[CacheSpan]
    """The parts that it consists of, as they were taken of the cache send."""
    nbytes: int
    lent_ns: Nanoseconds


@dataclass(slots=True, eq=False)
class Loan:
    """The memory that one peer borrows."""

    loan_id: int
    peer: str
    source: MemorySource
    memory: LentMemory
    proof: bytes
    """The words of a peer that has read the mark."""
    state: LoanState = OFFERED
    number: int = 0
    """Number of the newest piece."""


class CacheLender:
    """The memory that peers borrow from this agent, at most one piece in each.

    Invariants: what a peer may be reading is not written to. Memory is given back when its peer is
    gone, has failed, or has not been heard of, or was not needed, for the stall timeout. A piece
    ends once.
    """

    def __init__(
        self, sessions: SessionTable, limits: CacheLimits, clock: Callable[[], Nanoseconds]
    ) -> None:
        """Lends nothing yet; `limits` has the size of lent memory, and the stall timeout."""
        self._sessions = sessions
        self._limits = limits
        self._clock = clock
        self.is_local: Callable[[str], bool] = lambda peer: False
        """Returns True if a peer is on this host, as far as is known."""
        self.stall_timer = StallTimer(limits.stall_timeout_ns)
        self.ended: Callable[[Piece, PieceEnd], None] = lambda piece, end: None
        """Called once with every piece."""
        self._loans: dict[str, Loan] = {}
        """The memory that is lent now, by the peer that borrows it."""
        self._pieces: dict[int, Piece] = {}
        """The pieces that are lent, by the id of the loan."""
        self._barred: dict[str, Nanoseconds] = {}
        """The moments until which peers are offered nothing."""
        self._handlers: Mapping[tuple[LoanState, int], Callable[..., None]] = {
            (OFFERED, _Step.STEP_ACCEPT): self._accepted,
            (OFFERED, _Step.STEP_DECLINE): self._declined,
            (LENT, _Step.STEP_RETURN): self._returned,
            (LENT, _Step.STEP_REJECT): self._rejected,
        }
        self._ids = itertools.count(int.from_bytes(os.urandom(6)) + 1)

    def room_for(self, peer: str, lending: CacheLending | None) -> int:
        """Returns how many bytes of caches can be lent to a peer now; 0 if they leave as frames."""
        loan = self._loans.get(peer)
        if loan is None or loan.state is not READY or lending is None:
            return 0
        same = (loan.source.way, loan.source.place) == (lending.memory.way, lending.memory.place)
        return loan.memory.nbytes if same else 0

    def is_asked(self, peer: str) -> bool:
        """Returns True until a peer has answered an offer."""
        loan = self._loans.get(peer)
        return loan is not None and loan.state is OFFERED

    def offer(self, peer: str, session_id: int, lending: CacheLending | None) -> None:
        """Offers memory to a peer of this host that borrows none yet.

        Args:
            peer: The peer.
            session_id: A session whose caches it gets, by its id there.
            lending: What could write caches to that memory.
        """
        own, now = self._sessions.agent_id, self._clock()
        if lending is None or peer in self._loans or len(self._loans) >= _MOST_LOANS:
            return
        if peer == own or now < self._barred.get(peer, now) or not self.is_local(peer):
            return
        mark, source = os.urandom(MARK_BYTES), lending.memory
        try:
            memory = source.make(self._limits.lent_bytes)
            memory.put(mark)
        except Exception as error:
            self._bar(peer, source.way, _told(error, "memory could not be lent"))
            return
        loan = Loan(next(self._ids), peer, source, memory, proof_of(mark, peer))
        self._loans[peer] = loan
        self.stall_timer.touch(loan.loan_id, now)
        offer = frame_pb2.CacheLoan(
            step=_Step.STEP_OFFER,
            agent_id=own,
            loan_id=loan.loan_id,
            session_id=session_id,
            way=source.way,
            place=source.place,
            handle=memory.handle,
            nbytes=memory.nbytes,
        )
        self._sessions.out.loans.append(LoanOut(peer, offer))

    def lend(
        self,
        session: Session,
        cache_send: CacheSendProgress,
        spans: list[CacheSpan],
        whole: CacheSpan,
        nbytes: int,
    ) -> bool:
        """Writes a piece and tells the peer; returns False if it could not be written.

        Args:
            session: The session.
            cache_send: What is sent of it to the peer, for which `room_for` has enough.
            spans: The parts that were taken of it.
            whole: All these parts.
            nbytes: Their size.
        """
        loan, lending = self._loans[cache_send.peer], session.batcher.executor.lending
        began_ns = self._clock()
        try:
            assert lending is not None
            datatype = lending.lend_cache(session.spec.session_id, whole, loan.memory)
        except Exception as error:
            self._fail(loan, _told(error, "caches could not be lent"), PieceEnd.LOST)
            return False
        loan.number += 1
        self._go(loan, LENT)
        self._pieces[loan.loan_id] = Piece(session, cache_send, spans, nbytes, began_ns)
        piece = frame_pb2.LentPiece(
            loan_id=loan.loan_id,
            number=loan.number,
            nbytes=nbytes,
            agent_id=self._sessions.agent_id,
        )
        out = LentOut(cache_send.peer, cache_send.session_id, whole, datatype, piece)
        self._sessions.out.lent.append(out)
        return True

    def on_said(self, message: LoanMessage) -> bool:
        """Handles an answer of a peer; returns False if it came late, twice or for no loan."""
        said = message.loan
        loan = self._loans.get(said.agent_id)
        if loan is None or loan.loan_id != said.loan_id:
            return False
        handler = self._handlers.get((loan.state, said.step))
        if handler is None or (loan.state is LENT and said.number != loan.number):
            return False
        handler(loan, said)
        return True

    def lost(self, peer: str) -> None:
        """Gives back what a peer has borrowed that cannot be reached."""
        if peer in self._loans:
            self._end(self._loans[peer], PieceEnd.LOST)

    def expire(self, now: Nanoseconds) -> None:
        """Gives back memory that was not needed, or of whose peer nothing was heard."""
        for loan_id in self.stall_timer.lost(now):
            loan = next(each for each in self._loans.values() if each.loan_id == loan_id)
            if loan.state is READY:
                self._end(loan, PieceEnd.LOST)
            else:
                self._fail(loan, f"no answer for {self.stall_timer}", PieceEnd.LOST)

    def close(self) -> None:
        """Gives back all memory that is lent, as the agent ends."""
        for peer in list(self._loans):
            self.lost(peer)

    def validate(self) -> None:
        """Raises AssertionError unless the state of every loan is that of its memory."""
        lent = {each.loan_id for each in self._loans.values() if each.state is LENT}
        assert self._pieces.keys() == lent
        assert self.stall_timer.since.keys() == {each.loan_id for each in self._loans.values()}
        assert all(each.peer == peer for peer, each in self._loans.items())

    def _accepted(self, loan: Loan, said: frame_pb2.CacheLoan) -> None:
        if not hmac.compare_digest(said.proof, loan.proof):
            self._fail(loan, "the peer has read something else", PieceEnd.LOST)
            return
        self._go(loan, READY)
        _log.info("cache_loan_open", peer=loan.peer, way=loan.source.way, nbytes=loan.memory.nbytes)

    def _declined(self, loan: Loan, said: frame_pb2.CacheLoan) -> None:
        self._fail(loan, said.reason, PieceEnd.LOST)

    def _returned(self, loan: Loan, _: frame_pb2.CacheLoan) -> None:
        self._go(loan, READY)
        piece = self._pieces.pop(loan.loan_id)
        model, taken_ns = piece.session.batcher.key.model.name, self._clock() - piece.lent_ns
        passed = PieceDone(model, loan.peer, loan.source.way, piece.nbytes, taken_ns)
        self._sessions.out.passed.append(passed)
        self.ended(piece, PieceEnd.PASSED)

    def _rejected(self, loan: Loan, said: frame_pb2.CacheLoan) -> None:
        self._fail(loan, said.reason, PieceEnd.REJECTED)

    def _go(self, loan: Loan, state: LoanState) -> None:
        assert state in LOAN_CHANGES[loan.state], f"{loan.state} -> {state}"
        loan.state = state
        self.stall_timer.touch(loan.loan_id, self._clock())

    def _fail(self, loan: Loan, reason: str, end: PieceEnd) -> None:
        self._bar(loan.peer, loan.source.way, reason)
        self._end(loan, end)

    def _end(self, loan: Loan, end: PieceEnd) -> None:
        """Gives the memory of a loan back, and ends the piece in it."""
        del self._loans[loan.peer]
        self.stall_timer.drop(loan.loan_id)
        loan.memory.close()
        piece = self._pieces.pop(loan.loan_id, None)
        if piece is not None:
            self.ended(piece, end)

    def _bar(self, peer: str, way: str, reason: str) -> None:
        now = self._clock()
        self._barred = {each: until for each, until in self._barred.items() if now < until}
        self._barred[peer] = now + _BAR_NS
        _log.warning("cache_loan_failed", peer=peer, way=way, reason=reason[:200])
        self._sessions.out.loans_failed.append(way)


def proof_of(mark: bytes, peer: str) -> bytes:
    """Returns what shows that a peer has read a mark, and says nothing of other memory."""
    return hashlib.sha256(mark + peer.encode()).digest()


def _told(error: Exception, what: str) -> str:
    """Returns the reason of a failure, after logging it where it was not expected."""
    return error.message if isinstance(error, CatenaryError) else incident(what).message
