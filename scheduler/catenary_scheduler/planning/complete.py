"""Completion of a placement with measured times, to a plan that a dispatcher can use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from catenary_scheduler.planning.chain_placement import ChainPlacement, HopPlacement, HostPlacement
from catenary_scheduler.planning.placement import (
    ModelPlacement,
    PipelinePlacement,
    Placement,
    StagePlacement,
)
from catenary_services.domain.ids import (
    NANOSECONDS_PER_SECOND,
    AgentId,
    ModelKey,
    Nanoseconds,
    PartitionKey,
    PlanId,
)
from catenary_services.domain.latency import LatencyLines
from catenary_services.domain.model import BlockTable
from catenary_services.domain.plan import (
    CacheCapacity,
    Chain,
    ChainHop,
    ModelPlan,
    Pipeline,
    Plan,
    Stage,
)
from catenary_services.errors import PlanInfeasible

ComputeTimes = Mapping[tuple[AgentId, PartitionKey], Sequence[Nanoseconds]]
"""Measured compute times of partitions on agents, in nanoseconds; index 0 is batch 1."""
ServiceTime = Callable[[ModelKey, Sequence[ChainHop]], Nanoseconds]
"""Returns the expected time of one session on a path through a model."""
ChainLatency = Callable[[ModelKey, Sequence[ChainHop]], LatencyLines | None]
"""Returns the latency lines of a path through a model; None if nothing is known about it."""


def unknown_time(model: ModelKey, hops: Sequence[ChainHop]) -> Nanoseconds:
    """Estimates, as a `ServiceTime`, one second per hop where nothing is known."""
    return NANOSECONDS_PER_SECOND * len(hops)


def unknown_lines(model: ModelKey, hops: Sequence[ChainHop]) -> LatencyLines | None:
    """Returns None, as a `ChainLatency` where nothing is known."""
    return None


def complete_plan(
    placement: Placement,
    tables: Mapping[ModelKey, BlockTable],
    compute_ns: ComputeTimes,
    plan_id: PlanId,
    service_ns: ServiceTime = unknown_time,
    latency: ChainLatency = unknown_lines,
) -> Plan:
    """Returns the plan of a placement.

    The times of a stage are the longest ones measured in its pool. A batch size whose compute alone
    takes longer than the SLO, or that was not measured everywhere, is lowered to the largest that
    fits. Batches of texts become room for as many texts of full length, counted in units. Transfers
    are not counted here, because the book knows the links and turns away requests that would be
    late. Chains have no deadline: `service_ns` only tells which of them is faster, and `latency`
    how long prompts and steps take on them.

    Raises:
        PlanInfeasible: The blocks do not cover the model, a time was not measured, or not even one
            row meets the SLO. The message names the model and the constraint.
    """
    models = []
    for model in placement.models:
        table = tables.get(model.model)
        if table is None:
            raise PlanInfeasible(f"{model.model}: no block table")
        if model.chains:
            models.append(_generating(model, table.blocks, service_ns, latency))
        else:
            models.append(_model(model, table, compute_ns))
    return Plan(plan_id, tuple(models))


def _generating(
    model: ModelPlacement, blocks: int, service_ns: ServiceTime, latency: ChainLatency
) -> ModelPlan:
    room = {host.host: host.block_slots for host in model.hosts}
    chains = []
    for number in range(len(model.chains)):
        chain = _chain(model, number, blocks, room)
        chains.append(
            replace(
                chain,
                service_ns=service_ns(model.model, chain.hops),
                lines=latency(model.model, chain.hops),
            )
        )
    caches = tuple(_cache(model.model, host) for host in model.hosts)
    return ModelPlan(
        model.model,
        model.slo_ns,
        (),
        chains=tuple(chains),
        caches=caches,
        session_tokens=model.session_tokens,
        objectives=model.objectives,
        packing=model.packing,
    )


def _chain(
    model: ModelPlacement,
    number: int,
    blocks: int,
    room: Mapping[tuple[AgentId, int, int], int],
) -> Chain:
    placed: ChainPlacement = model.chains[number]
    expected = 0
    for hop in placed.hops:
        if hop.entry != expected or not hop.first_block <= hop.entry < hop.last_block:
            raise PlanInfeasible(
                f"{model.model}: chain {number} enters {hop.agent} at block {hop.entry}, not at "
                f"{expected}"
            )
        if room.get(hop.host, 0) < hop.blocks:
            raise PlanInfeasible(
                f"{model.model}: chain {number} needs {hop.blocks} block slots on {hop.agent}"
            )
        expected = hop.last_block
    if expected != blocks:
        raise PlanInfeasible(f"{model.model}: chain {number} ends at {expected} of {blocks} blocks")
    hops = tuple(_hop(model.model, hop) for hop in placed.hops)
    return Chain(
        f"{model.model}/{number}",
        hops,
        placed.capacity,
        service_ns=0,
        role=placed.role,
        cache_tokens=float(placed.cache_tokens or placed.capacity * model.session_tokens),
    )


def _hop(model: ModelKey, hop: HopPlacement) -> ChainHop:
    key = PartitionKey(model, hop.first_block, hop.last_block)
    return ChainHop(hop.agent, key, hop.entry, hop.last_block)


def _cache(model: ModelKey, host: HostPlacement) -> CacheCapacity:
    key = PartitionKey(model, host.first_block, host.last_block)
    return CacheCapacity(host.agent, key, host.block_slots, host.cache_tokens)


def _model(model: ModelPlacement, table: BlockTable, compute_ns: ComputeTimes) -> ModelPlan:
    if not model.pipelines:
        raise PlanInfeasible(f"{model.model}: no pipeline")
    pipelines = [
        _pipeline(model, number, table, compute_ns)
        for number, placed in enumerate(model.pipelines)
        if not placed.is_shared
    ]
    row = table.row_units
    in_time = [each for each in pipelines if _compute(each.stages, row) <= model.slo_ns]
    if not in_time:
        least = min(_compute(each.stages, row) for each in pipelines)
        raise PlanInfeasible(
            f"{model.model}: SLO of {model.slo_ns / 1e6:g} ms cannot be met, one row takes "
            f"{least / 1e6:.3f} ms of compute"
        )
    shared = [
        _pipeline(reduced, number, table, compute_ns)
        for number, reduced in _measured(model, compute_ns)
    ]
    in_time += [each for each in shared if _compute(each.stages, row) <= model.slo_ns]
    return ModelPlan(
        model.model,
        model.slo_ns,
        tuple(in_time),
        model.float16_boundaries,
        units=table.units,
    )


def _measured(
    model: ModelPlacement, compute_ns: ComputeTimes
) -> Iterator[tuple[int, ModelPlacement]]:
    """Yields the numbers of shared pipelines, and the model with those agents that measured them.

    Nobody depends on these pipelines, so what lacks of them makes no plan infeasible.
    """
    pipelines = list(model.pipelines)
    for number, placed in enumerate(model.pipelines):
        if not placed.is_shared:
            continue
        stages = []
        for stage in placed.stages:
            key = PartitionKey(model.model, stage.first_block, stage.last_block)
            there = tuple(agent for agent in stage.agents if compute_ns.get((agent, key)))
            stages.append(replace(stage, agents=there))
        if all(stage.agents for stage in stages):
            pipelines[number] = replace(placed, stages=tuple(stages))
            yield number, replace(model, pipelines=tuple(pipelines))


def _pipeline(
    model: ModelPlacement, number: int, table: BlockTable, compute_ns: ComputeTimes
) -> Pipeline:
    placed = model.pipelines[number]
    _check_cover(model.model, placed, table)
    stages = tuple(_stage(model, stage, table, compute_ns) for stage in placed.stages)
    measured = min(len(stage.compute_ns) for stage in stages)
    least = table.row_units
    if measured < least:
        raise PlanInfeasible(f"{model.model}: not measured up to a text of full length")
    batch = min(placed.batch_size * least, measured) if table.batched else 1
    while batch > least and _compute(stages, batch) > model.slo_ns:
        batch -= 1
    return Pipeline(f"{model.model}/{number}", batch, stages, placed.is_shared)


def _compute(stages: Sequence[Stage], batch: int) -> Nanoseconds:
    return sum(stage.compute_ns[batch - 1] for stage in stages)


def _check_cover(model: ModelKey, placed: PipelinePlacement, table: BlockTable) -> None:
    expected = 0
    for stage in placed.stages:
        if stage.first_block != expected or stage.last_block <= stage.first_block:
            raise PlanInfeasible(
                f"{model}: blocks [{stage.first_block}, {stage.last_block}) do not follow block "
                f"{expected}"
            )
        expected = stage.last_block
    if expected != table.blocks:
        raise PlanInfeasible(f"{model}: the partitions end at {expected} of {table.blocks} blocks")


def _stage(
    model: ModelPlacement, placed: StagePlacement, table: BlockTable, compute_ns: ComputeTimes
) -> Stage:
    key = PartitionKey(model.model, placed.first_block, placed.last_block)
    if not placed.agents:
        raise PlanInfeasible(f"{key}: no agent")
    measured = []
    for agent in placed.agents:
        times = compute_ns.get((agent, key), ())
        if not times:
            raise PlanInfeasible(f"{key}: not measured on agent {agent}")
        measured.append(times)
    # A pool is planned at the pace of its slowest member, at the sizes all of them measured.
    slowest = [max(times) for times in zip(*measured, strict=False)]
    for at in range(1, len(slowest)):  # noise must not make a larger batch look faster
        slowest[at] = max(slowest[at], slowest[at - 1])
    if placed.first_block == 0:
        entering = 0  # model inputs come from gateways and are not booked
    else:
        boundary = table.boundaries[placed.first_block]
        row_bytes = boundary.wire_row_bytes(float16=model.float16_boundaries)
        entering = -(-row_bytes // table.row_units)
    return Stage(key, placed.agents, tuple(slowest), entering)
