"""Shared routes of a placement: ways of models through pools of agents that are others'."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace

from catenary_scheduler.planning.placement import (
    PipelinePlacement,
    Placement,
    StagePlacement,
)
from catenary_scheduler.planning.pooled.problem import PoolingProblem
from catenary_scheduler.planning.pooled.shared_routes import (
    ChosenRoute,
    Guest,
    HostPipeline,
    HostPool,
    shared_routes,
)
from catenary_scheduler.planning.requirements import pooled_parts
from catenary_services.domain.ids import AgentId, ModelKey

Groups = Mapping[AgentId, str]
"""The class of every agent, as the planning task names it."""


class _AgentRoom:
    """The memory that the parts of a placement leave on each agent."""

    def __init__(
        self,
        problem: PoolingProblem,
        placement: Placement,
        hosts: Sequence[PipelinePlacement],
        groups: Groups,
    ) -> None:
        memory = {gpu.name: gpu.memory_bytes for gpu in problem.classes}
        rooms = {agent: memory[group] for agent, group in groups.items()}
        self._left = {
            agent: float("inf") if room is None else float(room) for agent, room in rooms.items()
        }
        self._hosts = hosts
        models = {model.name: model for model in problem.models}
        for agent, part in pooled_parts(placement):
            model = models.get(str(part.model))
            if model is not None:
                weights = model.block_weight_bytes[part.first_block : part.last_block]
                self._left[agent] -= sum(weights)

    def take(self, host: int, sizes: Sequence[int]) -> bool:
        wanted: dict[AgentId, int] = {}
        for stage, size in zip(self._hosts[host].stages, sizes, strict=True):
            for agent in stage.agents:
                wanted[agent] = wanted.get(agent, 0) + size
        if any(size > self._left[agent] for agent, size in wanted.items()):
            return False
        for agent, size in wanted.items():
            self._left[agent] -= size
        return True


def with_shared_pipelines(
    problem: PoolingProblem,
    placement: Placement,
    groups: Groups,
    throughput_rps: Mapping[str, float],
    able: Mapping[ModelKey, Set[AgentId]],
) -> Placement:
    """Returns a placement with routes of its models through pools of others, as memory allows.

    Args:
        problem: The task with the times and sizes of every class.
        placement: The placement, with the models' own pipelines only.
        groups: The class of every agent.
        throughput_rps: What the own pipelines of each model promise, by name.
        able: The agents that can load each model.
    """
    models = {model.name: model for model in problem.models}
    own = [_agents_of(each.pipelines) for each in placement.models]
    hosts: list[HostPipeline] = []
    placed: list[PipelinePlacement] = []
    for pipeline in (pipeline for each in placement.models for pipeline in each.pipelines):
        pools = [_pool(stage, groups) for stage in pipeline.stages]
        known = tuple(pool for pool in pools if pool is not None)
        if len(known) == len(pools):
            agents = _agents_of([pipeline])
            barred = frozenset(
                number
                for number, each in enumerate(placement.models)
                if agents & own[number] or not agents <= able.get(each.model, agents)
            )
            hosts.append(HostPipeline(barred, known))
            placed.append(pipeline)
    guests = [
        Guest(number, models[str(each.model)], throughput_rps.get(str(each.model), 0.0))
        for number, each in enumerate(placement.models)
        if str(each.model) in models
    ]
    classes = {gpu.name: gpu for gpu in problem.classes}
    room = _AgentRoom(problem, placement, placed, groups)
    chosen = shared_routes(guests, hosts, classes, room)
    return Placement(
        tuple(
            replace(
                each,
                pipelines=(
                    *each.pipelines,
                    *(_route(route, placed[route.host]) for route in chosen.get(number, ())),
                ),
            )
            for number, each in enumerate(placement.models)
        )
    )


def _pool(stage: StagePlacement, groups: Groups) -> HostPool | None:
    """Returns a pool of agents of one class; None for others."""
    names = {groups[agent] for agent in stage.agents}
    return HostPool(names.pop(), 1, len(stage.agents)) if len(names) == 1 else None


def _agents_of(pipelines: Iterable[PipelinePlacement]) -> set[AgentId]:
    return {a for pipeline in pipelines for stage in pipeline.stages for a in stage.agents}


def _route(route: ChosenRoute, host: PipelinePlacement) -> PipelinePlacement:
    stages = tuple(
        StagePlacement(part.first_block, part.last_block, stage.agents)
        for part, stage in zip(route.pipeline.partitions, host.stages, strict=True)
    )
    return PipelinePlacement(route.pipeline.batch, stages, is_shared=True)
