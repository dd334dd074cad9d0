"""The better of two placements: what survives the loss of an agent first, then what serves more.

A plan that serves a tenth more until the first agent fails, and then nothing, is not the better
default. Where neither survives more than the other, the load decides; a placement of whole models
is preferred within a small loss, because its pools wait for no link and follow any mix of models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from catenary_scheduler.planning.comparing.promises import Groups, PlacementThroughput, promise_of
from catenary_scheduler.planning.placement import PipelinePlacement, Placement, StagePlacement
from catenary_scheduler.planning.pooled.problem import PoolingProblem
from catenary_scheduler.planning.survival import survives_any_agent
from catenary_services.domain.ids import AgentId

_SMALL_LOSS = 0.02


@dataclass(frozen=True, slots=True)
class Candidate:
    """A placement with what it promises and what it survives."""

    placement: Placement
    promise: PlacementThroughput
    fragile_models: int
    """Number of models that the loss of a single agent leaves unserved within the objective."""


def candidate(problem: PoolingProblem, placement: Placement, groups: Groups) -> Candidate:
    """Returns a placement as a candidate."""
    promise = promise_of(problem, placement, groups)
    fragile = sum(not survives_any_agent(model) for model in promise.in_time.models)
    return Candidate(placement, promise, fragile)


def better(whole: Candidate, pooled: Candidate, *, survival_first: bool = True) -> Candidate:
    """Returns the better of a placement of whole models and a pooled one."""
    ours, theirs = whole.promise.objective, pooled.promise.objective
    if ours <= 0.0 or theirs <= 0.0:
        return pooled if theirs > ours else whole
    if survival_first and whole.fragile_models != pooled.fragile_models:
        return min(whole, pooled, key=lambda each: each.fragile_models)
    return whole if ours >= theirs * (1 - _SMALL_LOSS) else pooled


def why_not(chosen: Candidate, other: Candidate, *, survival_first: bool = True) -> str:
    """Returns in words why a placement was chosen and another one was not."""
    ours, theirs = chosen.promise.objective, other.promise.objective
    if theirs <= 0.0:
        return "it keeps no objective"
    if survival_first and other.fragile_models > chosen.fragile_models:
        more = "; with planner: pooled it is taken" if theirs > ours else ""
        return f"it would not survive the loss of an agent that the plan survives{more}"
    if theirs > ours:
        return f"{theirs / ours - 1.0:.1%} more is too little to cut models for"
    return "it would serve less" if theirs < ours else "it would serve no more"


def with_idle_agents(placement: Placement, whole: Placement, idle: Sequence[AgentId]) -> Placement:
    """Returns a placement in which idle agents host the whole models that they have room for."""
    spare, models = set(idle), {model.model: model for model in whole.models}
    return Placement(
        tuple(
            replace(
                model, pipelines=(*model.pipelines, *_only(models[model.model].pipelines, spare))
            )
            if model.model in models
            else model
            for model in placement.models
        )
    )


def _only(pipelines: Sequence[PipelinePlacement], agents: set[AgentId]) -> list[PipelinePlacement]:
    """Returns what is left of pipelines of one stage on some agents."""
    found = []
    for pipeline in pipelines:
        if len(pipeline.stages) == 1:
            (stage,) = pipeline.stages
            left = tuple(agent for agent in stage.agents if agent in agents)
            if left:
                stages = (StagePlacement(stage.first_block, stage.last_block, left),)
                found.append(replace(pipeline, stages=stages))
    return found
