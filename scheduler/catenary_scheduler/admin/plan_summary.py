"""Promises of the plan in force for each model, and the limits that keep them from being higher.

The pooled planner computes promises with its plan. For other plans, and for chains, they are
computed here from the plan, its times and the rate that was asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from catenary_protos.catenary.v1 import admin_pb2
from catenary_scheduler.admin.cluster_view import ClusterView
from catenary_scheduler.agents.deployments import Deployment
from catenary_scheduler.planning.chains import response_bounds
from catenary_scheduler.planning.survival import survival_of
from catenary_scheduler.replanning.provenance import POOLED, PlanProvenance
from catenary_services.domain.ids import NANOSECONDS_PER_SECOND, AgentId, Nanoseconds, ServerId
from catenary_services.domain.plan import Agent, Chain, ChainHop, ModelPlan, Pipeline, Stage
from catenary_services.errors import CatenaryError

_MOST_NAMED = 4


def promises_of(view: ClusterView) -> list[admin_pb2.PlanPromise]:
    """Returns one promise per model of the plan in force."""
    return [_promise(view, model, view.servers) for model in view.plan_models]


def _promise(
    view: ClusterView, model: ModelPlan, servers: Mapping[AgentId, ServerId]
) -> admin_pb2.PlanPromise:
    promise = _of_chains(view, model) if model.chains else _of_pools(view, model)
    survival = survival_of(model, servers)
    promise.survives, promise.fragile = survival.in_words(), survival.is_fragile
    return promise


# ---- pools ----


def _of_pools(view: ClusterView, model: ModelPlan) -> admin_pb2.PlanPromise:
    provenance = view.provenance
    agents = {agent: view.seen(record.agent) for agent, record in view.registry.items()}
    computed = (
        sum(_rate(pipeline) for pipeline in model.own_pipelines) / model.row_units,
        max((_latency_ns(pipeline, agents) for pipeline in model.own_pipelines), default=0),
        "; ".join(_slowest(pipeline) for pipeline in model.own_pipelines),
    )
    rate, latency_ns, binds = _as_noted(model, provenance) or computed
    return admin_pb2.PlanPromise(
        model=model.model.name,
        version=model.model.version,
        throughput_per_s=rate,
        latency_ns=latency_ns,
        slo_ns=model.slo_ns,
        binds=binds,
    )


def _as_noted(
    model: ModelPlan, provenance: PlanProvenance | None
) -> tuple[float, Nanoseconds, str] | None:
    """Returns what the pooled planner promised, if it made this plan and knows the model."""
    if (
        provenance is None
        or provenance.planner != POOLED
        or model.model not in provenance.latency_ns
    ):
        return None
    others = {str(each) for each in provenance.throughput_rps} - {str(model.model)}
    binds = [
        fact for fact in provenance.binding if not any(fact.startswith(f"{o} ") for o in others)
    ]
    latency_ns = round(provenance.latency_ns[model.model])
    return provenance.throughput_rps[model.model], latency_ns, "; ".join(binds)


def _rate(pipeline: Pipeline) -> float:
    """Returns the rows or units per second of a pipeline's slowest pool, if it is all it does."""
    return min((_stage_rate(stage, pipeline.batch_size) for stage in pipeline.stages), default=0.0)


def _stage_rate(stage: Stage, batch: int) -> float:
    return batch * len(stage.agents) * NANOSECONDS_PER_SECOND / max(1, stage.compute_ns[batch - 1])


def _latency_ns(pipeline: Pipeline, agents: dict[AgentId, Agent]) -> Nanoseconds:
    """Returns the time of a full batch that never waits, over the slowest link of each pool."""
    batch, total = pipeline.batch_size, 0
    before: Stage | None = None
    for stage in pipeline.stages:
        total += stage.compute_ns[batch - 1]
        ends = [*stage.agents, *(before.agents if before is not None else ())]
        speeds = [agents[agent].link_bytes_per_second for agent in ends if agent in agents]
        if before is not None and stage.input_bytes and speeds:
            total += stage.input_bytes * batch * NANOSECONDS_PER_SECOND // max(1, min(speeds))
        before = stage
    return total


def _slowest(pipeline: Pipeline) -> str:
    stage = min(pipeline.stages, key=lambda each: _stage_rate(each, pipeline.batch_size))
    blocks = f"blocks {stage.partition.first_block} to {stage.partition.last_block - 1}"
    return f"computing {blocks} on {_named(stage.agents)}"


# ---- chains ----


def _of_chains(view: ClusterView, model: ModelPlan) -> admin_pb2.PlanPromise:
    chains = [chain for chain in model.chains if chain.role != "prefill"]
    capacities = [chain.capacity for chain in chains]
    rates = [NANOSECONDS_PER_SECOND / max(1, chain.service_ns) for chain in chains]
    total = sum(c * rate for c, rate in zip(capacities, rates, strict=True))
    wanted = view.planned_rate(model.model)
    promise = admin_pb2.PlanPromise(
        model=model.model.name,
        version=model.model.version,
        throughput_per_s=total,
        slo_ns=model.slo_ns,
        sessions=sum(capacities),
    )
    said = [_why_no_more(view, model, chains)]
    if wanted > 0 and total > 0:
        bounds = _bounds(capacities, rates, wanted)
        if bounds is None:
            said.insert(0, f"{wanted:.2g} sessions/s are asked for, more than can be served")
        else:
            promise.response_lower_ns, promise.response_upper_ns = bounds
    promise.binds = "; ".join(text for text in said if text)
    return promise


def _bounds(
    capacities: list[int], rates: list[float], wanted: float
) -> tuple[Nanoseconds, Nanoseconds] | None:
    """Returns the lower and upper bound of the mean response time in nanoseconds (Theorem 3.7).

    None under overload, and where the bounds say nothing.
    """
    try:
        found = response_bounds(capacities, rates, wanted)
    except CatenaryError:  # with so many sessions the bounds say nothing
        return None
    if found is None:
        return None
    seconds = found.response_lower_s, found.response_upper_s
    lower, upper = (round(each * NANOSECONDS_PER_SECOND) for each in seconds)
    return lower, upper


def _why_no_more(view: ClusterView, model: ModelPlan, chains: list[Chain]) -> str:
    """Names the limit on sessions per chain: memory of agents, or the largest batch; else empty."""
    deployment = view.deployed.get(model.model)
    if deployment is None or deployment.decoder is None:
        return ""
    full = dict.fromkeys(
        hop.agent
        for chain in chains
        for hop in chain.hops
        if _is_full(view, hop, deployment, model.session_tokens)
    )
    if full:
        return f"memory for key-value caches on {_named(full)}"
    most = max((chain.capacity for chain in chains), default=0)
    if most >= deployment.for_planning().max_batch:
        return f"the largest batch, {most} sessions a chain"
    return ""


def _is_full(view: ClusterView, hop: ChainHop, deployment: Deployment, session_tokens: int) -> bool:
    """True if an agent has no memory for one more session of full length."""
    record = view.registry.get(hop.agent)
    if record is None or not record.agent.memory_bytes:
        return False
    slot_bytes = deployment.for_planning().held_by(record.agent).slot_bytes(session_tokens)
    used = sum(loaded.memory_bytes for loaded in record.loaded.values())
    return record.agent.memory_bytes - used < slot_bytes * hop.blocks


def _named(agents: Iterable[AgentId]) -> str:
    """Returns the names of the first few agents, and the number of the others, in words."""
    names = sorted(agents)
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
