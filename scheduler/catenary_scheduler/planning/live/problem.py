"""Description of a live cluster as a task for the pooled planner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from catenary_scheduler.planning.even_split import DeployedModel
from catenary_scheduler.planning.live.estimates import completed
from catenary_scheduler.planning.live.groups import DeviceGroup, device_groups
from catenary_scheduler.planning.live.profiles import MeasuredTimes, block_times
from catenary_scheduler.planning.pooled.problem import (
    BlockTimes,
    Device,
    GpuClass,
    PooledModel,
    PooledPlan,
    PoolingProblem,
)
from catenary_scheduler.planning.replicas import with_working
from catenary_services.domain.ids import AgentId
from catenary_services.domain.model import BlockTable
from catenary_services.domain.plan import Agent
from catenary_services.domain.profile import ModelProfile
from catenary_services.errors import PlanInfeasible

_NS_PER_US = 1_000.0
_BUILDING = 1.3e6
"""Microseconds allowed for a further row to arrive, times the rate: 1.3 times the mean of 1e6 /
rate (PPipe)."""


@dataclass(frozen=True, slots=True)
class LiveModel:
    """A deployed model, its profile if somebody made one, and its share of the load."""

    deployed: DeployedModel
    profile: ModelProfile | None
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class LiveCluster:
    """Agents, models and measured times that are to be planned with."""

    agents: tuple[Agent, ...]
    models: tuple[LiveModel, ...]
    measured: MeasuredTimes
    memory_share: float = 1.0
    """Share of each agent's memory that these models may take."""

    @property
    def groups(self) -> tuple[DeviceGroup, ...]:
        """Agents in groups of one device class and level."""
        return device_groups(self.agents)

    @property
    def group_names(self) -> dict[AgentId, str]:
        """The name of the group of every agent."""
        return {a.agent_id: group.name for group in self.groups for a in group.agents}

    @property
    def profiled(self) -> list[tuple[DeployedModel, ModelProfile]]:
        """Each deployed model with its profile, completed by estimates."""
        groups = self.groups
        return [
            (model.deployed, completed(model.deployed, model.profile, groups))
            for model in self.models
        ]


@dataclass(frozen=True, slots=True)
class PlanningRules:
    """Rules that a plan must keep."""

    margin: float = 0.4
    """Share of the SLO that is kept free for queueing, noise and contention (PPipe: 0.4)."""
    max_partitions: int = 3
    shared_routes: bool = True
    """True if models get routes through the pools of others."""


def pooling_problem(cluster: LiveCluster, rules: PlanningRules) -> PoolingProblem:
    """Returns the planning task.

    Raises:
        PlanInfeasible: There is no agent or no model.
    """
    groups = cluster.groups
    if not groups:
        raise PlanInfeasible("no agent is there to place a model on")
    if not cluster.models:
        raise PlanInfeasible("no model is deployed")
    crowd = Counter(str(agent.server) for agent in cluster.agents)
    return PoolingProblem(
        classes=tuple(_class(group, crowd, cluster.memory_share) for group in groups),
        models=tuple(
            _model(model, profile, groups, cluster.measured, rules)
            for model, (_, profile) in zip(cluster.models, cluster.profiled, strict=True)
        ),
        max_partitions=rules.max_partitions,
    )


def with_batch_building(problem: PoolingProblem, plan: PooledPlan) -> PoolingProblem:
    """Returns the task with the time that batches take to fill at the rates of a first plan.

    The paper also takes these rates from a first solution (there, one without partitioning).
    """
    rates = {model.name: model.throughput_rps for model in plan.models}
    return replace(
        problem,
        models=tuple(
            replace(model, batch_build_us_per_row=_BUILDING / rates[model.name])
            if rates.get(model.name, 0.0) > 0
            else model
            for model in problem.models
        ),
    )


def _class(group: DeviceGroup, crowd: Counter[str], share: float) -> GpuClass:
    gpu = group.as_class(crowd)
    return (
        gpu
        if gpu.memory_bytes is None
        else replace(gpu, memory_bytes=int(gpu.memory_bytes * share))
    )


def _model(
    model: LiveModel,
    profile: ModelProfile,
    groups: Sequence[DeviceGroup],
    measured: MeasuredTimes,
    rules: PlanningRules,
) -> PooledModel:
    deployed = model.deployed
    latency: dict[Device, BlockTimes] = {}
    for group in groups:
        device = profile.device(group.device_class, group.level)
        if device is not None:
            latency[group.name, 1] = block_times(deployed, device, group, measured)
    slo_us = deployed.slo_ns / _NS_PER_US
    return PooledModel(
        name=str(deployed.key),
        blocks=deployed.table.blocks,
        latency_us=latency,
        cut_bytes=_cut_bytes(deployed.table, float16=deployed.float16_boundaries),
        slo_us=slo_us,
        margin_us=rules.margin * slo_us,
        weight=model.share,
        block_weight_bytes=tuple(int(with_working(size)) for size in profile.block_weight_bytes),
    )


def _cut_bytes(table: BlockTable, *, float16: bool) -> tuple[int, ...]:
    inner = table.boundaries[1:-1]
    return (0, *(boundary.wire_row_bytes(float16=float16) for boundary in inner), 0)
