"""Arguments and results of calls: plain frozen dataclasses, no protocol messages.

All of them can be turned into JSON with `as_json`, arrays excepted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from catenary.errors import CatenaryError
from catenary.tensors import Array

ParameterValue = bool | int | float | str


@dataclass(frozen=True, slots=True)
class InferRequest:
    """One inference request, for `infer_stream` or to be sent several times.

    Attributes:
        model: Name of the model.
        inputs: Its input tensors by name.
        version: Version of the model; empty for the server's choice.
        outputs: Names of the outputs wanted; None for all of them.
        slo_ms: Milliseconds from the request's arrival until the answer must be there.
        request_id: An id that the result repeats and `trace` knows; None draws one.
        priority: Higher goes first, where the server supports it.
        parameters: Further request parameters of the protocol.
    """

    model: str
    inputs: Mapping[str, Array]
    version: str = ""
    outputs: Sequence[str] | None = None
    slo_ms: float | None = None
    request_id: str | None = None
    priority: int | None = None
    parameters: Mapping[str, ParameterValue] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class InferResult:
    """The answer to one request.

    `result["name"]` is one output array, read-only because it is a view of the reply's bytes.

    Attributes:
        outputs: Output arrays by name.
        id: Id of the request.
        model: Model that answered.
        version: Its version.
        parameters: Parameters the server attached.
        error: Why there are no outputs. It is set only in a stream, elsewhere it is raised.
    """

    outputs: dict[str, Array]
    id: str
    model: str
    version: str
    parameters: dict[str, ParameterValue] = field(default_factory=dict)
    error: CatenaryError | None = None

    def __getitem__(self, name: str) -> Array:
        self.raise_if_failed()
        return self.outputs[name]

    def raise_if_failed(self) -> None:
        """Raises the error of this request, if it failed."""
        if self.error is not None:
            raise self.error


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """One model of the server's repository; `reason` says why it is not ready."""

    name: str
    version: str
    ready: bool
    state: str
    reason: str


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Name, datatype and shape of a tensor; -1 marks a dimension of any size."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """Inputs and outputs of a model."""

    name: str
    versions: tuple[str, ...]
    platform: str
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]


@dataclass(frozen=True, slots=True)
class AgentImpairment:
    """A reason to give an agent no work while others can do it.

    Attributes:
        kind: straggling, silent, suspected, draining, broken, quarantined, cannot_load, or severed
            (no frames get through between it and another agent).
        partition: The partition it concerns; empty for the whole agent.
        remaining_s: Seconds until it ends, or the agent is tried again; None if it does not by
            itself.
        why: An explanation in words.
    """

    kind: str
    partition: str
    remaining_s: float | None
    why: str


@dataclass(frozen=True, slots=True)
class FetchInfo:
    """The progress of an agent that fetches a model's files from its peers.

    Attributes:
        model: Name and version of the model.
        wanted_bytes: Bytes that were wanted since it began.
        fetched_bytes: Number of these that have come.
        bytes_per_second: Mean rate of the last seconds.
    """

    model: str
    wanted_bytes: int
    fetched_bytes: int
    bytes_per_second: int


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """The facts about an agent's device; 0 and empty where nobody says.

    Attributes:
        name: The device as its maker calls it.
        total_bytes: Memory of the GPU, or the part of the host's that the agent may use.
        free_bytes: The part of it that was free when the agent started.
        cores: Cores that the device has, if it is a processor.
        vector_instructions: Those instructions of a processor that compute libraries use.
        compute_capability: That of a GPU, such as "8.9".
        cuda: The newest CUDA version of the driver.
        driver: The release of the driver.
        uuid: The GPU's own number.
        pcie_generation: Generation of its PCIe link.
        pcie_width: Lanes of its PCIe link.
        power_limit_milliwatts: The most power it is allowed.
        mig_mode: "on", "off", or empty for a GPU that cannot be divided.
    """

    name: str
    total_bytes: int = 0
    free_bytes: int = 0
    cores: int = 0
    vector_instructions: tuple[str, ...] = ()
    compute_capability: str = ""
    cuda: str = ""
    driver: str = ""
    uuid: str = ""
    pcie_generation: int = 0
    pcie_width: int = 0
    power_limit_milliwatts: int = 0
    mig_mode: str = ""

    def __str__(self) -> str:
        parts = [self.name]
        if self.cores:
            parts.append(f"{self.cores} core{'s' if self.cores > 1 else ''}")
        parts.append(f"{self.total_bytes / 1e9:.1f} GB")
        if self.compute_capability:
            parts.append(f"compute capability {self.compute_capability}")
        if self.driver or self.cuda:
            cuda = f"CUDA {self.cuda}" if self.cuda else ""
            parts.append(" ".join(filter(None, ("driver", self.driver, cuda))))
        if self.pcie_generation and self.pcie_width:
            parts.append(f"PCIe {self.pcie_generation} x{self.pcie_width}")
        if self.power_limit_milliwatts:
            parts.append(f"{self.power_limit_milliwatts / 1e3:.0f} W")
        if self.mig_mode == "on":
            parts.append("MIG")
        return ", ".join([*parts, *self.vector_instructions])


@dataclass(frozen=True, slots=True)
class AgentInfo:
    """One agent and its state.

    Attributes:
        state: joining, ready, draining or lost.
        group: Its scheduler group.
        block_slots: Key-value caches it has room for, one session in one block each.
        used_block_slots: Number of these that are reserved.
        cached_block_tokens: Tokens in its caches, each counted once per block.
        most_block_tokens: Tokens there is room for, counted in the same way.
        slowdown_ratio: Recent ratio of its compute times to the booked ones; 0 if not known.
        batches: Number of batches that it has yet to compute.
        server_id: The machine it is on.
        used_memory_bytes: Memory of the partitions it has loaded.
        impairments: Reasons against giving it work, the most serious first.
        fetches: Models whose files it is fetching from its peers.
        address: The address, without a port, that its peers reach it at.
        device_facts: Facts about its device; None if it is emulated or the agent told none.
    """

    agent_id: str
    device: str
    device_class: str
    state: str
    partitions: tuple[str, ...]
    memory_bytes: int
    utilisation_ratio: float
    group: int = 0
    block_slots: int = 0
    used_block_slots: int = 0
    cached_block_tokens: int = 0
    most_block_tokens: int = 0
    slowdown_ratio: float = 0.0
    batches: int = 0
    server_id: str = ""
    used_memory_bytes: int = 0
    impairments: tuple[AgentImpairment, ...] = ()
    fetches: tuple[FetchInfo, ...] = ()
    address: str = ""
    device_facts: DeviceFacts | None = None


@dataclass(frozen=True, slots=True)
class LatencyInfo:
    """Fitted times of prompts and decode steps on a chain: a line each, in nanoseconds.

    A prompt of n tokens takes max(prefill_floor_ns, prefill_ns + n * prefill_token_ns), a step of b
    > 1 sessions with c tokens of context decode_ns + b * decode_session_ns + c *
    decode_context_token_ns, a step of one session decode_lone_ns.

    Attributes:
        prefill_error_ratio: Recent mean of |measured / predicted - 1| of prompts; -1 if nothing was
            measured.
        decode_error_ratio: Recent mean of |measured / predicted - 1| of decode steps; -1 if none
            was measured.
    """

    prefill_token_ns: float
    prefill_ns: float
    prefill_floor_ns: float
    decode_context_token_ns: float
    decode_session_ns: float
    decode_ns: float
    decode_lone_ns: float
    prefill_error_ratio: float
    decode_error_ratio: float


@dataclass(frozen=True, slots=True)
class ChainInfo:
    """One chain of agents that generates text.

    Attributes:
        chain_id: Its name within the plan.
        hops: Agent, first block and end of the blocks it processes, in order.
        capacity: The most concurrent sessions.
        sessions: Sessions it has now.
        service_ns: Expected time of a session of mean size.
        role: "mixed", or "prefill" or "decode" where chains of their own do these.
        lines: Times of prompts and decode steps on it; None if unknown.
        cache_tokens: The most tokens its caches hold; 0 if `capacity` whole sessions are the only
            limit.
        cached_tokens: Tokens of its sessions, as far as known.
    """

    chain_id: str
    hops: tuple[tuple[str, int, int], ...]
    capacity: int
    sessions: int
    service_ns: int
    role: str = "mixed"
    lines: LatencyInfo | None = None
    cache_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class OutcomeCounts:
    """Numbers of the requests that arrived lately at the gateway that answers, by their outcome.

    Attributes:
        seconds: How far back they are counted; 0 if the server does not say.
        good: Requests that were answered before their deadline and within their objectives.
        late: Requests that were accepted, and answered too late, not at all or with an error.
        refused: Requests that were turned away: no room, or nobody to serve them.
        client: Requests that failed because of their client; they count for no share.
    """

    seconds: int = 0
    good: int = 0
    late: int = 0
    refused: int = 0
    client: int = 0

    @property
    def arrived(self) -> int:
        """Number of requests that the platform had to answer."""
        return self.good + self.late + self.refused


@dataclass(frozen=True, slots=True)
class DeploymentInfo:
    """One deployed model as the scheduler sees it.

    Attributes:
        packing: Goal for which running sessions are moved: "pack", "balance" or "off".
        sessions_moving: Sessions on their way to another chain.
        outcomes: What became of its requests at the gateway that answers.
    """

    name: str
    version: str
    ready: bool
    reason: str
    pipelines: int
    queued_requests: int
    sessions: int = 0
    chains: tuple[ChainInfo, ...] = ()
    packing: str = ""
    sessions_moving: int = 0
    outcomes: OutcomeCounts = OutcomeCounts()


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """One scheduler group: the agents that one scheduler plans for.

    Attributes:
        scheduler_id: The scheduler that leads it; empty if none does at present.
        agents: Number of its agents that are ready.
    """

    group: int
    scheduler_id: str
    epoch: int
    plan_id: str
    agents: int
    queued_requests: int
    batches_in_flight: int
    sessions_in_flight: int
    redis_connected: bool


@dataclass(frozen=True, slots=True)
class ProcessVersion:
    """The version of the software that one process runs.

    Attributes:
        role: scheduler, gateway or agent.
        name: Name of the process.
        version: Version of the package; empty if the process is too old to say.
    """

    role: str
    name: str
    version: str


@dataclass(frozen=True, slots=True)
class LinkInfo:
    """The measured figures of the link from one machine to another.

    Attributes:
        source_server_id: The machine that sends.
        target_server_id: The machine that receives.
        round_trip_ns: Time of a small frame and its answer.
        bytes_per_second: Rate that large frames reached.
        age_ns: Time since it was measured.
    """

    source_server_id: str
    target_server_id: str
    round_trip_ns: int
    bytes_per_second: int
    age_ns: int


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """The cluster at one moment.

    Attributes:
        groups: Scheduler groups; empty unless the cluster is divided, and then the rest are sums.
        moves_done: Moves of running sessions to other chains since the scheduler leads.
        moves_failed: Moves that were begun and left the session where it was.
        versions: Software versions of the leader, and of the gateways and agents connected to it.
        redis_problem: Why `redis_connected` is false, in one line.
        audits: How often the book was compared with what agents hold and gateways wait for.
        leaks_mended: Differences found by audits (reserved and not held, or held and not reserved)
            that were put right.
        scheduler_problem: Why no scheduler answered, so that this is only what a gateway knows by
            itself; empty if one did.
        takeover_problems: What a new leader could not take over from Redis, and failures to lead.
        quarantined_records: Records in Redis that the leader could not read when it began.
        links: Links between machines that agents have measured, the slowest first.
    """

    scheduler_id: str
    epoch: int
    plan_id: str
    agents: tuple[AgentInfo, ...]
    models: tuple[DeploymentInfo, ...]
    gateways: tuple[str, ...]
    queued_requests: int
    batches_in_flight: int
    live_reservations: int
    redis_connected: bool
    sessions_in_flight: int = 0
    groups: tuple[GroupInfo, ...] = ()
    moves_done: int = 0
    moves_failed: int = 0
    versions: tuple[ProcessVersion, ...] = ()
    redis_problem: str = ""
    audits: int = 0
    leaks_mended: int = 0
    scheduler_problem: str = ""
    takeover_problems: tuple[str, ...] = ()
    quarantined_records: int = 0
    links: tuple[LinkInfo, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelDowntime:
    """Time during which a model was not dispatched while plans changed."""

    model: str
    version: str
    downtime_ns: int


@dataclass(frozen=True, slots=True)
class PlanSwitch:
    """One change from a plan to the next.

    Attributes:
        from_plan: Id of the plan before.
        to_plan: Id of the new plan; empty unless it is in force.
        phase: loading, flushing, moving, returning, done or rolled back.
        cause: The person or event that asked for it.
        problem: Why it was rolled back.
        duration_ns: Time from the decision to the end, or until now.
        downtime: Models that could not be dispatched for a while; all others never stopped.
    """

    from_plan: str
    to_plan: str
    phase: str
    cause: str
    problem: str
    duration_ns: int
    downtime: tuple[ModelDowntime, ...] = ()


@dataclass(frozen=True, slots=True)
class ActivePlan:
    """The plan in force, as the document `apply_plan` takes, with an explanation.

    Attributes:
        document: The plan.
        explanation: What runs where, who planned it and what it promises, in words.
        plan_id: Id of the plan.
        planner: The planner that made it: pooled, even, or hand.
        last_switch: The change of plan under way, else the last one; None if there was none.
    """

    document: dict[str, Any]
    explanation: str
    plan_id: str = ""
    planner: str = ""
    last_switch: PlanSwitch | None = None


@dataclass(frozen=True, slots=True)
class Replanned:
    """The result of planning anew; `changed` is False if the plan in force is the best one."""

    plan_id: str
    changed: bool
    switch: PlanSwitch | None = None


@dataclass(frozen=True, slots=True)
class TraceSpan:
    """One interval of a request's life; times count from its arrival at the gateway.

    `attempt` is 1 for the first dispatch, 0 for intervals outside of any dispatch.
    """

    name: str
    process: str
    start_ns: int
    duration_ns: int
    batch_id: int = 0
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class Trace:
    """The time of one request, by spans; `outcome` is "OK" or the reason it failed."""

    request_id: str
    model: str
    outcome: str
    total_ns: int
    spans: tuple[TraceSpan, ...]
    trace_id: str = ""


def as_json(value: Any) -> Any:
    """Returns a dataclass of this package, or a list of them, as plain JSON values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return [as_json(item) for item in value] if isinstance(value, list | tuple) else value
