"""Questions about placements, without state: who must host what, and is it enough to serve."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from scheduler.planning import (
    ModelPlacement,
    PipelinePlacement,
    Placement,
    StagePlacement,
)
from services.domain.ids import AgentId, ModelKey, PartitionKey
from services.domain.plan import ModelPlan, Pipeline

Wanted = dict[PartitionKey, tuple[int, bool]]
"""Partition -> the largest batch it must run, and whether its boundaries are float16."""


def agents_of(placement: Placement) -> set[AgentId]:
    """Returns every agent a placement names."""
    return {agent for _, _, stage in stages_of(placement) for agent in stage.agents}


def stages_of(
    placement: Placement,
) -> Iterator[tuple[ModelPlacement, PipelinePlacement, StagePlacement]]:
    """Returns every stage with the model and pipeline it belongs to."""
    for model in placement.models:
        for pipeline in model.pipelines:
            for stage in pipeline.stages:
                yield model, pipeline, stage


def partition_of(model: ModelPlacement, stage: StagePlacement) -> PartitionKey:
    """Returns the key of a stage's partition."""
    return PartitionKey(model.model, stage.first_block, stage.last_block)


def wanted_of(placement: Placement, agent: AgentId) -> Wanted:
    """Returns what one agent must host."""
    wanted: Wanted = {}
    for model, pipeline, stage in stages_of(placement):
        if agent in stage.agents:
            key = partition_of(model, stage)
            batch = max(pipeline.batch_size, wanted.get(key, (0, False))[0])
            wanted[key] = (batch, model.float16_boundaries)
    return wanted


def wanted_by_agent(placement: Placement | None) -> dict[AgentId, Wanted]:
    """Returns what every agent of a placement must host."""
    wanted: dict[AgentId, Wanted] = {}
    for model, pipeline, stage in stages_of(placement or Placement(())):
        key = partition_of(model, stage)
        for agent in stage.agents:
            mine = wanted.setdefault(agent, {})
            batch = max(pipeline.batch_size, mine.get(key, (0, False))[0])
            mine[key] = (batch, model.float16_boundaries)
    return wanted


def without(placement: Placement, gone: set[AgentId]) -> Placement:
    """Returns the placement without some agents, and without what they alone could host."""
    models = []
    for model in placement.models:
        pipelines = []
        for pipeline in model.pipelines:
            stages = tuple(
                replace(stage, agents=tuple(a for a in stage.agents if a not in gone))
                for stage in pipeline.stages
            )
            if all(stage.agents for stage in stages):
                pipelines.append(replace(pipeline, stages=stages))
        if pipelines:
            models.append(replace(model, pipelines=tuple(pipelines)))
    return replace(placement, models=tuple(models))


def changing(old: Placement, new: Placement) -> frozenset[ModelKey]:
    """Returns the models both placements serve, but not alike."""
    before = {model.model: model for model in old.models}
    return frozenset(model.model for model in new.models if before.get(model.model, model) != model)


def only(placement: Placement, models: Iterable[ModelKey]) -> Placement:
    """Returns the part of a placement that is about some models."""
    wanted = set(models)
    return Placement(tuple(model for model in placement.models if model.model in wanted))


def can_go_back(old: Placement, new: Placement, is_present: Callable[[AgentId], bool]) -> bool:
    """True if the old plan still serves every model the new one does, with the agents there are."""
    gone = {agent for agent in agents_of(old) if not is_present(agent)}
    served = {model.model for model in without(old, gone).models}
    both = {model.model for model in old.models} & {model.model for model in new.models}
    return both <= served


Hosts = Callable[[AgentId, PartitionKey, int], bool]
"""True if an agent is there and hosts a partition for batches of that size."""


def missing(
    placement: Placement, hosts: Hosts, excused: Callable[[AgentId], bool]
) -> list[tuple[AgentId, PartitionKey]]:
    """Returns what still has to be loaded before a placement can be activated.

    An excused agent is not waited for, as long as every pool has somebody.
    """
    lacking = []
    for model, pipeline, stage in stages_of(placement):
        key = partition_of(model, stage)
        late = [agent for agent in stage.agents if not hosts(agent, key, pipeline.batch_size)]
        enough = len(late) < len(stage.agents)
        lacking += [(agent, key) for agent in late if not (enough and excused(agent))]
    return lacking


def can_serve(pipeline: Pipeline, joined: Callable[[AgentId], bool]) -> bool:
    """True if every pool of the pipeline has an agent the dispatcher may use."""
    return all(any(joined(agent) for agent in stage.agents) for stage in pipeline.stages)


def empty_pools(plan: ModelPlan, joined: Callable[[AgentId], bool]) -> list[str]:
    """Returns, in words, the pools of a model's pipelines that have nobody."""
    return [
        f"nobody hosts blocks {stage.partition.first_block} to {stage.partition.last_block}"
        f" (waiting for {', '.join(stage.agents)})"
        for pipeline in plan.pipelines
        for stage in pipeline.stages
        if not any(joined(agent) for agent in stage.agents)
    ]
