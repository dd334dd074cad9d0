"""Borrowing of caches from agents of this host: their memory that this agent has opened.

A peer offers memory of its own. What this agent reads there, it proves by a digest of the first
bytes. Parts of caches then lie in that memory, one at a time, until this agent has copied them to
its slots and returns the piece.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from catenary_agent.generation.cache.cache_lending import MARK_BYTES, proof_of
from catenary_agent.generation.state.events import LoanOut
from catenary_agent.generation.state.incidents import incident
from catenary_agent.generation.state.stall_timer import StallTimer
from catenary_agent.kv import bytes_of
from catenary_protos.catenary.v1 import frame_pb2
from catenary_services.errors import CatenaryError, InvalidInput, Unavailable
from catenary_services.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable

    from catenary_agent.generation.context import CacheLimits
    from catenary_agent.generation.state.events import CacheLent, LoanMessage
    from catenary_agent.generation.state.session import Session
    from catenary_agent.generation.state.sessions import SessionTable
    from catenary_agent.kv.lending import CacheLending, LentMemory
    from catenary_services.domain.ids import Nanoseconds

_log = get_logger("catenary_agent.generation")
_MOST_LOANS = 16
_MOST_BYTES = 256 << 20
"""The most bytes of one peer's memory that are opened."""
_Step = frame_pb2.CacheLoan


class UnreadableError(Exception):
    """Lent memory that cannot be read; its text is for the lender."""


@dataclass(frozen=True, slots=True)
class _Borrowed:
    """Memory that one peer has lent, opened in this process."""

    peer: str
    memory: LentMemory


class CacheBorrower:
    """The memory of peers that this agent has opened: of each peer at most one.

    Invariants: every offer and every piece is answered once. Memory is let go of when its peer
    offers other memory, or lends nothing for twice the stall timeout, after which the peer has
    given it back.
    """

    def __init__(
        self, sessions: SessionTable, limits: CacheLimits, clock: Callable[[], Nanoseconds]
    ) -> None:
        """Has opened nothing yet."""
        self._sessions = sessions
        self._clock = clock
        self.stall_timer = StallTimer(2 * limits.stall_timeout_ns)
        self._open: dict[int, _Borrowed] = {}
        """The memory, by the id of the loan."""

    def on_offer(self, message: LoanMessage) -> None:
        """Opens memory of a peer, and says what is there or why that is not possible."""
        offer = message.loan
        for loan_id in [at for at, each in self._open.items() if each.peer == offer.agent_id]:
            self._let_go(loan_id)
        try:
            memory = self._opened(offer)
        except Exception as error:
            self._say(offer.agent_id, _Step.STEP_DECLINE, offer.loan_id, reason=_told(error))
            return
        try:
            proof = proof_of(memory.get(MARK_BYTES), self._sessions.agent_id)
        except Exception as error:
            memory.close()
            self._say(offer.agent_id, _Step.STEP_DECLINE, offer.loan_id, reason=_told(error))
            return
        self._open[offer.loan_id] = _Borrowed(offer.agent_id, memory)
        self.stall_timer.touch(offer.loan_id, self._clock())
        self._say(offer.agent_id, _Step.STEP_ACCEPT, offer.loan_id, proof=proof)

    def check(self, session: Session, event: CacheLent) -> Callable[[], None]:
        """Returns what writes a piece to a session's slots.

        That raises `UnreadableError` where the memory cannot be read, and `InvalidInput` where the
        session has no such slots.

        Raises:
            InvalidInput: The size is not that of its rows, or more than the memory has.
            UnreadableError: The memory is not open here.
        """
        borrowed, executor = self._open.get(event.piece.loan_id), session.batcher.executor
        if borrowed is None or borrowed.peer != event.piece.agent_id or executor.lending is None:
            raise UnreadableError("the memory is not open here")
        row = (executor.table.key_value_heads, executor.table.head_size)
        wanted, most = bytes_of(event.datatype, event.span, row), borrowed.memory.nbytes
        if not wanted == event.piece.nbytes <= most:
            text = f"{event.piece.nbytes} bytes of {most}; {event.span} are {wanted}"
            raise InvalidInput("cache.lent", text)
        return partial(_write, executor.lending, event, borrowed.memory)

    def answer(self, piece: frame_pb2.LentPiece, problem: str) -> None:
        """Returns a piece to its peer, or rejects it because of a problem."""
        borrowed = self._open.get(piece.loan_id)
        is_open = borrowed is not None and borrowed.peer == piece.agent_id
        if problem:
            _log.warning("cache_loan_failed", peer=piece.agent_id, reason=problem[:200])
        if problem and is_open:
            self._let_go(piece.loan_id)
        elif is_open:
            self.stall_timer.touch(piece.loan_id, self._clock())
        step = _Step.STEP_REJECT if problem else _Step.STEP_RETURN
        self._say(piece.agent_id, step, piece.loan_id, number=piece.number, reason=problem)

    def expire(self, now: Nanoseconds) -> None:
        """Lets go of memory in which nothing was lent for a while."""
        for loan_id in self.stall_timer.lost(now):
            self._let_go(loan_id)

    def close(self) -> None:
        """Lets go of all memory that peers have lent, as the agent ends."""
        for loan_id in list(self._open):
            self._let_go(loan_id)

    def validate(self) -> None:
        """Raises AssertionError unless a timeout runs for all memory, and peers have one each."""
        assert self.stall_timer.since.keys() == self._open.keys()
        assert len({each.peer for each in self._open.values()}) == len(self._open)

    def _opened(self, offer: frame_pb2.CacheLoan) -> LentMemory:
        """Returns the memory of an offer.

        Raises:
            Unavailable: It cannot be opened, or not now.
        """
        session = self._sessions.get(offer.session_id)
        lending = session.batcher.executor.lending if session is not None else None
        if lending is None or lending.memory.way != offer.way:
            raise Unavailable(f"nothing here reads memory by way of {offer.way!r}")
        if not MARK_BYTES <= offer.nbytes <= _MOST_BYTES:
            raise Unavailable(f"{offer.nbytes} bytes; {_MOST_BYTES} may be lent")
        if offer.loan_id in self._open or len(self._open) >= _MOST_LOANS:
            raise Unavailable(f"memory of {len(self._open)} peers is open already")
        return lending.memory.open(offer.handle, offer.nbytes, offer.place)

    def _let_go(self, loan_id: int) -> None:
        borrowed = self._open.pop(loan_id, None)
        self.stall_timer.drop(loan_id)
        if borrowed is not None:
            borrowed.memory.close()

    def _say(
        self,
        peer: str,
        step: frame_pb2.CacheLoan.Step.ValueType,
        loan_id: int,
        *,
        number: int = 0,
        proof: bytes = b"",
        reason: str = "",
    ) -> None:
        said = frame_pb2.CacheLoan(
            step=step,
            agent_id=self._sessions.agent_id,
            loan_id=loan_id,
            number=number,
            proof=proof,
            reason=reason[:300],
        )
        self._sessions.out.loans.append(LoanOut(peer, said))


def _write(lending: CacheLending, event: CacheLent, memory: LentMemory) -> None:
    try:
        lending.borrow_cache(event.session_id, event.span, event.datatype, memory)
    except CatenaryError:
        raise
    except Exception as error:
        raise UnreadableError(_told(error)) from error


def _told(error: Exception) -> str:
    if isinstance(error, CatenaryError):
        return error.message
    return incident("lent memory could not be read").message
