"""Plans of unlike devices that somebody could have made by hand, and the even split."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from catenary_scheduler.planning import DeployedModel, even_split
from catenary_scheduler.planning.placement import (
    ModelPlacement,
    PipelinePlacement,
    Placement,
    StagePlacement,
    placement_document,
)
from catenary_services.domain.ids import AgentId, ServerId
from catenary_services.domain.plan import Agent

EVEN, WHOLE = "even split", "whole models"
Document = dict[str, object]
Pools = Mapping[str, tuple[AgentId, ...]]
"""Agents by the class of their device."""
Pipelines = tuple[tuple[StagePlacement, ...], ...]


def pools_of(gpus: Mapping[str, int]) -> Pools:
    """Returns the agents of each class, whose numbers go on from class to class."""
    pools, first = {}, 0
    for name, count in gpus.items():
        pools[name] = tuple(AgentId(f"agent-{first + at}") for at in range(count))
        first += count
    return pools


def documents_by_hand(model: DeployedModel, pools: Pools) -> dict[str, Document]:
    """Returns every plan by hand as a document, by its name."""
    return {
        name: _document(model, pipelines)
        for name, pipelines in plans_by_hand(pools, model.table.blocks)
    }


def plans_by_hand(pools: Pools, blocks: int) -> Iterator[tuple[str, Pipelines]]:
    """Yields the pipelines of each plan that keeps devices of a class together, with its name.

    The whole model is on every device, or it is cut in two at any block, and either class has the
    first part.
    """
    yield WHOLE, tuple((StagePlacement(0, blocks, agents),) for agents in pools.values())
    for first, second in ((a, b) for a in pools for b in pools if a != b):
        for cut in range(1, blocks):
            stages = (
                StagePlacement(0, cut, pools[first]),
                StagePlacement(cut, blocks, pools[second]),
            )
            yield f"{first} [0, {cut}), {second} [{cut}, {blocks})", (stages,)


def even_document(model: DeployedModel, pools: Pools) -> Document:
    """Returns the even split, which knows neither speed nor memory nor links of the agents."""
    agents = [
        Agent(agent, name, ServerId(agent), 0, 0) for name, own in pools.items() for agent in own
    ]
    return placement_document(even_split([model], agents))


def _document(model: DeployedModel, pipelines: Pipelines) -> Document:
    made = tuple(PipelinePlacement(model.max_batch, stages) for stages in pipelines)
    placed = ModelPlacement(model.key, model.slo_ns, model.float16_boundaries, made)
    return placement_document(Placement((placed,)))
