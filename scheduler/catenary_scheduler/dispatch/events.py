"""The inputs of a dispatcher (events, in the past tense) and its outputs (commands).

All times are nanoseconds on the scheduler's monotonic clock. The service feeds these from gRPC and
a real clock, a simulator from an event heap and a virtual one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

from catenary_scheduler.dispatch.text_lengths import TextLengths
from catenary_services.domain.ids import (
    AgentId,
    BatchId,
    GatewayId,
    ModelKey,
    Nanoseconds,
    PartitionKey,
    RequestId,
    SessionId,
)
from catenary_services.domain.latency import LatencyLines, TokenObjectives
from catenary_services.domain.plan import Agent, ChainHop, Plan
from catenary_services.domain.windows.window import WindowHop

NO_BATCH = BatchId(0)
"""The id that stands for no batch, as no real one has it."""


@dataclass(frozen=True, slots=True)
class RequestArrived:
    """A request with rows to be computed before a deadline."""

    request: RequestId
    model: ModelKey
    rows: int
    deadline_ns: Nanoseconds
    priority: int = 0
    in_flight: tuple[AdoptedRows, ...] = ()
    """Rows that an earlier scheduler already dispatched; only the others are scheduled."""
    texts: TextLengths | None = None
    """Lengths of the rows, if batches of the model are counted in units of tokens."""
    takes_windows: bool = False
    """True if its gateway can dispatch by windows."""

    @property
    def full_rows(self) -> float:
        """Rows that cost as much as these; of texts, the number of texts of full length."""
        return self.rows if self.texts is None else self.texts.full_texts


@dataclass(frozen=True, slots=True)
class AdoptedRows:
    """Rows of a request that are in flight in a batch this dispatcher did not send."""

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
    """The gateway has every row, or every token, of a request."""

    request: RequestId
    progress: SessionProgress | None = None
    """Final progress of a request that generated text; else None."""
    prefix_hashes: tuple[int, ...] = ()
    """The numbers of the blocks of its text behind those of `SessionRequested`."""


@dataclass(frozen=True, slots=True)
class StageReported:
    """One hop of one batch was computed; the times are the real ones."""

    batch: BatchId
    position: int
    compute_start_ns: Nanoseconds
    compute_end_ns: Nanoseconds
    transfer_start_ns: Nanoseconds | None = None
    transfer_end_ns: Nanoseconds | None = None
    rows: int = 0
    """Rows of the batch; 0 if that was not said."""


@dataclass(frozen=True, slots=True)
class StageStarted:
    """A transfer or a computation of a batch began at another moment than booked."""

    batch: BatchId
    position: int
    start_ns: Nanoseconds
    is_transfer: bool
    """True for the transfer into the hop, False for its computation."""


@dataclass(frozen=True, slots=True)
class WindowReported:
    """A gateway has sent batches by a dispatch window, and goes on or ends it."""

    gateway: GatewayId
    model: ModelKey
    window: BatchId
    number: int
    """Number of the report, which an extension answers."""
    first_batch: BatchId
    rows: tuple[int, ...]
    """Rows of the batches `first_batch` and following."""
    requests: int
    renew: bool
    """True if more time is wanted; False if nothing more will be sent."""
    busy_ns: tuple[Nanoseconds, ...] = ()
    """Time that every hop has yet to work, if nothing more will be sent."""

    @property
    def full_rows(self) -> float:
        """Rows that were sent; windows are for models whose batches are counted in rows."""
        return sum(self.rows)


@dataclass(frozen=True, slots=True)
class BatchFailed:
    """A batch ended without a result."""

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
    """The most tokens that it may generate."""
    deadline_ns: Nanoseconds
    priority: int = 0
    in_flight: AdoptedSession | None = None
    """The session that an earlier scheduler started for it, if that goes on."""
    arrived_ns: Nanoseconds | None = None
    """Moment at which the gateway got it; None: now."""
    objectives: TokenObjectives | None = None
    """Objectives that it is held to; None: the model's, if it has any."""
    progress: SessionProgress | None = None
    """Progress that it made under an earlier scheduler."""
    prefix_hashes: tuple[int, ...] = ()
    """One number for each whole block of its prompt, of all tokens up to the block's end."""


@dataclass(frozen=True, slots=True)
class SessionProgress:
    """Progress of a session as its client sees it."""

    request: RequestId
    generated_tokens: int
    first_token_ns: Nanoseconds
    """Time from the request's arrival to its first token."""
    decode_ns: Nanoseconds
    """Time from its first token to its latest one."""
    cached_tokens: int = 0
    """Tokens that its chain had cached when it began there, and did not compute."""


@dataclass(frozen=True, slots=True)
class SessionsProgressed:
    """Sessions generated tokens since they were last reported."""

    sessions: tuple[SessionProgress, ...]


@dataclass(frozen=True, slots=True)
class LatencyRefitted:
    """The latency lines of chains were fitted anew."""

    model: ModelKey
    lines: tuple[tuple[tuple[ChainHop, ...], LatencyLines], ...]


@dataclass(frozen=True, slots=True)
class AdoptedSession:
    """A session that this dispatcher did not start."""

    session: SessionId
    hops: tuple[ChainHop, ...]


@dataclass(frozen=True, slots=True)
class SessionsClosed:
    """An agent holds nothing of these sessions any more: their slots there are free."""

    agent: AgentId
    sessions: tuple[SessionId, ...]


@dataclass(frozen=True, slots=True)
class SessionsHeld:
    """A connecting agent holds these sessions and no others; comes before `AgentJoined`."""

    agent: AgentId
    sessions: tuple[AdoptedSession, ...]


@dataclass(frozen=True, slots=True)
class SessionsFound:
    """A connected agent holds these sessions too; each hop says with how many slots."""

    agent: AgentId
    sessions: tuple[AdoptedSession, ...]


@dataclass(frozen=True, slots=True)
class SessionFailed:
    """An agent or a link failed a session; the request is started elsewhere if that may help."""

    session: SessionId
    agent: AgentId | None
    """The agent to blame: it failed, or could not be reached. None: the gateway found no way in."""
    reason: str
    message: str
    retryable: bool
    told_by: AgentId | None = None
    """The agent that reports it; None: a gateway, or this scheduler."""


MoveMode = Literal["kv", "tokens"]
"""The data that travel when a session moves: its caches, or its tokens to compute them again."""


@dataclass(frozen=True, slots=True)
class MoveRequested:
    """A session that generates should continue on another chain, without a pause of its stream.

    The move begins if the session runs, is not moving, and the chain has room; otherwise it is only
    counted as refused.
    """

    session: SessionId
    chain_id: str = ""
    """The chain to move to; empty: the best one."""
    mode: MoveMode | None = "kv"
    """The data that travel; None: whatever is faster."""


@dataclass(frozen=True, slots=True)
class SessionMoved:
    """A session was handed over: its successor generates, and it is over."""

    session: SessionId
    """The successor, which generates now."""
    moved: SessionId
    """The session that is over."""
    cached_tokens: int = 0
    """Tokens of prompt and answer that were cached at the hand-over, when one more was known; 0 if
    nobody said."""


@dataclass(frozen=True, slots=True)
class MoveCostsMeasured:
    """The costs of moves became known, or better known."""

    links: tuple[tuple[AgentId, AgentId, int], ...] = ()
    """Rates of links: sender, receiver, bytes of caches per second."""
    cache_bytes: tuple[tuple[ModelKey, int], ...] = ()
    """Bytes of key and value of one token in one block, by model, for agents whose runtime is
    unknown."""
    held_bytes: tuple[tuple[ModelKey, str, int], ...] = ()
    """The same by model and runtime, for agents that report one."""


@dataclass(frozen=True, slots=True)
class CachesReported:
    """The amount that an agent has cached for a partition."""

    agent: AgentId
    partition: PartitionKey
    block_tokens: int
    """Cached tokens in whole cache blocks, each counted once per decoder block."""


@dataclass(frozen=True, slots=True)
class AgentJoined:
    """An agent connected and has said what it holds; its availability says what it can be given.

    It comes again for a connected agent whose network card turned out to be faster or slower.
    """

    agent: Agent


@dataclass(frozen=True, slots=True)
class AgentLost:
    """An agent is gone, and all it held with it."""

    agent: AgentId


@dataclass(frozen=True, slots=True)
class PlanActivated:
    """A plan to dispatch by from now on, as far as its partitions are loaded."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class Tick:
    """The moment of `next_wakeup` has come."""


Event = (
    RequestArrived
    | RequestCancelled
    | RequestCompleted
    | StageReported
    | StageStarted
    | WindowReported
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


# These three are not frozen, as `StartSession` is not: they are made in each decision.
@dataclass(slots=True)
class BatchSlice:
    """Rows `[request_row, request_row + rows)` of a request at `batch_row` of a batch."""

    request: RequestId
    request_row: int
    rows: int
    batch_row: int


@dataclass(slots=True)
class PlannedHop:
    """One hop of a dispatched batch and what is reserved for it."""

    agent: AgentId
    partition: PartitionKey
    start_ns: Nanoseconds
    duration_ns: Nanoseconds
    transfer_start_ns: Nanoseconds = 0
    transfer_ns: Nanoseconds = 0
    """Duration of the transfer into this hop, on the links of both servers; 0 if nothing is
    booked."""
    steps_ns: Nanoseconds = 0
    """Part of `duration_ns` that is booked for steps of language models on the same device."""
    earliest_ns: Nanoseconds = 0
    """Moment from which the device may start the batch: nothing else is booked on it between this
    and `start_ns`. 0: at once."""
    behind: BatchId = NO_BATCH
    """The batch whose booked end that is. Once the device has computed it, it need not wait."""
    transfer_earliest_ns: Nanoseconds = 0
    """The same for the transfer, on both links."""


@dataclass(slots=True)
class DispatchBatch:
    """Order to send these rows down this path."""

    batch: BatchId
    rows: int
    slices: tuple[BatchSlice, ...]
    path: tuple[PlannedHop, ...]
    expected_finish_ns: Nanoseconds
    units: int = 0
    """Size of the batch if batches of the model are counted in units of tokens; 0: its rows."""

    @property
    def size(self) -> int:
        """Size of the batch as times of batches count it: units, or else rows."""
        return self.units or self.rows


@dataclass(frozen=True, slots=True)
class GrantWindow:
    """Permission for a gateway to dispatch by itself on a path for a while."""

    window: BatchId
    request: RequestId
    """The request of the gateway that it was granted with."""
    model: ModelKey
    hops: tuple[WindowHop, ...]
    """The path, with moments on the scheduler's clock."""
    first_batch: BatchId
    batches: int
    most_wait_ns: Nanoseconds
    """A batch that would wait longer for the path is not sent by the window."""

    @property
    def gateway(self) -> GatewayId:
        return self.request.gateway

    def has(self, batch: BatchId) -> bool:
        """Returns whether a batch is sent by this window."""
        return self.first_batch <= batch < self.first_batch + self.batches

    def whole(self) -> DispatchBatch:
        """Returns the window in the form of a batch that takes all its time."""
        path = [
            PlannedHop(hop.agent, hop.partition, hop.start_ns, hop.end_ns - hop.start_ns)
            for hop in self.hops
        ]
        return self._batch(self.window, len(self.hops[0].compute_ns), path, self.hops[-1].end_ns)

    def sent(self, batch: BatchId, rows: int, start: Nanoseconds) -> DispatchBatch:
        """Returns one of its batches as it would have been dispatched to start at a moment."""
        path = []
        for hop in self.hops:
            transfer = hop.transfer_ns[rows - 1] if hop.transfer_ns else 0
            compute = hop.compute_ns[rows - 1]
            at = start + transfer
            path.append(PlannedHop(hop.agent, hop.partition, at, compute, start, transfer))
            start = at + compute
        return self._batch(batch, rows, path, start)

    def _batch(
        self, batch: BatchId, rows: int, path: list[PlannedHop], end: Nanoseconds
    ) -> DispatchBatch:
        # The gateway alone knows the requests; their number stands for none.
        nobody = RequestId(self.request.gateway, 0)
        return DispatchBatch(batch, rows, (BatchSlice(nobody, 0, rows, 0),), tuple(path), end)


@dataclass(frozen=True, slots=True)
class ExtendWindow:
    """The grant of more time for a dispatch window, up to a new end on every hop."""

    window: BatchId
    gateway: GatewayId
    number: int
    """Number of the report that asked for it."""
    ends_ns: tuple[Nanoseconds, ...]
    """New end of the time on every hop."""


@dataclass(frozen=True, slots=True)
class RevokeWindow:
    """The order to a gateway to send nothing more by a dispatch window."""

    window: BatchId
    gateway: GatewayId
    lost: bool
    """True if batches of it without an answer will bring none."""


@dataclass(frozen=True, slots=True)
class WindowOver:
    """Notice that nothing of a window is booked any more."""

    window: BatchId


@dataclass(frozen=True, slots=True)
class Reject:
    """Order to answer a request with an error; `reason` is one of `catenary_services.errors`."""

    request: RequestId
    reason: str
    message: str
    retry_after_ns: Nanoseconds | None = None
    earliest_finish_ns: Nanoseconds | None = None
    details: dict[str, str] = field(default_factory=dict)
    cause: int = field(default=0, compare=False)
    """Number of the event for which it is given; 0: not known."""


@dataclass(frozen=True, slots=True)
class CancelBatch:
    """Permission for these agents to forget a batch."""

    batch: BatchId
    agents: tuple[AgentId, ...]


# Not frozen, as one is made in each decision: a frozen dataclass takes a call for each field.
@dataclass(slots=True)
class StartSession:
    """Order to open a session for a request on a chain.

    An earlier session of the request is over, unless it `moves`.
    """

    session: SessionId
    request: RequestId
    chain_id: str
    hops: tuple[ChainHop, ...]
    decode_hops: tuple[ChainHop, ...] = ()
    """The chain that generates once `hops` have run the prompt (split phase); else empty."""
    objectives: TokenObjectives | None = None
    """The objectives that the session is held to."""
    predicted_first_token_ns: Nanoseconds = 0
    """Predicted time from arrival to the first token; 0 if nothing is known."""
    predicted_per_token_ns: Nanoseconds = 0
    moves: SessionId | None = None
    """The session that generates for the request now, and goes on until this one has taken over."""
    move_mode: MoveMode = "kv"
    cause: int = field(default=0, compare=False)
    """Number of the event for which it is given; 0: not known."""


@dataclass(frozen=True, slots=True)
class CloseSessions:
    """Order to an agent to free the slots of these sessions, and to confirm it."""

    agent: AgentId
    sessions: tuple[SessionId, ...]
    cause: int = field(default=0, compare=False)
    """Number of the event for which it is given; 0: not known."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Wish that a model should have this many workers (chains)."""

    model: ModelKey
    workers: int
    reason: str


Command = (
    DispatchBatch
    | GrantWindow
    | ExtendWindow
    | RevokeWindow
    | WindowOver
    | Reject
    | CancelBatch
    | StartSession
    | CloseSessions
    | Scale
)


def earlier(one: Nanoseconds | None, other: Nanoseconds | None) -> Nanoseconds | None:
    """Returns the earlier of two moments of which each may be None: never."""
    if one is None or (other is not None and other < one):
        return other
    return one


class Dispatcher(Protocol):
    """All decisions of one kind of plan, without I/O."""

    def handle(self, event: Event, now: Nanoseconds) -> list[Command]:
        """Folds one event into the state and returns the commands that follow."""
        ...

    def next_wakeup(self) -> Nanoseconds | None:
        """Returns when to send a `Tick` at the latest; None if nothing waits for time to pass."""
        ...
