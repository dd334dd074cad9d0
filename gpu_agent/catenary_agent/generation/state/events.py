"""What the ring is told, and what comes out of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from catenary_agent.engine.reporting import OutgoingMessage
    from catenary_agent.generation.state.session import ArrivalTime, Hidden, Session, SessionSpec
    from catenary_agent.kv import CacheSendProgress
    from catenary_agent.kv.arrays import CacheArray
    from catenary_agent.kv.span import CacheSpan
    from catenary_protos.catenary.v1 import frame_pb2
    from catenary_services.errors import CatenaryError
    from catenary_services.transport.interface import ReceivedFrame


@dataclass(frozen=True, slots=True)
class SessionOpened:
    """A session wants to begin here."""

    spec: SessionSpec
    arrived: ArrivalTime


@dataclass(frozen=True, slots=True)
class RowsArrived:
    """Hidden states of a session came from the hop before."""

    session_id: int
    position: int
    rows: Hidden
    sample: bool
    arrived: ArrivalTime


@dataclass(frozen=True, slots=True)
class TokenArrived:
    """The last hop has sampled a token of a session that begins here."""

    session_id: int
    position: int
    token_id: int
    is_last: bool
    """The session is over with it."""
    arrived: ArrivalTime


@dataclass(frozen=True, slots=True)
class CacheArrived:
    """A part of a session's caches came from another agent."""

    session_id: int
    span: CacheSpan
    datatype: str
    frame: ReceivedFrame
    """Read where it lies; released on the event loop once it was taken in."""
    nbytes: int
    """Counted as held until then."""


@dataclass(frozen=True, slots=True)
class CachePushed:
    """A part of a session's caches left for a peer, or was given up."""

    cache: CacheOut


@dataclass(frozen=True, slots=True)
class MoveMessage:
    """The gateway or another agent says something about a live migration."""

    move: frame_pb2.SessionMove
    epoch: int
    """Of who says it."""
    arrived: ArrivalTime
    spec: SessionSpec | CatenaryError | None = None
    """With an opening for us: what it says of the session here, or what is wrong with it."""


@dataclass(frozen=True, slots=True)
class EpochRaised:
    """A newer scheduler leads."""

    epoch: int


@dataclass(frozen=True, slots=True)
class CloseOrdered:
    """The scheduler wants these sessions forgotten."""

    session_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SessionsBroken:
    """Sessions cannot go on: a wrong frame, or a peer that cannot be reached."""

    session_ids: tuple[int, ...]
    error: CatenaryError
    blamed: str
    """Agent or gateway."""


@dataclass(frozen=True, slots=True)
class LoopCall:
    """Other work for the thread, done between two steps."""

    work: Callable[[], Any]
    done: Callable[[Any, Exception | None], None]
    """Called on the thread with the result, or with what was raised."""


Event = (
    SessionOpened
    | RowsArrived
    | TokenArrived
    | CacheArrived
    | CachePushed
    | MoveMessage
    | EpochRaised
    | CloseOrdered
    | SessionsBroken
    | LoopCall
)


@dataclass(slots=True)
class RowsOut:
    """Hidden states on their way to the next hop."""

    spec: SessionSpec
    position: int
    rows: Hidden
    sample: bool
    opens: bool
    """The next agent must be told what the session is."""
    arrived: ArrivalTime
    started_ns: int
    ended_ns: int


@dataclass(slots=True)
class TokenOut:
    """A sampled token on its way to the gateway and the first agent."""

    spec: SessionSpec
    position: int
    token_id: int
    finish_reason: str
    arrived: ArrivalTime
    started_ns: int
    ended_ns: int


@dataclass(slots=True)
class CacheOut:
    """A part of a session's caches on its way to another agent."""

    session: Session
    cache_send: CacheSendProgress
    span: CacheSpan
    rows: CacheArray
    opens: bool
    """The peer must be told what the session is."""
    is_urgent: bool
    """Little, and others wait for it: it may overtake parts of other sessions."""


@dataclass(slots=True)
class MoveOut:
    """A step of a live migration that another agent is told."""

    peer: str
    move: frame_pb2.SessionMove
    deadline_ns: int
    """Of the session, on this process's monotonic clock."""


@dataclass(frozen=True, slots=True)
class MoveDone:
    """A session was handed over; for metrics and traces of the agent that led the move."""

    model: str
    move: frame_pb2.SessionMove
    """With the opening."""
    tokens: int
    """That were cached."""
    rounds: int
    started_ns: int
    held_ns: int
    ended_ns: int

    @property
    def mode(self) -> str:
        """What travelled."""
        return "tokens" if self.move.by_tokens else "kv"


@dataclass(frozen=True, slots=True)
class StepDone:
    """One step, for the metrics."""

    model: str
    decode_rows: int
    prefill_tokens: int
    duration_ns: int


@dataclass(slots=True)
class LoopOutput:
    """What came out of the ring since it was last asked."""

    rows: list[RowsOut] = field(default_factory=list)
    tokens: list[TokenOut] = field(default_factory=list)
    caches: list[CacheOut] = field(default_factory=list)
    moves: list[MoveOut] = field(default_factory=list)
    messages: list[OutgoingMessage] = field(default_factory=list)
    """To the scheduler."""
    gone: list[int] = field(default_factory=list)
    """Sessions that hold nothing here any more, or never did."""
    ended: list[Session] = field(default_factory=list)
    """Those of them that were open here."""
    opened: list[SessionSpec] = field(default_factory=list)
    """Sessions that move from here to here, which no frame has told of."""
    outcomes: list[tuple[str, str]] = field(default_factory=list)
    """Model, and "OK" or the reason of a failure, of sessions that came to an end here."""
    steps: list[StepDone] = field(default_factory=list)
    handed_over: list[tuple[str, int]] = field(default_factory=list)
    """Model, and nanoseconds since the first token was sent, of sessions that go on here."""
    moved: list[MoveDone] = field(default_factory=list)
    moves_failed: list[tuple[str, str]] = field(default_factory=list)
    """Model and reason, of moves that were led from here."""
    taken_over: list[tuple[str, str, int]] = field(default_factory=list)
    """Model, mode, and nanoseconds since the other ring stopped, of sessions that moved here."""
    consumed_bytes: int = 0
    """Of arrived rows that are no longer held."""
    consumed: list[ReceivedFrame] = field(default_factory=list)
    """To be released."""

    def __bool__(self) -> bool:
        outward = self.rows or self.tokens or self.caches or self.moves or self.messages
        inward = self.gone or self.opened or self.steps or self.consumed
        counted = self.handed_over or self.taken_over or self.moved or self.moves_failed
        return bool(outward or inward or counted) or self.consumed_bytes > 0
