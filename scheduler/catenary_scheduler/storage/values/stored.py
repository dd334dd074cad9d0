"""The contents of every table: one struct for each kind of record.

`codec` has the rules by which they may grow: fields are added with a default, never renamed, never
given another meaning. Bounds are part of the type, so that a well-formed value can still be refused
as nonsense.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple

from msgspec import UNSET, Meta, Struct, UnsetType

from catenary_scheduler.planning import Placement
from catenary_services.domain.ids import AgentId, PartitionKey, ServerId
from catenary_services.domain.packing import PackingGoal
from catenary_services.domain.plan import ChainHop

Name = Annotated[str, Meta(min_length=1, max_length=512)]
Text = Annotated[str, Meta(max_length=65_536)]
Count = Annotated[int, Meta(ge=0, lt=1 << 31)]
Size = Annotated[int, Meta(ge=0, lt=1 << 62)]
"""A number of bytes, or an identifier, of at most 62 bits."""
Moment = Annotated[int, Meta(gt=-(1 << 62), lt=1 << 62)]
"""Nanoseconds on the writer's clock; negative ones occur if that clock started late."""
Span = Annotated[int, Meta(ge=0, le=86_400_000_000_000)]
"""A duration in nanoseconds, of a day at most."""
Share = Annotated[float, Meta(ge=0, lt=1e18)]
"""A finite number of at least 0."""
Finite = Annotated[float, Meta(gt=-1e30, lt=1e30)]


# ---- deployments ----


class DeploymentSpec(Struct, frozen=True):
    """Options of a deployment; 0 or None leave them to the model."""

    slo_ns: Span = 0
    max_batch: Count = 0
    partitions: Annotated[int, Meta(ge=1, lt=1 << 31)] | None = None
    packing: PackingGoal | None = None
    undeployed_s: Annotated[float, Meta(ge=0, lt=1 << 40)] = 0.0
    """Moment at which the model was undeployed, in seconds since 1970; 0 while it is deployed."""


# ---- plan ----


class _StoredStage(Struct, frozen=True):
    blocks: list[Count]
    agents: list[Name]


class _StoredPipeline(Struct, frozen=True, omit_defaults=True):
    batch: Count
    partitions: list[_StoredStage]
    shared: bool | UnsetType = UNSET


class _StoredHop(Struct, frozen=True, omit_defaults=True):
    agent: Name
    blocks: list[Count]
    entry: Count | UnsetType = UNSET


class _StoredChain(Struct, frozen=True, omit_defaults=True):
    capacity: Count
    hops: list[_StoredHop]
    role: Name | UnsetType = UNSET
    cache_tokens: Size | UnsetType = UNSET


class _StoredHost(Struct, frozen=True, omit_defaults=True):
    agent: Name
    blocks: list[Count]
    block_slots: Count
    cache_tokens: Size | UnsetType = UNSET


class _StoredModel(Struct, frozen=True, omit_defaults=True):
    name: Name
    version: Name | UnsetType = UNSET
    slo_ms: Share | UnsetType = UNSET
    float16_boundaries: bool | UnsetType = UNSET
    pipelines: list[_StoredPipeline] | UnsetType = UNSET
    chains: list[_StoredChain] | UnsetType = UNSET
    hosts: list[_StoredHost] | UnsetType = UNSET
    session_tokens: Count | UnsetType = UNSET
    packing: PackingGoal | UnsetType = UNSET
    time_to_first_token_slo_ms: Share | UnsetType = UNSET
    time_per_output_token_slo_ms: Share | UnsetType = UNSET


class StoredPlacement(Struct, frozen=True):
    """The fields of a placement document that this version knows, for `parse_placement`."""

    models: list[_StoredModel]


class StoredFigure(Struct, frozen=True, array_like=True):
    """One number of one model."""

    name: Name
    version: Name
    value: Finite


class StoredProvenance(Struct, frozen=True):
    """Record of how a plan was made."""

    planner: Text
    cause: Text
    fallback: Text = ""
    lines: tuple[Text, ...] = ()
    remarks: tuple[Text, ...] = ()
    shares: tuple[StoredFigure, ...] = ()
    throughput_rps: tuple[StoredFigure, ...] = ()
    chain_lines: tuple[Text, ...] = ()
    latency_ns: tuple[StoredFigure, ...] = ()
    binding: tuple[Text, ...] = ()
    idle: tuple[Text, ...] = ()


class StoredDowntime(Struct, frozen=True, array_like=True):
    """Duration for which a model was not dispatched."""

    model: tuple[Name, Name]
    duration_ns: Size


class StoredRollout(Struct, frozen=True):
    """The latest change of plan."""

    from_plan: Text
    to_plan: Text
    phase: Name
    cause: Text = ""
    problem: Text = ""
    duration_ns: Size = 0
    downtime_ns: tuple[StoredDowntime, ...] = ()


class _StoredSums(Struct, frozen=True):
    prior: Annotated[list[Finite], Meta(min_length=5, max_length=5)]
    history: Annotated[list[Finite], Meta(min_length=5, max_length=5)]


class StoredScaling(Struct, frozen=True):
    """Learned figures of how many workers a model needs."""

    line: _StoredSums
    cold_start_ns: Span


# ---- measured ----


class StoredGeneration(Struct, frozen=True, array_like=True):
    """The cost of text generation in a range of decoder blocks.

    The last numbers were added later.
    """

    prefill_ns: Share
    prefill_token_ns: Share
    decode_ns: Share
    decode_session_ns: Share
    decode_context_token_ns: Share = 0.0
    decode_lone_ns: Share = 0.0
    prefill_floor_ns: Share = 0.0
    prefill_chunk_tokens: Share = 0.0


@dataclass(frozen=True, slots=True)
class StoredCost:
    """The cost of text generation when measured at load, and the present one if it differs."""

    at_load: StoredGeneration
    by_now: StoredGeneration | None = None


StoredTimes = Annotated[list[Span], Meta(min_length=1, max_length=1024)]
"""Compute nanoseconds at batch 1, 2, .."""


@dataclass(frozen=True, slots=True)
class StoredComputeTimes:
    """Compute times when measured at load, and the present ones if they differ."""

    at_load: list[int]
    by_now: list[int] | None = None


StoredRate = Annotated[list[Annotated[int, Meta(ge=1, lt=1 << 50)]], Meta(min_length=1)]
"""Bytes per second, the only number of its line."""


class StoredServerLink(Struct, frozen=True):
    """The link from one server to another, as it was measured."""

    round_trip_ns: Annotated[int, Meta(ge=1, lt=1 << 50)]
    bytes_per_second: Annotated[int, Meta(ge=1, lt=1 << 50)]
    measured_unix_s: Annotated[int, Meta(ge=0, lt=1 << 40)]
    addresses: Text = ""


Identifier = Annotated[int, Meta(ge=0)]
"""The number of a batch, a session or a process start. The bounds of a type end at 2^63, so readers
check that it is below 2^64 themselves."""
Identifiers = Annotated[list[Identifier], Meta(min_length=1)]
"""An identifier, followed by whatever later versions add to the line."""


# ---- for people ----


class StoredAgent(Struct, frozen=True):
    """An agent, for dashboards; the next leader reads only which agents there were, and where."""

    server: Text
    device: Text = ""
    device_class: Text = ""
    memory_bytes: Size = 0
    link_bytes_per_second: Size = 0
    virtual_level: Count = 1
    device_id: Text = ""
    incarnation: Annotated[int, Meta(ge=0)] = 0
    state: Literal["joining", "ready", "draining", "lost"] | Name = "lost"
    partitions: list[Name] = []


class StoredBatchHop(Struct, frozen=True, array_like=True):
    """A hop of a batch, with its booked computation on the clock of the writer."""

    agent: Name
    partition: Name
    start_ns: Moment
    duration_ns: Size


class StoredBatchSlice(Struct, frozen=True, array_like=True):
    """The rows of a batch that belong to one request."""

    request: Name
    request_row: Count
    rows: Count
    batch_row: Count


class StoredBatch(Struct, frozen=True):
    """A batch in flight, written for people only: agents report what they hold."""

    rows: Count
    expected_finish_ns: Moment
    path: list[StoredBatchHop] = []
    slices: list[StoredBatchSlice] = []


# ---- sessions and book ----


class StoredSessionHop(Struct, frozen=True, array_like=True):
    """Blocks `[first_block, last_block)` of a session, on a partition of an agent."""

    agent: Name
    partition: Name
    first_block: Count
    last_block: Count


class StoredSession(Struct, frozen=True):
    """A session in flight."""

    hops: list[StoredSessionHop]
    request: Text = ""
    chain: Text = ""


class StoredReservation(Struct, frozen=True, array_like=True):
    """One reservation, on the clock of its writer."""

    start_ns: Moment
    end_ns: Moment
    expires_ns: Moment
    done: Annotated[int, Meta(ge=0, le=1)] = 0
    slots: Count = 0


class StoredOwner(Struct, frozen=True, array_like=True):
    """The owner of a reservation: a batch and its hop's position; of a cache a session and 0."""

    number: Identifier
    position: Annotated[int, Meta(ge=0, lt=1 << 16)]


class StoredClock(Struct, frozen=True, array_like=True):
    """The same moment on the clock of the last writer, and on that of Redis."""

    scheduler_ns: Moment
    redis_us: Annotated[int, Meta(ge=0, lt=1 << 62)]


# ---- all of it ----


@dataclass(frozen=True, slots=True)
class StoredPlan:
    """The table of plans; a field has its default if it is absent."""

    file: str = ""
    fixed: Placement | None = None
    fixed_before: Placement | None = None
    active: Placement | None = None
    active_id: str = ""
    notes: StoredProvenance | None = None
    last_switch: StoredRollout | None = None
    scaling: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    lost: frozenset[str] = frozenset()
    """Names of the fields that were there and could not be read."""


Place = tuple[AgentId, PartitionKey]
Link = tuple[AgentId, AgentId]
Measurement = StoredComputeTimes | StoredCost | StoredServerLink | int
"""A value of the table of measurements; a number is the rate of caches on a link."""
Hops = tuple[ChainHop, ...]


class ServerLink(NamedTuple):
    """The link from one server to another."""

    source: ServerId
    target: ServerId


@dataclass(frozen=True, slots=True)
class StoredMeasurements:
    """The table of measurements, sorted by kind."""

    times: Mapping[Place, StoredComputeTimes] = field(default_factory=dict)
    costs: Mapping[Place, StoredCost] = field(default_factory=dict)
    links: Mapping[Link, int] = field(default_factory=dict)
    server_links: Mapping[ServerLink, StoredServerLink] = field(default_factory=dict)
