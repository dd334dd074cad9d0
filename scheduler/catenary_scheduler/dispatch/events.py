"""What a dispatcher is told (events, in the past) and what it asks for (commands).

All times are nanoseconds on the scheduler's monotonic clock. The service feeds these from gRPC and
a real clock, a simulator from an event heap and a virtual one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

from catenary_services.domain.ids import (
    AgentId,
    BatchId,
    ModelKey,
    Nanoseconds,
    PartitionKey,
    RequestId,
    SessionId,
)
from catenary_services.domain.latency import LatencyLines, TokenObjectives
from catenary_services.domain.plan import Agent, ChainHop, Plan


@dataclass(frozen=True, slots=True)
class RequestArrived:
    """Rows that want to be scheduled before a deadline."""

    request: RequestId
    model: ModelKey
    rows: int
    deadline_ns: Nanoseconds
    priority: int = 0
    in_flight: tuple[AdoptedRows, ...] = ()
    """Rows a previous scheduler already dispatched; only the others are scheduled."""


@dataclass(frozen=True, slots=True)
class AdoptedRows:
    """Rows of a request on their way in a batch this dispatcher did not send."""

    batch: BatchId
    request_row: int
    rows: int
    expected_ns: Nanoseconds


@dataclass(frozen=True, slots=True)
class RequestCancelled:
    """The client went away, or its deadline passed at the gateway."""

    request: RequestId


@dataclass(frozen=True, slots=True)
class RequestCompleted:
    """The gateway has every row, or every token."""

    request: RequestId
    progress: SessionProgress | None = None
    """Of a request that generated text."""


@dataclass(frozen=True, slots=True)
class StageReported:
    """One hop of one batch is done, and this is when it really ran."""

    batch: BatchId
    position: int
    compute_start_ns: Nanoseconds
    compute_end_ns: Nanoseconds
    transfer_start_ns: Nanoseconds | None = None
    transfer_end_ns: Nanoseconds | None = None


@dataclass(frozen=True, slots=True)
class BatchFailed:
    """A batch came to an end without a result."""

    batch: BatchId
    agent: AgentId | None
    reason: str
    message: str
    retryable: bool


@dataclass(frozen=True, slots=True)
class SessionRequested:
    """A request that generates text wants a chain."""

    request: RequestId
    model: ModelKey
    prompt_tokens: int
    max_tokens: int
    """Most tokens it may generate."""
    deadline_ns: Nanoseconds
    priority: int = 0
    in_flight: AdoptedSession | None = None
    """The session a previous scheduler started for it, if it still goes on."""
    arrived_ns: Nanoseconds | None = None
    """When the gateway got it; None: now."""
    objectives: TokenObjectives | None = None
    """What it is held to; None: the model's, if it has any."""
    progress: SessionProgress | None = None
    """What it generated under a previous scheduler."""


@dataclass(frozen=True, slots=True)
class SessionProgress:
    """How far a session is, as its client sees it."""

    request: RequestId
    generated_tokens: int
    first_token_ns: Nanoseconds
    """From the request's arrival to its first token."""
    decode_ns: Nanoseconds
    """From its first token to the latest one."""


@dataclass(frozen=True, slots=True)
class SessionsProgressed:
    """These sessions got tokens."""

    sessions: tuple[SessionProgress, ...]


@dataclass(frozen=True, slots=True)
class LatencyRefitted:
    """The latency lines of chains, fitted anew."""

    model: ModelKey
    lines: tuple[tuple[tuple[ChainHop, ...], LatencyLines], ...]


@dataclass(frozen=True, slots=True)
class AdoptedSession:
    """A session this dispatcher did not start."""

    session: SessionId
    hops: tuple[ChainHop, ...]


@dataclass(frozen=True, slots=True)
class SessionsClosed:
    """An agent holds nothing of these sessions any more: their slots there are free."""

    agent: AgentId
    sessions: tuple[SessionId, ...]


@dataclass(frozen=True, slots=True)
class SessionsHeld:
    """An agent said hello: it holds these sessions and no others. Comes before `AgentJoined`."""

    agent: AgentId
    sessions: tuple[AdoptedSession, ...]


@dataclass(frozen=True, slots=True)
class SessionsFound:
    """An agent that is there holds these sessions, too; each hop says with how many slots."""

    agent: AgentId
    sessions: tuple[AdoptedSession, ...]


@dataclass(frozen=True, slots=True)
class SessionFailed:
    """An agent or a link failed a session; the request goes on elsewhere if that may help."""

    session: SessionId
    agent: AgentId | None
    """Who is to blame: it failed, or could not be reached; None: the gateway found no way in."""
    reason: str
    message: str
    retryable: bool
    told_by: AgentId | None = None
    """The agent that says so; None: a gateway, or this scheduler."""


MoveMode = Literal["kv", "tokens"]
"""What travels when a session moves: its caches, or its tokens to compute them again."""


@dataclass(frozen=True, slots=True)
class MoveRequested:
    """A session that generates should go on, on another chain, without a pause of its stream.

    It is begun if the session runs, is not moving, and the chain has room; else nothing happens but
    a count.
    """

    session: SessionId
    chain_id: str = ""
    """Where to; empty: wherever is best."""
    mode: MoveMode | None = "kv"
    """None: whatever is faster."""


@dataclass(frozen=True, slots=True)
class SessionMoved:
    """A session was handed over: the one it became generates, the one it was is over."""

    session: SessionId
    """What it became."""
    moved: SessionId
    """What it was."""


@dataclass(frozen=True, slots=True)
class MoveCostsMeasured:
    """What moves cost is known, or known better than before."""

    links: tuple[tuple[AgentId, AgentId, int], ...] = ()
    """Caches travel from the first agent to the second with so many bytes per second."""
    cache_bytes: tuple[tuple[ModelKey, int], ...] = ()
    """Key and value of one token of a model take so many bytes in one block, as agents send them of
    which nobody knows how they hold it."""
    held_bytes: tuple[tuple[ModelKey, str, int], ...] = ()
    """The same, of agents with a runtime."""


@dataclass(frozen=True, slots=True)
class CachesReported:
    """An agent says how much it has cached for a partition."""

    agent: AgentId
    partition: PartitionKey
    block_tokens: int
    """Tokens, each counted once per block, in whole cache blocks."""


@dataclass(frozen=True, slots=True)
class AgentJoined:
    """An agent is there, and said what it holds; what it can be given, its availability says."""

    agent: Agent


@dataclass(frozen=True, slots=True)
class AgentLost:
    """An agent is gone; what it held is gone with it."""

    agent: AgentId


@dataclass(frozen=True, slots=True)
class PlanActivated:
    """Dispatch by this plan from now on, as far as its partitions are loaded."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed; `next_wakeup` was reached."""


Event = (
    RequestArrived
    | RequestCancelled
    | RequestCompleted
    | StageReported
    | BatchFailed
    | SessionRequested
    | SessionsClosed
    | SessionsHeld
    | SessionsFound
    | SessionFailed
    | SessionsProgressed
    | LatencyRefitted
    | MoveRequested
    | SessionMoved
    | MoveCostsMeasured
    | CachesReported
    | AgentJoined
    | AgentLost
    | PlanActivated
    | Tick
)


@dataclass(frozen=True, slots=True)
class BatchSlice:
    """Rows `[request_row, request_row + rows)` of a request at `batch_row` of a batch."""

    request: RequestId
    request_row: int
    rows: int
    batch_row: int


@dataclass(frozen=True, slots=True)
class PlannedHop:
    """One hop of a dispatched batch and what is reserved for it."""

    agent: AgentId
    partition: PartitionKey
    start_ns: Nanoseconds
    duration_ns: Nanoseconds
    transfer_start_ns: Nanoseconds = 0
    transfer_ns: Nanoseconds = 0
    """Of the transfer into it, on the links of both servers; 0 if nothing is booked."""


@dataclass(frozen=True, slots=True)
class DispatchBatch:
    """Send these rows down this path."""

    batch: BatchId
    rows: int
    slices: tuple[BatchSlice, ...]
    path: tuple[PlannedHop, ...]
    expected_finish_ns: Nanoseconds


@dataclass(frozen=True, slots=True)
class Reject:
    """Answer this request with an error; `reason` is one of `catenary_services.errors`."""

    request: RequestId
    reason: str
    message: str
    retry_after_ns: Nanoseconds | None = None
    earliest_finish_ns: Nanoseconds | None = None
    details: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CancelBatch:
    """These agents may forget this batch."""

    batch: BatchId
    agents: tuple[AgentId, ...]


@dataclass(frozen=True, slots=True)
class StartSession:
    """Open a session for this request on this chain; one it had before is over, unless it moves."""

    session: SessionId
    request: RequestId
    chain_id: str
    hops: tuple[ChainHop, ...]
    decode_hops: tuple[ChainHop, ...] = ()
    """Split phase: the chain that generates once `hops` have run the prompt."""
    objectives: TokenObjectives | None = None
    """What it is held to."""
    predicted_first_token_ns: Nanoseconds = 0
    """From its arrival; 0 if nothing is known."""
    predicted_per_token_ns: Nanoseconds = 0
    moves: SessionId | None = None
    """The session that generates for the request now, and goes on until this one has taken over."""
    move_mode: MoveMode = "kv"


@dataclass(frozen=True, slots=True)
class CloseSessions:
    """This agent must free the slots of these sessions, and say so."""

    agent: AgentId
    sessions: tuple[SessionId, ...]


@dataclass(frozen=True, slots=True)
class Scale:
    """A model should have so many workers (chains)."""

    model: ModelKey
    workers: int
    reason: str


Command = DispatchBatch | Reject | CancelBatch | StartSession | CloseSessions | Scale


class Dispatcher(Protocol):
    """All decisions of one kind of plan, without I/O."""

    def handle(self, event: Event, now: Nanoseconds) -> list[Command]:
        """Folds one event into the state and returns what is to be done."""
        ...

    def next_wakeup(self) -> Nanoseconds | None:
        """When to send a `Tick` at the latest; None if nothing waits for time to pass."""
        ...
