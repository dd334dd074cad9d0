"""Ways in which agents can serve a model that does not generate text, with what each would give.

Whole models are replicated, pools cut the model by the speed of their agents, an even split cuts it
by nothing but block times, and each class of devices may serve alone. All are priced by the same
block times and one linear program (`comparing.promises`), and chosen between as the live planner
does: survival first, then the load.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from catenary_scheduler.planning.comparing import (
    Candidate,
    better,
    candidate,
    idle_reasons,
    promise_of,
    why_not,
    with_idle_agents,
)
from catenary_scheduler.planning.even_split import even_split
from catenary_scheduler.planning.live.place import place
from catenary_scheduler.planning.live.problem import with_batch_building
from catenary_scheduler.planning.placement import Placement
from catenary_scheduler.planning.pooled import LeastGpus, MaxThroughput, Objective, plan_pools
from catenary_scheduler.planning.pooled.planner import Clock
from catenary_scheduler.planning.pooled.problem import PooledPlan, PoolingProblem
from catenary_scheduler.planning.replicas import replicated, without_room
from catenary_scheduler.planning.requirements import agents_of
from catenary_scheduler.planning.search.figures import attainment_of
from catenary_scheduler.planning.search.options import (
    PlanAnswer,
    PlanOption,
    SearchOrder,
    ServingFigures,
)
from catenary_scheduler.planning.search.question import PoolQuestion
from catenary_scheduler.planning.search.search import NOTABLE_ATTAINMENT
from catenary_services.domain.ids import AgentId
from catenary_services.domain.plan import Agent
from catenary_services.errors import PlanInfeasible

_NS_PER_US = 1_000.0
_ENOUGH = 1.0 - NOTABLE_ATTAINMENT
"""Share of the load from which on an option counts as carrying it."""


@dataclass(frozen=True, slots=True)
class _Priced:
    """A way to serve the model, with what it promises."""

    name: str
    candidate: Candidate
    figures: ServingFigures


def search_pools(task: PoolQuestion, time_limit_s: float, clock: Clock) -> PlanAnswer:
    """Returns the best way to serve the model, and what all others would give.

    Raises:
        PlanInfeasible: The agents cannot serve the model in any way.
    """
    groups = task.cluster.group_names
    priced: list[_Priced] = []
    left_over: list[PlanOption] = []
    for name, make in _ways(task, time_limit_s, clock):
        try:
            placement, limit = make()
            _check_room(task, placement)
        except PlanInfeasible as error:
            left_over.append(PlanOption(name, None, None, error.message))
        else:
            found = candidate(task.problem, placement, groups)
            made = _Priced(name, found, _figures(task, found, limit))
            same = [p.name for p in priced if p.candidate.placement == placement]
            if same:
                left_over.append(_option(made, f"it is the same as {same[0]}"))
            else:
                priced.append(made)
    if not priced:
        raise PlanInfeasible("; ".join(f"{each.name}: {each.why_not}" for each in left_over))
    chosen = _best(task, priced)
    others = sorted(
        (each for each in priced if each is not chosen),
        key=lambda each: each.candidate.promise.objective,
        reverse=True,
    )
    options = [_option(chosen, "")]
    options += [_option(each, _why_not(task, chosen, each)) for each in others]
    idle = idle_reasons(task.problem, chosen.candidate.promise.in_time, groups)
    return PlanAnswer(task.deployed.key, (*options, *left_over), idle, task.notes)


def plan_in_two_rounds(
    problem: PoolingProblem, time_limit_s: float, clock: Clock, objective: Objective | None = None
) -> tuple[PoolingProblem, PooledPlan]:
    """Returns a pooled plan and the task it solves; the first round tells how fast batches fill.

    Raises:
        PlanInfeasible: There is no plan.
    """
    half_s = time_limit_s / 2
    first = plan_pools(problem, time_limit_s=half_s, clock=clock, objective=objective)
    problem = with_batch_building(problem, first)
    return problem, plan_pools(problem, time_limit_s=half_s, clock=clock, objective=objective)


_Made = tuple[Placement, str]
"""A placement, and what keeps it from more; empty if that is not known."""


def _ways(
    task: PoolQuestion, time_limit_s: float, clock: Clock
) -> Iterator[tuple[str, Callable[[], _Made]]]:
    """Yields the ways to serve a model by name, the usual one first."""
    agents = task.cluster.agents
    yield "whole replicas", partial(_whole, task, agents)
    yield "pools", partial(_pools, task, time_limit_s, clock)
    yield "an even split", partial(_split, task, agents)
    groups = task.cluster.groups
    for group in groups if len(groups) > 1 else ():
        yield f"only {group.name}", partial(_whole, task, group.agents)


def _check_room(task: PoolQuestion, placement: Placement) -> None:
    cluster = task.cluster
    full = without_room((task.deployed,), placement, cluster.agents, cluster.memory_share)
    if full:
        raise PlanInfeasible(f"{', '.join(full)} would have no room for a part of it")


def _split(task: PoolQuestion, agents: Sequence[Agent]) -> _Made:
    return even_split((task.deployed,), agents), ""


def _whole(task: PoolQuestion, agents: Sequence[Agent]) -> _Made:
    if task.order is SearchOrder.FEWEST_GPUS:
        agents = _fewest(task, agents)
    found = _replicas(task, agents)
    (model,) = found.models
    if any(len(pipeline.stages) > 1 for pipeline in model.pipelines):
        raise PlanInfeasible(f"{task.deployed.key} does not fit as a whole into one of them")
    return found, ""


def _replicas(task: PoolQuestion, agents: Sequence[Agent]) -> Placement:
    return replicated((task.deployed,), agents, memory_share=task.cluster.memory_share)


def _fewest(task: PoolQuestion, agents: Sequence[Agent]) -> list[Agent]:
    """Returns the agents that carry the load by whole replicas, the fastest first."""
    names = task.cluster.group_names
    rates: dict[AgentId, float] = {}
    for group in task.cluster.groups:
        alone = _replicas(task, group.agents[:1])
        rate = promise_of(task.problem, alone, names).objective
        rates.update((agent.agent_id, rate) for agent in group.agents)
    taken: list[Agent] = []
    carried = 0.0
    for agent in sorted(agents, key=lambda a: (-rates[a.agent_id], a.agent_id)):
        if taken and carried >= task.rate_per_s:
            break
        taken.append(agent)
        carried += rates[agent.agent_id]
    return taken


def _pools(task: PoolQuestion, time_limit_s: float, clock: Clock) -> _Made:
    few = task.order is SearchOrder.FEWEST_GPUS
    goal = LeastGpus({str(task.deployed.key): task.rate_per_s}) if few else MaxThroughput()
    solved = plan_in_two_rounds(task.problem, time_limit_s, clock, goal)
    groups = task.cluster.groups
    if few:  # else those that are left over would join its pools
        used = _used(solved[1])
        groups = tuple(replace(g, agents=g.agents[: used[g.name]]) for g in groups)
    placed, idle = place(solved, (task.deployed,), groups, {})
    if not few:
        placed = with_idle_agents(placed, _replicas(task, task.cluster.agents), idle)
    return placed, "; ".join(solved[1].binding)


def _used(plan: PooledPlan) -> Counter[str]:
    """Returns the number of agents of each class that a plan needs."""
    used: Counter[str] = Counter()
    for model in plan.models:
        for pipeline in model.pipelines:
            for part in pipeline.partitions:
                used[part.gpu] += part.vgpus
    return used


def _best(task: PoolQuestion, priced: Sequence[_Priced]) -> _Priced:
    if task.order is SearchOrder.FEWEST_GPUS:
        return max(priced, key=_few_key)
    best = priced[0]
    for other in priced[1:]:
        if better(best.candidate, other.candidate, survival_first=task.survival_first) is (
            other.candidate
        ):
            best = other
    return best


def _few_key(priced: _Priced) -> tuple[float, ...]:
    figures = priced.figures
    return min(figures.attainment, _ENOUGH), -figures.gpus, figures.rate_per_s


def _why_not(task: PoolQuestion, chosen: _Priced, other: _Priced) -> str:
    if task.order is SearchOrder.FEWEST_GPUS:
        mine, best = other.figures, chosen.figures
        if min(mine.attainment, _ENOUGH) < min(best.attainment, _ENOUGH):
            return "it would serve less of the load within the objective"
        return "it would take more GPUs" if mine.gpus > best.gpus else "it would sustain less"
    return why_not(chosen.candidate, other.candidate, survival_first=task.survival_first)


def _option(priced: _Priced, reason: str) -> PlanOption:
    (in_time,) = priced.candidate.promise.in_time.models
    (model,) = priced.candidate.placement.models
    shown = in_time if in_time.pipelines else model
    return PlanOption(priced.name, shown, priced.figures, reason)


def _figures(task: PoolQuestion, found: Candidate, limit: str) -> ServingFigures:
    promise, name = found.promise, str(task.deployed.key)
    rate = promise.throughput_rps[name]
    limit = limit or (
        "the computing time of its agents" if rate else "the objective, which no pipeline keeps"
    )
    return ServingFigures(
        sessions=0,
        rate_per_s=rate,
        tokens_per_s=0.0,
        first_token_ns=0.0,
        per_token_ns=0.0,
        response_ns=promise.latency_us.get(name, 0.0) * _NS_PER_US,
        attainment=attainment_of(rate, task.rate_per_s),
        gpus=len(agents_of(promise.in_time)),
        survives=not found.fragile_models,
        limit=limit,
    )
