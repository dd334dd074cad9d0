"""Makes the plan of the models that are not decoders from the times of every class of agents.

Whole models on every agent are the best there is where all agents are of one class: nothing is cut,
nothing has to be solved, and any agent may be lost. Otherwise the pooled planner looks for a plan
that serves more, and `comparing.choice` decides between the two.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from catenary_scheduler.agents.deployments import Deployments
from catenary_scheduler.observed.profiles import MeasuredProfiles
from catenary_scheduler.planning import DeployedModel, Placement, even_split, replicated
from catenary_scheduler.planning.live import (
    DeviceGroup,
    Hosted,
    LiveCluster,
    LiveModel,
    PlanningRules,
    corrections,
    device_groups,
    origins,
    place,
    pooling_problem,
)
from catenary_scheduler.planning.pooled.problem import PoolingProblem
from catenary_scheduler.planning.replicas import without_room
from catenary_scheduler.planning.requirements import agents_of, only
from catenary_scheduler.planning.shared_placement import with_shared_pipelines
from catenary_scheduler.replanning.changed_times import Factors
from catenary_scheduler.replanning.provenance import POOLED, PlanProvenance
from catenary_scheduler.replanning.solver import SolverResult
from catenary_services.domain.ids import AgentId, ModelKey
from catenary_services.domain.plan import Agent
from catenary_services.errors import PlanInfeasible

if TYPE_CHECKING:
    from catenary_scheduler.planning.comparing import Candidate, PlacementThroughput

Solve = Callable[[PoolingProblem], Awaitable[SolverResult]]
_TRANSFER = "a transfer"


@dataclass(frozen=True, slots=True)
class PooledRequest:
    """Inputs of a plan of models that are not decoders."""

    cause: str
    models: tuple[DeployedModel, ...]
    agents: tuple[Agent, ...]
    able: Callable[[DeployedModel], tuple[Agent, ...]]
    """Returns the agents that can load a model."""
    shares: Mapping[ModelKey, float]
    hosted: Hosted
    memory_share: float
    """Share of each agent's memory that these models may take."""
    present: Placement = field(default_factory=lambda: Placement(()))


@dataclass(frozen=True, slots=True)
class PooledBuilt:
    """A plan, and the one in force by the same times."""

    placement: Placement
    provenance: PlanProvenance
    corrections: Factors
    objective_rps: float
    """Load that the plan takes, in requests per second."""
    present_rps: float
    """Load that the present placement takes by the same times; 0 if it does not serve every
    model."""
    idle: Mapping[AgentId, str] = field(default_factory=dict)
    """Reason why an agent is used by no pipeline that keeps its objective."""


class PooledBuilder:
    """Makes plans from profiles, estimates and measurements.

    Args:
        rules: Rules that pooled plans keep.
        deployments: The models and their profiles.
        measured: Times that agents measured.
        solve: Solves a planning task beside the event loop.
        survival_first: True if a plan that survives the loss of an agent is preferred to one that
            serves more.
    """

    def __init__(
        self,
        rules: PlanningRules,
        deployments: Deployments,
        measured: MeasuredProfiles,
        solve: Solve,
        *,
        survival_first: bool,
    ) -> None:
        self._rules = rules
        self._deployments = deployments
        self._measured = measured
        self._solve = solve
        self._survival_first = survival_first

    def corrections(self, models: tuple[DeployedModel, ...], agents: tuple[Agent, ...]) -> Factors:
        """Returns what measurements make of the times of each model and group now."""
        pooled = tuple(model for model in models if model.decoder is None)
        return _factors(self._cluster(pooled, agents, {}, 1.0), agents)

    def made_now(self, request: PooledRequest) -> PooledBuilt | None:
        """Returns whole models on agents of one class; None if these are not all the agents."""
        classes = {(agent.device_class, agent.virtual_level) for agent in request.agents}
        if not self._survival_first or len(classes) != 1:
            return None
        placement = _whole(request)
        every = {agent.agent_id for agent in request.agents}
        if any(_hosts_of_whole(model_at, placement) != every for model_at in request.models):
            return None
        cluster = self._cluster(request.models, request.agents, request.shares, 1.0)
        provenance = PlanProvenance(
            POOLED,
            request.cause,
            lines=("Every agent hosts every model as a whole; all agents are of one class.",),
            shares=dict(request.shares),
            remarks=_notes(self._origins(cluster, request.agents)),
        )
        return PooledBuilt(placement, provenance, _factors(cluster, request.agents), 0.0, 0.0)

    async def made(self, request: PooledRequest) -> PooledBuilt:
        """Returns the better of whole models and a pooled plan.

        Raises:
            PlanInfeasible: There is neither.
            CatenaryError: The solver broke down.
        """
        await self._deployments.refresh_profiles()
        if (now := self.made_now(request)) is not None:
            return now
        cluster = self._cluster(
            request.models, request.agents, request.shares, request.memory_share
        )
        problem = pooling_problem(cluster, self._rules)
        solution, why = None, ""
        try:
            solution = await self._solve(problem)
        except PlanInfeasible as error:
            why = error.message
        return await asyncio.to_thread(self._chosen, request, cluster, problem, solution, why)

    def _chosen(
        self,
        request: PooledRequest,
        cluster: LiveCluster,
        problem: PoolingProblem,
        solution: SolverResult | None,
        why: str,
    ) -> PooledBuilt:
        # Imported here, because the linear solver takes its time, which nobody waits for here.
        from catenary_scheduler.planning import comparing

        groups, whole = cluster.group_names, _whole(request)
        chosen = comparing.candidate(problem, whole, groups)
        if chosen.promise.objective <= 0.0:  # where there is most room, a model may be too slow
            whole = _whole(replace(request, able=_able_in_time(request, problem, groups)))
            chosen = comparing.candidate(problem, whole, groups)
        options = {"whole replicas": chosen}
        lines = _whole_in_words(problem, chosen.promise)
        remarks: list[str] = []
        if solution is not None:
            placed, idle = place(
                (solution.problem, solution.plan), request.models, cluster.groups, request.hosted
            )
            placed = comparing.with_idle_agents(placed, whole, idle)
            pooled = options["pools"] = comparing.candidate(problem, placed, groups)
            best = comparing.better(chosen, pooled, survival_first=self._survival_first)
            if best is pooled:
                lines = solution.lines
            chosen = best
        elif chosen.promise.objective <= 0.0:
            raise PlanInfeasible(why)
        else:
            remarks.append(f"no pooled plan was found: {why}")
        split = even_split(request.models, request.agents)
        if not without_room(request.models, split, request.agents, request.memory_share):
            options["an even split"] = comparing.candidate(problem, split, groups)
        remarks += [
            f"{name} would take {other.promise.objective:.1f} requests/s in all where"
            f" {chosen.promise.objective:.1f} are taken: "
            + comparing.why_not(chosen, other, survival_first=self._survival_first)
            for name, other in options.items()
            if other.placement != chosen.placement
        ]
        remarks += self._origins(cluster, request.agents)
        provenance = _promised(request, chosen.promise, lines, _notes(remarks))
        if solution is not None and lines is solution.lines:
            provenance = replace(provenance, binding=solution.plan.binding)
        present = _present(request, groups)
        return PooledBuilt(
            self._shared(request, problem, chosen, groups),
            provenance,
            _factors(cluster, request.agents),
            chosen.promise.objective,
            comparing.promise_of(problem, present, groups).objective if present else 0.0,
            comparing.idle_reasons(problem, chosen.promise.in_time, groups),
        )

    def _shared(
        self,
        request: PooledRequest,
        problem: PoolingProblem,
        chosen: Candidate,
        groups: Mapping[AgentId, str],
    ) -> Placement:
        """Returns the placement with routes of its models through the pools of others."""
        if not self._rules.shared_routes:
            return chosen.placement
        able = {
            model.key: {agent.agent_id for agent in request.able(model)} for model in request.models
        }
        return with_shared_pipelines(
            problem, chosen.placement, groups, chosen.promise.throughput_rps, able
        )

    def _origins(self, cluster: LiveCluster, stated: tuple[Agent, ...]) -> list[str]:
        served = self._measured.served_places()
        said = origins(cluster.profiled, cluster.groups, cluster.measured, served)
        links = _links_in_words(cluster.groups, device_groups(stated))
        return [*self._deployments.profile_problems.values(), *said, *links]

    def _cluster(
        self,
        models: tuple[DeployedModel, ...],
        agents: tuple[Agent, ...],
        shares: Mapping[ModelKey, float],
        memory_share: float,
    ) -> LiveCluster:
        ready = self._deployments.ready
        live = tuple(
            LiveModel(
                model,
                ready[model.key].profile if model.key in ready else None,
                shares.get(model.key, 1.0),
            )
            for model in models
        )
        seen = self._measured.links.known.seen(agents)
        return LiveCluster(seen, live, self._measured.everything(), memory_share)


def _factors(cluster: LiveCluster, stated: tuple[Agent, ...]) -> Factors:
    groups = cluster.groups
    found: dict[tuple[ModelKey | str, str], float] = {}
    found.update(corrections(cluster.profiled, groups, cluster.measured).items())
    for group, said in zip(groups, device_groups(stated), strict=True):
        found[_TRANSFER, group.name] = said.slowest_link / max(1, group.slowest_link)
    return found


def _links_in_words(seen: Sequence[DeviceGroup], stated: Sequence[DeviceGroup]) -> list[str]:
    return [
        f"links of {group.name} are planned with {group.slowest_link / 1e6:,.1f} MB/s, as measured;"
        f" its agents state {said.slowest_link / 1e6:,.1f} MB/s"
        for group, said in zip(seen, stated, strict=True)
        if group.slowest_link < said.slowest_link
    ]


def _whole(request: PooledRequest) -> Placement:
    return replicated(
        request.models,
        request.agents,
        memory_share=request.memory_share,
        able=request.able,
        shares=request.shares or None,
    )


def _able_in_time(
    request: PooledRequest, problem: PoolingProblem, groups: Mapping[AgentId, str]
) -> Callable[[DeployedModel], tuple[Agent, ...]]:
    """Returns which agents can load a model and are in time with it as a whole, if any are."""
    models = {model.name: model for model in problem.models}

    def able(deployed: DeployedModel) -> tuple[Agent, ...]:
        model = models[str(deployed.key)]
        limit_us = model.slo_us - model.margin_us
        fast = {group for (group, _), us in model.latency_us.items() if us[:, 0].sum() <= limit_us}
        every = request.able(deployed)
        return tuple(agent for agent in every if groups.get(agent.agent_id) in fast) or every

    return able


def _hosts_of_whole(model: DeployedModel, placement: Placement) -> set[AgentId]:
    return {
        agent
        for placed in placement.models
        if placed.model == model.key
        for pipeline in placed.pipelines
        if len(pipeline.stages) == 1
        for agent in pipeline.stages[0].agents
    }


def _present(request: PooledRequest, agents: Mapping[AgentId, str]) -> Placement | None:
    """Returns the present placement; None if it misses a model or names another agent."""
    keys = {model.key for model in request.models}
    placed = only(request.present, keys)
    served = {model.model for model in placed.models if model.pipelines}
    return placed if served == keys and agents_of(placed) <= agents.keys() else None


def _whole_in_words(problem: PoolingProblem, promise: PlacementThroughput) -> tuple[str, ...]:
    return (
        "Whole models are replicated on the agents with room for them.",
        *(
            f"{model.name} can serve {promise.throughput_rps[model.name]:.1f} requests/s within"
            f" {model.slo_us / 1e3:.1f} ms, {model.margin_us / 1e3:.1f} ms of it kept free for"
            " queueing."
            for model in problem.models
        ),
    )


def _promised(
    request: PooledRequest,
    promise: PlacementThroughput,
    lines: tuple[str, ...],
    remarks: tuple[str, ...],
) -> PlanProvenance:
    by_name = {str(model.key): model.key for model in request.models}
    return PlanProvenance(
        POOLED,
        request.cause,
        lines=lines,
        remarks=remarks,
        shares=dict(request.shares),
        throughput_rps={by_name[name]: rate for name, rate in promise.throughput_rps.items()},
        latency_ns={by_name[name]: us * 1e3 for name, us in promise.latency_us.items()},
    )


def _notes(remarks: list[str]) -> tuple[str, ...]:
    return tuple(f"Note: {remark}." for remark in remarks)
