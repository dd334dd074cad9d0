"""Questions about plans as data: what would serve a model on devices that need not be there. Pure.

The dataclasses are named and have fields like the messages of the Admin service.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from catenary.errors import InvalidInputError
from catenary.records import record_of
from catenary.rpc.calls import RpcCall
from catenary_protos.catenary.v1 import admin_pb2

_MOST_COUNT = 65_536
_MOST_TOKENS = 16_777_216
_OBJECTIVES = ("throughput", "gpus")
"""Quantities that may decide once objectives are met: most throughput, or fewest GPUs."""


@dataclass(frozen=True, slots=True)
class PlannedPool:
    """Devices that would run the blocks `[first_block, last_block)`."""

    first_block: int
    last_block: int
    agent_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PlannedPipeline:
    """Pools in order, and the batches that they would run."""

    batch: int
    stages: tuple[PlannedPool, ...]


@dataclass(frozen=True, slots=True)
class PlannedHop:
    """The blocks `[first_block, last_block)` of a chain that a device would run."""

    agent_id: str
    first_block: int
    last_block: int


@dataclass(frozen=True, slots=True)
class PlannedChain:
    """A chain of devices that would generate text.

    Attributes:
        hops: The devices in order.
        capacity: The most sessions at a time.
        role: "mixed", or "prefill" or "decode" where chains of their own would do these.
        cache_tokens: The most tokens its caches would hold; 0 for `capacity` whole sessions.
    """

    hops: tuple[PlannedHop, ...]
    capacity: int
    role: str
    cache_tokens: int


@dataclass(frozen=True, slots=True)
class PlanOption:
    """One way to serve a model, with what is predicted of it.

    Attributes:
        shape: What it is, in words.
        why_not: Why another one was chosen; empty for the one that was.
        possible: False if the devices cannot serve the model in this way; then all below is empty.
        predicted: False while nobody has measured the model; then all figures are 0.
        throughput_per_s: Requests or sessions per second that are sustained within the objectives.
        tokens_per_s: Tokens per second, of a model that generates text, as are the next but one.
        latency_ns: Time of a batch that never waits, or the mean time of a session.
        first_token_ns: Mean time to the first token at the load that was asked for.
        per_token_ns: Mean time of each further token, likewise.
        attainment_ratio: Share of that load that is served within the objectives.
        gpus: Number of devices it uses.
        sessions: Sessions at a time, of a model that generates text.
        survives: True if the model is served whichever single device is lost.
        binds: What keeps it from more.
        pipelines: What runs where, of a model that does not generate text.
        chains: What runs where, of one that does.
    """

    shape: str
    why_not: str
    possible: bool
    predicted: bool
    throughput_per_s: float
    tokens_per_s: float
    latency_ns: int
    first_token_ns: int
    per_token_ns: int
    attainment_ratio: float
    gpus: int
    sessions: int
    survives: bool
    binds: str
    pipelines: tuple[PlannedPipeline, ...]
    chains: tuple[PlannedChain, ...]


@dataclass(frozen=True, slots=True)
class IdleGpu:
    """A device that the chosen option does not use, and why."""

    gpu: str
    why: str


@dataclass(frozen=True, slots=True)
class PlanSearch:
    """Outcome of a search for one model.

    Attributes:
        options: All that were considered: the chosen one first, then the best ones first.
        idle: The devices that the chosen one does not use.
        notes: Where the times come from, and the like, in sentences.
        scheduler_groups: Scheduler groups that the chosen one needs; 0 if no number is enough.
    """

    model: str
    version: str
    options: tuple[PlanOption, ...]
    idle: tuple[IdleGpu, ...]
    notes: tuple[str, ...]
    scheduler_groups: int

    @property
    def chosen(self) -> PlanOption:
        """The option that the planner would take."""
        return self.options[0]


@dataclass(frozen=True, slots=True)
class PlanDemand:
    """A question: a model, devices by class, and a load; zeros are for what is usual."""

    model: str
    gpus: Mapping[str, int]
    version: str
    objective: str
    rate_per_s: float
    prompt_tokens: int
    output_tokens: int


def search_plan(demand: PlanDemand, timeout_s: float | None) -> RpcCall[PlanSearch]:
    """Returns the call that asks what would serve a model.

    Raises:
        InvalidInputError: A field of the question is wrong.
    """
    if not demand.gpus:
        raise InvalidInputError.at("gpus", "name at least one class of devices")
    for name, count in demand.gpus.items():
        if not name or not 1 <= count <= _MOST_COUNT:
            raise InvalidInputError.at("gpus", f"{name!r} needs a number of 1 or more")
    if demand.objective not in _OBJECTIVES:
        raise InvalidInputError.at("objective", f"must be {' or '.join(_OBJECTIVES)}")
    if not 0.0 <= demand.rate_per_s <= 1e9:
        raise InvalidInputError.at("rate_per_s", "must be in 0..1e9")
    for field in ("prompt_tokens", "output_tokens"):
        if not 0 <= getattr(demand, field) <= _MOST_TOKENS:
            raise InvalidInputError.at(field, f"must be in 0..{_MOST_TOKENS}")
    request = admin_pb2.SearchPlanRequest(
        model=demand.model,
        version=demand.version,
        gpus=[
            admin_pb2.GpuCount(device_class=name, count=count)
            for name, count in demand.gpus.items()
        ],
        objective=demand.objective,
        rate_per_s=demand.rate_per_s,
        prompt_tokens=demand.prompt_tokens,
        output_tokens=demand.output_tokens,
    )
    return RpcCall(
        "admin", "SearchPlan", request, lambda reply: record_of(PlanSearch, reply), timeout_s
    )
