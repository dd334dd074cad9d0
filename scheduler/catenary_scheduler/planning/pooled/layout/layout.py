"""Layout of pools on devices: the physical GPUs of a cluster, their servers and their pools.

A plan counts virtual GPUs; here each gets a place. Pools take whole GPUs. Only where the rules let
two pipelines share one at the same position are their remainders put together. GPUs of one server
share its uplink and downlink, and the planner grants each an even part of them, so the choice of
neighbours matters, see `neighbours`.

GPUs that no pool uses are not part of the result, so fewer GPUs share the links of their servers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from catenary_scheduler.planning.pooled.layout.neighbours import servers_of
from catenary_scheduler.planning.pooled.layout.physical import PoolId, PoolLoad, physical_gpus
from catenary_scheduler.planning.pooled.problem import (
    BlockTimes,
    GpuClass,
    PooledModel,
    PooledModelPlan,
    PooledPartition,
    PooledPipeline,
    PooledPlan,
    PoolingProblem,
)
from catenary_services.domain.ids import AgentId, ModelKey, PartitionKey, PlanId, ServerId
from catenary_services.domain.plan import Agent, ModelPlan, Pipeline, Plan, Stage
from catenary_services.errors import InvalidInput

MODEL_VERSION = "1"
_NS_PER_US = 1000
_LEAST_SLACK = 0.01
"""Slack as a share of the SLO, for plans that promise none."""
_PLAN_ID = PlanId("pooled")


def lay_out(
    problem: PoolingProblem, plan: PooledPlan, plan_id: PlanId = _PLAN_ID
) -> tuple[tuple[Agent, ...], Plan]:
    """Returns the virtual GPUs that a plan uses, as agents, and the plan in terms of these agents.

    Agents are called `<class>-<GPU>.<slot>`, servers `<class>-server-<number>`.

    Raises:
        InvalidInput: The plan names a model, class or level that the problem does not have.
        PlanInfeasible: The plan needs more GPUs of a class than there are.
    """
    models = {model.name: model for model in problem.models}
    classes = {gpu.name: gpu for gpu in problem.classes}
    for served in plan.models:
        if served.name not in models:
            raise InvalidInput("plan", f"the problem has no model {served.name}")
        for part in (part for pipeline in served.pipelines for part in pipeline.partitions):
            if part.gpu not in classes:
                raise InvalidInput("plan", f"the cluster has no {part.gpu}")
    pools = list(_pools(plan, models, classes))
    agents: list[Agent] = []
    members: dict[PoolId, list[AgentId]] = {pool.pool: [] for pool in pools}
    for gpu_class in problem.classes:
        gpus = physical_gpus(gpu_class, [pool for pool in pools if pool.gpu == gpu_class.name])
        for number, (gpu, server) in enumerate(zip(gpus, servers_of(gpu_class, gpus), strict=True)):
            for slot, pool in enumerate(gpu.hosted):
                agent = _agent(gpu_class, number, slot, pool.level, server)
                agents.append(agent)
                members[pool.pool].append(agent.agent_id)
    return tuple(agents), Plan(
        plan_id,
        tuple(
            ModelPlan(
                _key(served.name),
                round(models[served.name].slo_us * _NS_PER_US),
                (
                    *(
                        _pipeline(models[served.name], which, pipeline, (at, which), members)
                        for which, pipeline in enumerate(served.pipelines)
                    ),
                    *_shared(models[served.name], served, members),
                ),
            )
            for at, served in enumerate(plan.models)
        ),
    )


def _agent(gpu_class: GpuClass, number: int, slot: int, level: int, server: int) -> Agent:
    return Agent(
        AgentId(f"{gpu_class.name}-{number}.{slot}"),
        gpu_class.name,
        ServerId(f"{gpu_class.name}-server-{server}"),
        (gpu_class.memory_bytes or 0) // level,
        max(1, round(gpu_class.server_bits_per_second / 8)),
        level,
    )


def _key(name: str) -> ModelKey:
    return ModelKey(name, MODEL_VERSION)


def _shared(
    model: PooledModel, served: PooledModelPlan, members: dict[PoolId, list[AgentId]]
) -> Iterator[Pipeline]:
    for which, route in enumerate(served.shared, start=len(served.pipelines)):
        where = (route.host, route.host_pipeline)
        yield replace(_pipeline(model, which, route.pipeline, where, members), is_shared=True)


def _pipeline(
    model: PooledModel,
    which: int,
    pipeline: PooledPipeline,
    where: tuple[int, int],
    members: dict[PoolId, list[AgentId]],
) -> Pipeline:
    stages = []
    for position, part in enumerate(pipeline.partitions):
        stages.append(
            Stage(
                PartitionKey(_key(model.name), part.first_block, part.last_block),
                tuple(members[PoolId(*where, position)]),
                tuple(
                    max(1, round(float(us) * _NS_PER_US))
                    for us in _compute_us(model, pipeline, part)
                ),
                model.cut_bytes[part.first_block] if position else 0,
            )
        )
    return Pipeline(f"{model.name}/{which}", pipeline.batch, tuple(stages))


def _pools(
    plan: PooledPlan, models: dict[str, PooledModel], classes: dict[str, GpuClass]
) -> Iterator[PoolLoad]:
    for at, served in enumerate(plan.models):
        model = models[served.name]
        for which, pipeline in enumerate(served.pipelines):
            transfers = [*_transfers(model, pipeline, classes), 0.0]
            slack = max(model.slo_us - pipeline.latency_us, _LEAST_SLACK * model.slo_us)
            received = 0.0
            for position, part in enumerate(pipeline.partitions):
                sent = received + transfers[position]
                sent += float(_compute_us(model, pipeline, part)[-1]) / 1e6
                yield PoolLoad(
                    PoolId(at, which, position),
                    part.gpu,
                    part.level,
                    part.vgpus,
                    pipeline.throughput_rps / pipeline.batch / max(1, part.vgpus),
                    transfers[position + 1],
                    transfers[position],
                    sent,
                    received,
                    slack / 1e6,
                )
                received = sent


def _compute_us(model: PooledModel, pipeline: PooledPipeline, part: PooledPartition) -> BlockTimes:
    """Returns the compute times of a partition by batch size, up to the pipeline's batch size."""
    times = model.latency_us.get((part.gpu, part.level))
    if times is None or times.shape[1] < pipeline.batch:
        raise InvalidInput(
            "plan",
            f"{model.name} has no profile of batch {pipeline.batch} on 1/{part.level} {part.gpu}",
        )
    total: BlockTimes = times[part.first_block : part.last_block, : pipeline.batch].sum(axis=0)
    return total


def _transfers(
    model: PooledModel, pipeline: PooledPipeline, classes: dict[str, GpuClass]
) -> Iterator[float]:
    """Yields, for each stage, the seconds that a batch takes to reach it."""
    before: GpuClass | None = None
    for part in pipeline.partitions:
        here = classes[part.gpu]
        if before is None:
            yield 0.0
        else:
            rate = min(before.server_bits_per_second, here.server_bits_per_second)
            yield model.cut_bytes[part.first_block] * pipeline.batch * 8 / rate
        before = here
