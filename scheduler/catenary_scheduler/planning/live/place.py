"""Placement of a pooled plan on the agents of a cluster: which agent is in which pool.

Agents that already host a partition of the plan keep it, because nothing then has to be loaded.
Others are taken from servers in turn, so that a pool spreads over as many network cards as
possible. Agents that the plan leaves over join pools of their class: first those whose single agent
is the only way through a model, then those that are busiest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest

from catenary_scheduler.planning.even_split import DeployedModel
from catenary_scheduler.planning.live.groups import DeviceGroup
from catenary_scheduler.planning.placement import (
    ModelPlacement,
    PipelinePlacement,
    Placement,
    StagePlacement,
)
from catenary_scheduler.planning.pooled.problem import (
    PooledModel,
    PooledPartition,
    PooledPipeline,
    PooledPlan,
    PoolingProblem,
)
from catenary_services.domain.ids import AgentId, PartitionKey
from catenary_services.domain.plan import Agent
from catenary_services.errors import PlanInfeasible

Hosted = Mapping[AgentId, Iterable[PartitionKey]]
"""Partitions that agents have loaded, or are about to load."""


@dataclass(slots=True)
class _Pool:
    """One partition of one pipeline, and the agents chosen for it."""

    key: PartitionKey
    planned: PooledPartition
    work_us: float
    """Microseconds of its agents' time per second that the promised load takes."""
    is_only_way: bool
    """True if its model has no other pipeline."""
    agents: list[AgentId] = field(default_factory=list)

    @property
    def load(self) -> float:
        """Returns the busy microseconds per second of each of its agents at the promised load."""
        return self.work_us / max(1, len(self.agents))


def place(
    solution: tuple[PoolingProblem, PooledPlan],
    models: Sequence[DeployedModel],
    groups: Sequence[DeviceGroup],
    hosted: Hosted,
) -> tuple[Placement, tuple[AgentId, ...]]:
    """Returns the placement of a solved problem, and the agents that no pool can use.

    Raises:
        PlanInfeasible: The plan needs more agents of a group than there are, or a model has no
            pipeline.
    """
    problem, plan = solution
    of_name = {str(model.key): model for model in models}
    pooled = {model.name: model for model in problem.models}
    pools: list[_Pool] = []
    shapes: list[tuple[DeployedModel, list[tuple[int, list[_Pool]]]]] = []
    for model_plan in plan.models:
        model = of_name[model_plan.name]
        if not model_plan.pipelines:
            raise PlanInfeasible(f"the plan has no pipeline for {model.key}")
        pipelines = []
        merged = _merged(model_plan.pipelines)
        for pipeline in merged:
            stages = [
                _pool(model, pooled[model_plan.name], pipeline, part, is_only_way=len(merged) == 1)
                for part in pipeline.partitions
            ]
            pools += stages
            pipelines.append((pipeline.batch, stages))
        shapes.append((model, pipelines))
    idle: list[AgentId] = []
    for group in groups:
        idle += _fill(group, [pool for pool in pools if pool.planned.gpu == group.name], hosted)
    placement = Placement(tuple(_model(model, pipelines) for model, pipelines in shapes))
    return placement, tuple(idle)


def _merged(pipelines: Iterable[PooledPipeline]) -> list[PooledPipeline]:
    """Returns pipelines of one shape joined into one.

    The larger pool serves whatever its parts would.
    """
    alike: dict[tuple[int, tuple[tuple[str, int, int], ...]], PooledPipeline] = {}
    for pipeline in pipelines:
        shape = tuple((p.gpu, p.first_block, p.last_block) for p in pipeline.partitions)
        known = alike.get((pipeline.batch, shape))
        alike[pipeline.batch, shape] = pipeline if known is None else _joined(known, pipeline)
    return list(alike.values())


def _joined(one: PooledPipeline, other: PooledPipeline) -> PooledPipeline:
    pairs = zip(one.partitions, other.partitions, strict=True)
    return replace(
        one,
        throughput_rps=one.throughput_rps + other.throughput_rps,
        partitions=tuple(
            replace(mine, vgpus=mine.vgpus + theirs.vgpus, gpus=mine.gpus + theirs.gpus)
            for mine, theirs in pairs
        ),
    )


def _pool(
    model: DeployedModel,
    pooled: PooledModel,
    pipeline: PooledPipeline,
    part: PooledPartition,
    *,
    is_only_way: bool,
) -> _Pool:
    times = pooled.latency_us[part.gpu, part.level]
    batch_us = float(times[part.first_block : part.last_block, pipeline.batch - 1].sum())
    key = PartitionKey(model.key, part.first_block, part.last_block)
    return _Pool(key, part, pipeline.throughput_rps * batch_us / pipeline.batch, is_only_way)


def _model(model: DeployedModel, pipelines: list[tuple[int, list[_Pool]]]) -> ModelPlacement:
    placed = tuple(
        PipelinePlacement(
            batch,
            tuple(
                StagePlacement(p.key.first_block, p.key.last_block, tuple(sorted(p.agents)))
                for p in stages
            ),
        )
        for batch, stages in pipelines
    )
    return ModelPlacement(model.key, model.slo_ns, model.float16_boundaries, placed)


def _fill(group: DeviceGroup, pools: list[_Pool], hosted: Hosted) -> list[AgentId]:
    """Gives the pools of one group their agents; returns these if there is no pool for them."""
    needed = sum(pool.planned.vgpus for pool in pools)
    if needed > len(group.agents):
        raise PlanInfeasible(
            f"the plan needs {needed} agents of {group.name}, {len(group.agents)} are there"
        )
    free = dict.fromkeys(agent.agent_id for agent in group.agents)
    for pool in pools:
        for agent in [a for a in free if pool.key in hosted.get(a, ())]:
            if len(pool.agents) < pool.planned.vgpus:
                pool.agents.append(agent)
                del free[agent]
    rest = _servers_in_turn([agent for agent in group.agents if agent.agent_id in free])
    for pool in pools:
        while len(pool.agents) < pool.planned.vgpus:
            pool.agents.append(rest.pop(0))
    if not pools:
        return rest
    for agent in rest:
        hosting = [pool for pool in pools if pool.key in hosted.get(agent, ())]
        # The loss of one agent must not leave a model unserved, so load decides only after that.
        fragile = [pool for pool in pools if pool.is_only_way and len(pool.agents) == 1]
        max(fragile or hosting or pools, key=lambda pool: pool.load).agents.append(agent)
    return []


def _servers_in_turn(agents: Iterable[Agent]) -> list[AgentId]:
    """Returns the agents in an order in which neighbours are on different servers if possible."""
    by_server: dict[str, list[AgentId]] = {}
    for agent in agents:
        by_server.setdefault(agent.server, []).append(agent.agent_id)
    rounds = zip_longest(*by_server.values())
    return [agent for each in rounds for agent in each if agent is not None]
