"""Placement by replication, from sizes alone: it survives the loss of an agent if memory allows.

Whole models are replicated first, because every replica can replace another that is lost, and none
of them waits for a link. Agents of one class share a pool, so that a pool is planned at the pace of
its own class. Agents that are too small for a whole model form a pipeline of as few partitions as
their memory allows, because few partitions over many agents leave several agents for each.

A pool of each class has its own pace, but nothing is cut by the speed of agents: the pooled planner
looks whether such cuts serve more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from catenary_scheduler.planning.even_split import MOST_PARTITIONS, DeployedModel, even_split
from catenary_scheduler.planning.placement import (
    ModelPlacement,
    PipelinePlacement,
    Placement,
    StagePlacement,
)
from catenary_scheduler.planning.requirements import pooled_parts
from catenary_services.domain.ids import AgentId, ModelKey
from catenary_services.domain.plan import Agent
from catenary_services.errors import PlanInfeasible

_WORKING_SHARE = 0.2
"""Memory that a partition needs while it runs, as a share of its weights."""


Able = Callable[[DeployedModel], Sequence[Agent]]
"""Returns the agents that may get a part of a model."""


def replicated(
    models: Sequence[DeployedModel],
    agents: Sequence[Agent],
    *,
    memory_share: float = 0.9,
    able: Able | None = None,
    shares: Mapping[ModelKey, float] | None = None,
) -> Placement:
    """Returns a placement of every model as a whole on as many agents as have room for it.

    Models take turns, the largest first, so each gets two replicas before any gets a third; further
    ones go to the model with the most work per replica. A replica goes to a server that has none of
    its model yet, if there is one, and there to the agent with the most room. A model whose
    deployment names a number of partitions is cut into these instead.

    Args:
        models: The models to place. A model without `block_bytes` is assumed to fit anywhere.
        agents: The agents to use. A `memory_bytes` of 0 stands for unknown, which is assumed to be
            enough.
        memory_share: Share of each agent's memory that these models may take.
        able: Returns the agents that can load a model; None if every agent can load every model.
        shares: Share of each model in the load; None if all are alike.

    Raises:
        PlanInfeasible: There is no agent, or a model has no blocks.
    """
    if not agents:
        raise PlanInfeasible("no agent is there to place a model on")
    room = _Room(agents, memory_share)
    ables = [able(model) if able is not None else agents for model in models]
    replicas = _replicas(models, ables, room, [_work(model, shares) for model in models])
    splits: dict[tuple[AgentId, ...], Placement] = {}
    placed = []
    for number, (model, mine) in enumerate(zip(models, ables, strict=True)):
        names = tuple(agent.agent_id for agent in mine)
        if names not in splits:
            splits[names] = even_split(models, mine)
        fallback = splits[names].models[number]
        placed.append(_placed(model, mine, replicas.get(number, ()), room, fallback))
    return Placement(tuple(placed))


def without_room(
    models: Sequence[DeployedModel],
    placement: Placement,
    agents: Iterable[Agent],
    memory_share: float = 0.9,
) -> list[AgentId]:
    """Returns the agents that have no room for all that a placement has them host."""
    of_key = {model.key: model for model in models}
    parts = pooled_parts(placement)
    room = _Room(agents, memory_share)
    for agent, part in parts:
        room.take(agent, _size(of_key[part.model], part.first_block, part.last_block))
    return sorted({agent for agent, _ in parts if room.left(agent) < 0})


def why_unused(models: Sequence[DeployedModel], agent: Agent, memory_share: float = 0.9) -> str:
    """Returns in words why `replicated` gives an agent no part of any of these models."""
    return "; ".join(_why_unused(model, agent, memory_share) for model in models)


def _why_unused(model: DeployedModel, agent: Agent, share: float) -> str:
    if model.partitions is not None:
        return f"{model.key} was deployed in {model.partitions} partition(s), which others host"
    needed, room = _size(model, 0, model.table.blocks), agent.memory_bytes * share
    if not agent.memory_bytes or needed <= room:
        return f"what is left of its memory is too little for {model.key}"
    return (
        f"{model.key} takes {needed / 1e6:,.0f} MB as a whole and it has {room / 1e6:,.0f} MB for"
        " models; more memory, or more agents like it to share the model with, would use it"
    )


class _Room:
    """The free memory of each agent, in bytes; infinite if its memory is unknown."""

    def __init__(self, agents: Iterable[Agent], share: float) -> None:
        self._left = {
            agent.agent_id: agent.memory_bytes * share if agent.memory_bytes else float("inf")
            for agent in agents
        }

    def left(self, agent: AgentId) -> float:
        return self._left[agent]

    def fits(self, agent: AgentId, size: float) -> bool:
        return size <= self._left[agent]

    def take(self, agent: AgentId, size: float) -> None:
        self._left[agent] -= size


def with_working(weight_bytes: float) -> float:
    """Returns the memory of weights together with what running them takes."""
    return weight_bytes * (1 + _WORKING_SHARE)


def _size(model: DeployedModel, first: int, last: int) -> float:
    return with_working(sum(model.block_bytes[first:last]))


def _work(model: DeployedModel, shares: Mapping[ModelKey, float] | None) -> float:
    """Returns the compute time of a model's share of the load, in any unit; 1 without shares."""
    if shares is None:
        return 1.0
    return shares.get(model.key, 1.0) * max(1, sum(model.table.compute_ns))


def _replicas(
    models: Sequence[DeployedModel],
    ables: Sequence[Sequence[Agent]],
    room: _Room,
    work: Sequence[float],
) -> Mapping[int, list[Agent]]:
    """Returns the agents that hold each model as a whole, by the model's index in `models`."""
    held: dict[int, list[Agent]] = {
        number: [] for number, model in enumerate(models) if model.partitions is None
    }
    sizes = [_size(model, 0, model.table.blocks) for model in models]
    orders = [sorted(able, key=lambda agent: agent.agent_id) for able in ables]
    growing = set(held)
    while growing:
        number = min(growing, key=lambda n: (*_turn(len(held[n]), work[n]), -sizes[n], n))
        mine = {agent.agent_id for agent in held[number]}
        servers = {agent.server for agent in held[number]}
        open_to = [
            agent
            for agent in orders[number]
            if agent.agent_id not in mine and room.fits(agent.agent_id, sizes[number])
        ]
        if open_to:
            best = min(open_to, key=lambda a: (a.server in servers, -room.left(a.agent_id)))
            held[number].append(best)
            room.take(best.agent_id, sizes[number])
        else:
            growing.remove(number)
    return held


def _turn(replicas: int, work: float) -> tuple[int, float]:
    """Returns a sort key of the model that gets the next replica."""
    # Two replicas survive the loss of an agent; what more there are follow the load.
    return min(replicas, 2), replicas / work if replicas >= 2 else 0.0


def _placed(
    model: DeployedModel,
    agents: Sequence[Agent],
    replicas: Sequence[Agent],
    room: _Room,
    cut: ModelPlacement,
) -> ModelPlacement:
    """Returns the pipelines of one model.

    `cut` is the placement it gets if nothing is known to fit.
    """
    if model.partitions is not None:
        return cut
    batch = cut.pipelines[0].batch_size
    pipelines = [
        PipelinePlacement(batch, (StagePlacement(0, model.table.blocks, pool),))
        for pool in _by_class(replicas)
    ]
    others = [agent for agent in agents if agent not in replicas]
    stages = _cut_to_fit(model, others, room)
    if stages:
        pipelines.append(PipelinePlacement(batch, stages))
    return replace(cut, pipelines=tuple(pipelines)) if pipelines else cut


def _by_class(agents: Iterable[Agent]) -> list[tuple[AgentId, ...]]:
    pools: dict[tuple[str, int], list[AgentId]] = {}
    for agent in agents:
        pools.setdefault((agent.device_class, agent.virtual_level), []).append(agent.agent_id)
    return [tuple(sorted(pool)) for _, pool in sorted(pools.items())]


def _cut_to_fit(
    model: DeployedModel, agents: Sequence[Agent], room: _Room
) -> tuple[StagePlacement, ...]:
    """Returns the shortest pipeline whose partitions fit on their agents.

    The result is empty if there is none.
    """
    most = min(model.table.blocks, max(MOST_PARTITIONS, len(agents)))
    for partitions in range(2, most + 1) if len(agents) > 1 else ():
        (placed,) = even_split([replace(model, partitions=partitions)], agents).models
        stages = placed.pipelines[0].stages
        load: dict[AgentId, float] = {}
        for stage in stages:
            for agent in stage.agents:
                size = _size(model, stage.first_block, stage.last_block)
                load[agent] = load.get(agent, 0.0) + size
        if all(room.fits(agent, size) for agent, size in load.items()):
            for agent, size in load.items():
                room.take(agent, size)
            return stages
    return ()
