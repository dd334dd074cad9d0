"""The events that the generation loop is told, and the output it produces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from catenary_agent.generation.state.session import NO_DRAFTS

if TYPE_CHECKING:
    from catenary_agent.engine.reporting import OutgoingMessage
    from catenary_agent.generation.state.partition_batcher import PromptTurn, StepDone
    from catenary_agent.generation.state.session import (
        ArrivalTime,
        Drafts,
        Hidden,
        Session,
        SessionSpec,
    )
    from catenary_agent.kv import CacheSendProgress
    from catenary_agent.kv.arrays import CacheArray
    from catenary_agent.kv.span import CacheSpan
    from catenary_protos.catenary.v1 import frame_pb2
    from catenary_services.domain.logprobs import TokenLogprobs
    from catenary_services.errors import CatenaryError
    from catenary_services.transport.interface import ReceivedFrame


@dataclass(frozen=True, slots=True)
class SessionOpened:
    """A session is to begin here."""

    spec: SessionSpec
    arrived: ArrivalTime


@dataclass(frozen=True, slots=True)
class RowsArrived:
    """Hidden states of a session arrived from the previous hop."""

    session_id: int
    position: int
    rows: Hidden
    sample: bool
    arrived: ArrivalTime
    drafts: Drafts = NO_DRAFTS
    token_ids: tuple[int, ...] = ()
    """The tokens that the last rows without a guess belong to, where the opening does not say
    them."""


@dataclass(frozen=True, slots=True)
class PrefixConfirmed:
    """All agents of a ring said how many tokens of a session they have from sessions before."""

    session_id: int
    tokens: int


@dataclass(frozen=True, slots=True)
class TokenArrived:
    """A token of a session that begins here was sampled by its last hop."""

    session_id: int
    position: int
    token_id: int
    is_last: bool
    """True if the session ends with these tokens."""
    arrived: ArrivalTime
    following: tuple[int, ...] = ()
    """Further tokens of the same step, which had been guessed."""
    takes_drafts: bool = False
    """True if all agents of the ring take guesses."""


@dataclass(frozen=True, slots=True)
class CacheArrived:
    """A part of a session's caches arrived from another agent."""

    session_id: int
    span: CacheSpan
    datatype: str
    frame: ReceivedFrame
    """The received frame. Its payload is read in place and released on the event loop
    afterwards."""
    nbytes: int
    """Size of the payload, which counts as held until it was read."""


@dataclass(frozen=True, slots=True)
class CacheLent:
    """A part of a session's caches lies in memory that an agent of this host has lent."""

    session_id: int
    span: CacheSpan
    datatype: str
    piece: frame_pb2.LentPiece

    @property
    def nbytes(self) -> int:
        """The size that its sender gave, which was not checked."""
        return self.piece.nbytes


@dataclass(frozen=True, slots=True)
class LoanMessage:
    """An agent of this host said something of memory that one of both has lent."""

    loan: frame_pb2.CacheLoan


@dataclass(frozen=True, slots=True)
class CachePushed:
    """A part of a session's caches has left for a peer, or was given up."""

    cache: CacheOut


@dataclass(frozen=True, slots=True)
class RowsPushed:
    """Rows of a session that others could overtake have left for the next agent, or were lost."""

    session_id: int


@dataclass(frozen=True, slots=True)
class MoveMessage:
    """A step of a live migration arrived from the gateway or another agent."""

    move: frame_pb2.SessionMove
    epoch: int
    """The epoch of the sender."""
    arrived: ArrivalTime
    spec: SessionSpec | CatenaryError | None = None
    """If the step opens a session here: its description, or the error in the opening. Otherwise
    None."""


@dataclass(frozen=True, slots=True)
class EpochRaised:
    """A scheduler of a newer epoch leads; an epoch of 0 accepts any scheduler again."""

    epoch: int


@dataclass(frozen=True, slots=True)
class CloseOrdered:
    """Sessions are to be ended by order of the scheduler."""

    session_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SessionsBroken:
    """Sessions cannot continue: a frame was wrong, or a peer cannot be reached."""

    session_ids: tuple[int, ...]
    error: CatenaryError
    blamed: str
    """The agent or gateway at fault."""


@dataclass(frozen=True, slots=True)
class GrammarCompiled:
    """The news which tokens a session's answer may go on with, or that it cannot be known."""

    session_id: int
    problem: CatenaryError | None


@dataclass(frozen=True, slots=True)
class EngineAnswered:
    """The news that the next tokens of sessions are here, or that their engine has none."""

    session_ids: Sequence[int]
    problem: CatenaryError | None


@dataclass(frozen=True, slots=True)
class LoopCall:
    """Other work for the generation thread, done between two steps."""

    work: Callable[[], Any]
    done: Callable[[Any, Exception | None], None]
    """Called on the thread with the result and None, or with None and the exception."""


Event = (
    SessionOpened
    | RowsArrived
    | PrefixConfirmed
    | TokenArrived
    | CacheArrived
    | CacheLent
    | LoanMessage
    | CachePushed
    | RowsPushed
    | MoveMessage
    | EpochRaised
    | CloseOrdered
    | SessionsBroken
    | GrammarCompiled
    | EngineAnswered
    | LoopCall
)


@dataclass(slots=True)
class RowsOut:
    """Hidden states of a session, to be sent to the next hop."""

    spec: SessionSpec
    position: int
    rows: Hidden
    sample: bool
    opens: bool
    """True if the next agent must be sent the session's opening."""
    arrived: ArrivalTime
    started_ns: int
    ended_ns: int
    drafts: Drafts
    token_ids: Sequence[int] = ()
    """The tokens that the last rows without a guess belong to, where the opening does not say
    them."""
    turn: PromptTurn | None = None
    """The place among the rows of prompts for the same agent; None for rows that none overtake."""


@dataclass(slots=True)
class TokenOut:
    """A sampled token, to be sent to the gateway and to the first agent of the ring."""

    spec: SessionSpec
    position: int
    token_id: int
    finish_reason: str
    arrived: ArrivalTime
    started_ns: int
    ended_ns: int
    takes_drafts: bool
    scored: TokenLogprobs | None = None
    """The token's log probabilities, if its session asks for them; for the gateway."""
    is_guessed: bool = False
    """True for a further token of the same step, whose time is that of the first."""
    cached_tokens: int = 0
    """The number of tokens before it that were not computed, with the first token of a start."""


@dataclass(frozen=True, slots=True)
class PrefixOut:
    """The number of tokens that all agents of a ring have of a session, for the first of them."""

    spec: SessionSpec
    tokens: int


@dataclass(slots=True)
class PromptScoresOut:
    """Log probabilities of a prompt's tokens, to be sent to the gateway."""

    spec: SessionSpec
    position: int
    """Index of the first of them in the prompt."""
    scored: Sequence[TokenLogprobs]


@dataclass(slots=True)
class CacheOut:
    """A part of a session's caches, to be sent to another agent."""

    session: Session
    cache_send: CacheSendProgress
    span: CacheSpan
    rows: CacheArray
    opens: bool
    """True if the peer must be sent the session's opening."""
    is_urgent: bool
    """True for a small part that a session stands still for: it overtakes parts of other
    sessions."""


@dataclass(frozen=True, slots=True)
class LentOut:
    """A part of a session's caches in lent memory, of which the borrower is to be told."""

    peer: str
    session_id: int
    """The id of the session at the borrower."""
    span: CacheSpan
    datatype: str
    piece: frame_pb2.LentPiece


@dataclass(frozen=True, slots=True)
class LoanOut:
    """A message about lent memory, for an agent of this host."""

    peer: str
    loan: frame_pb2.CacheLoan


@dataclass(frozen=True, slots=True)
class PieceDone:
    """The record of a part of caches that a peer has read in lent memory."""

    model: str
    peer: str
    way: str
    """The kind of memory."""
    nbytes: int
    taken_ns: int
    """The time from the beginning of its writing until the peer's answer."""


@dataclass(slots=True)
class MoveOut:
    """A step of a live migration, to be sent to another agent."""

    peer: str
    move: frame_pb2.SessionMove
    deadline_ns: int
    """The session's deadline on the monotonic clock of this process."""


@dataclass(frozen=True, slots=True)
class MoveDone:
    """The record of a session that was handed over, for metrics and traces of the leading agent."""

    model: str
    move: frame_pb2.SessionMove
    """The order to move, with the opening of the session on the new ring."""
    tokens: int
    """Number of tokens cached at the hand-over."""
    rounds: int
    started_ns: int
    held_ns: int
    ended_ns: int

    @property
    def mode(self) -> str:
        """The kind of the move: "tokens" if they are computed again, "kv" if caches are sent."""
        return "tokens" if self.move.by_tokens else "kv"


@dataclass(slots=True)
class LoopOutput:
    """Everything the generation loop produced since it was last asked."""

    rows: list[RowsOut] = field(default_factory=list)
    tokens: list[TokenOut] = field(default_factory=list)
    prefixes: list[PrefixOut] = field(default_factory=list)
    prompt_scores: list[PromptScoresOut] = field(default_factory=list)
    caches: list[CacheOut] = field(default_factory=list)
    lent: list[LentOut] = field(default_factory=list)
    loans: list[LoanOut] = field(default_factory=list)
    passed: list[PieceDone] = field(default_factory=list)
    loans_failed: list[str] = field(default_factory=list)
    """The kind of memory of each loan that failed."""
    moves: list[MoveOut] = field(default_factory=list)
    messages: list[OutgoingMessage] = field(default_factory=list)
    """Messages to the scheduler."""
    gone: list[int] = field(default_factory=list)
    """Sessions that hold nothing here any more, or never did."""
    ended: list[Session] = field(default_factory=list)
    """The sessions among `gone` that were open here."""
    opened: list[SessionSpec] = field(default_factory=list)
    """Sessions that moved here without a frame, because both rings contain this agent."""
    outcomes: list[tuple[str, str]] = field(default_factory=list)
    """The model of each session that ended here, and "OK" or the reason of its failure."""
    steps: list[StepDone] = field(default_factory=list)
    guesses: list[tuple[str, int, int]] = field(default_factory=list)
    """The model of each session whose last agent is this one and of which tokens were guessed: the
    numbers of all guesses and of the right ones."""
    asked: list[tuple[str, int, int]] = field(default_factory=list)
    """The model of each session that begins here, the number of tokens it begins with, and how many
    of these sessions before had cached at all agents of its ring."""
    handed_over: list[tuple[str, int]] = field(default_factory=list)
    """The model of each session that a prefill ring handed over to this agent, and nanoseconds
    since its first token was sent."""
    moved: list[MoveDone] = field(default_factory=list)
    moves_failed: list[tuple[str, str]] = field(default_factory=list)
    """The model of each move that was led here and failed, and the reason."""
    taken_over: list[tuple[str, str, int]] = field(default_factory=list)
    """The model of each session that moved here, the mode, and nanoseconds since the old ring
    stopped."""
    consumed_bytes: int = 0
    """Bytes of arrived rows that are no longer held."""
    consumed: list[ReceivedFrame] = field(default_factory=list)
    """Frames to be released on the event loop."""

    def __bool__(self) -> bool:
        sent = self.rows or self.tokens or self.caches or self.moves
        told = self.messages or self.prompt_scores or self.prefixes
        inward = self.gone or self.opened or self.steps or self.consumed
        counted = self.handed_over or self.taken_over or self.moved or self.moves_failed
        lent = self.lent or self.loans or self.passed or self.loans_failed
        return bool(sent or told or inward or counted or lent) or self.consumed_bytes > 0
