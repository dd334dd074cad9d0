"""Makes one plan: pools for models that are asked for rows, chains for those that generate."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from catenary_scheduler.agents.deployments import Deployments
from catenary_scheduler.observed.profiles import MeasuredProfiles
from catenary_scheduler.planning import DeployedModel, ModelPlacement, Placement, replicated
from catenary_scheduler.planning.live import PlanningRules
from catenary_scheduler.planning.replicas import why_unused
from catenary_scheduler.planning.requirements import agents_of
from catenary_scheduler.replanning.chain_builder import ChainBuilder, ChainRequest, ComposedChains
from catenary_scheduler.replanning.changed_times import Factors
from catenary_scheduler.replanning.plan_request import BuiltPlan, PlanRequest
from catenary_scheduler.replanning.pooled_builder import (
    PooledBuilder,
    PooledBuilt,
    PooledRequest,
    Solve,
)
from catenary_scheduler.replanning.provenance import CHAINS, EVEN, PlanProvenance
from catenary_services.domain.ids import AgentId
from catenary_services.domain.plan import Agent
from catenary_services.errors import CatenaryError, PlanInfeasible
from catenary_services.log import get_logger

_log = get_logger(__name__)

Mode = Literal["auto", "pooled", "even"]
_SHARE_ALONE, _SHARE_BESIDE_CHAINS = 0.9, 0.4
"""Share of an agent's memory that replicas may take: without chains, and with chains beside
them."""


class PlanBuilder:
    """Makes plans as the setting `planner` says."""

    def __init__(
        self,
        mode: Mode,
        rules: PlanningRules,
        deployments: Deployments,
        measured: MeasuredProfiles,
        solve: Solve,
        chains: ChainBuilder | None = None,
    ) -> None:
        self.mode = mode
        self._chains = chains
        self._pooled = PooledBuilder(
            rules, deployments, measured, solve, survival_first=mode != "pooled"
        )

    def corrections(self, models: tuple[DeployedModel, ...], agents: tuple[Agent, ...]) -> Factors:
        """Returns what measurements make of the times of pooled models now."""
        return {} if self.mode == "even" or not agents else self._pooled.corrections(models, agents)

    def is_measured(self, model: ModelPlacement) -> bool:
        """True if every agent on the chains of a model has measured what it hosts of it."""
        return self._chains is not None and self._chains.is_measured(model)

    def link_factors(self, agents: tuple[Agent, ...]) -> Factors:
        """Returns by how much longer links take than chains would be composed for without them."""
        return self._chains.link_factors(agents) if self._chains is not None else {}

    def is_immediate(self, request: PlanRequest) -> bool:
        """True if `make_now` makes the wanted plan, and quickly."""
        if (
            request.generating
            and self._chains
            and not self._chains.is_quick(request.agents, request.session_loads)
        ):
            return False
        if request.chains_only or self.mode == "even" or not request.others.models:
            return True
        if self._why_split(request):
            return True
        return self._pooled.made_now(self._pooled_request(request)) is not None

    def make_now(self, request: PlanRequest) -> BuiltPlan:
        """Returns a plan for which nothing has to be solved, with chains, made at once.

        Raises:
            PlanInfeasible: There is no agent, or a model has no blocks.
        """
        built = self._kept(request) if request.chains_only else self._simple(request)
        if self._chains is None or not request.generating:
            return _finished(request, built, ComposedChains())
        chains = self._chains.make_now(_chain_request(request), built.placement)
        return _finished(request, built, chains)

    def _simple(self, request: PlanRequest) -> BuiltPlan:
        if self.mode != "even" and request.others.models and not self._why_split(request):
            made = self._pooled.made_now(self._pooled_request(request))
            if made is not None:
                return self._of_pools(request, made)
        return self.split(request, self._why_split(request))

    def split(
        self, request: PlanRequest, fallback: str = "", *, has_failed: bool = False
    ) -> BuiltPlan:
        """Returns a plan from sizes alone; an empty one if no model is served by pipelines.

        Raises:
            PlanInfeasible: There is no agent, or a model has no blocks.
        """
        models = request.others.models
        if not models:
            return BuiltPlan(Placement(()), PlanProvenance(CHAINS, request.cause))
        share = _memory_share(request)
        placement = replicated(models, request.agents, memory_share=share, able=request.able)
        return BuiltPlan(placement, PlanProvenance(EVEN, request.cause, fallback), has_failed)

    async def make(self, request: PlanRequest) -> BuiltPlan:
        """Returns the best plan.

        If none can be made from times, it is made from sizes, with the reason in its provenance.

        Models that generate text get their chains in the memory this leaves.

        Raises:
            PlanInfeasible: There is no agent, or a model has no blocks.
            CatenaryError: Chains were not composed in time, or the process crashed.
        """
        if request.chains_only:
            built = self._kept(request)
        elif self.mode == "even" or not request.others.models:
            built = self.split(request)
        else:
            built = await self._pooled_or_even(request)
        if self._chains is None or not request.generating:
            return _finished(request, built, ComposedChains())
        chains = await self._chains.make(_chain_request(request), built.placement)
        return _finished(request, built, chains)

    def _kept(self, request: PlanRequest) -> BuiltPlan:
        """Returns the previous proposal for the models that do not generate text."""
        provenance = replace(request.provenance or PlanProvenance(CHAINS, ""), cause=request.cause)
        models = tuple(model for model in request.present.models if not model.chains)
        return BuiltPlan(Placement(models), provenance, idle=request.idle)

    async def _pooled_or_even(self, request: PlanRequest) -> BuiltPlan:
        if asked := self._why_split(request):
            return self.split(request, asked)
        try:
            built = await self._pooled.made(self._pooled_request(request))
        except PlanInfeasible as error:
            _log.warning("no_pooled_plan", error=error.message)
            return self.split(request, error.message)
        except CatenaryError as error:
            _log.error("no_pooled_plan", error=error.message)
            return self.split(request, error.message, has_failed=True)
        except Exception as error:
            _log.exception("no_pooled_plan")
            reason = f"of an internal error ({type(error).__name__}), see the log"
            return self.split(request, reason, has_failed=True)
        return self._of_pools(request, built)

    def _why_split(self, request: PlanRequest) -> str:
        """Returns why no pooled plan is tried; empty if one is."""
        others = request.others
        if cut := [str(m.key) for m in others.models if m.partitions is not None]:
            return f"{', '.join(cut)} was deployed with a number of partitions"
        if request.unable and others.able(*others.models) is request.agents:
            return "no agent can load every model"
        return ""

    def _pooled_request(self, request: PlanRequest) -> PooledRequest:
        others = request.others
        return PooledRequest(
            request.cause,
            others.models,
            others.able(*others.models),
            request.able,
            request.shares,
            request.hosted,
            _memory_share(request),
            request.present,
        )

    @staticmethod
    def _of_pools(request: PlanRequest, built: PooledBuilt) -> BuiltPlan:
        others = request.others
        able = {agent.agent_id for agent in others.able(*others.models)}
        provenance = built.provenance
        if unable := sorted(a.agent_id for a in request.agents if a.agent_id not in able):
            remark = f"Note: {', '.join(unable)} cannot load every model and is left out."
            provenance = replace(provenance, remarks=(*provenance.remarks, remark))
        return BuiltPlan(
            built.placement,
            provenance,
            corrections=built.corrections,
            objective_rps=built.objective_rps,
            present_rps=built.present_rps,
            idle=built.idle,
        )


def _chain_request(request: PlanRequest) -> ChainRequest:
    agents = request.able(*request.generating)
    return ChainRequest(request.generating, agents, request.session_loads, request.present)


def _finished(request: PlanRequest, built: BuiltPlan, chains: ComposedChains) -> BuiltPlan:
    """Returns one plan of pooled models and of models with chains, with who is idle in it."""
    idle = _idle_in_words(request, built, chains)
    return replace(
        built,
        placement=Placement((*built.placement.models, *chains.models)),
        provenance=replace(built.provenance, chain_lines=chains.lines, idle=idle),
        problem="; ".join(chains.problems),
        session_loads=request.session_loads,
        guessed=chains.guessed,
    )


def _idle_in_words(
    request: PlanRequest, built: BuiltPlan, chains: ComposedChains
) -> tuple[str, ...]:
    """Returns sentences on the agents that no model uses, one for all with the same reasons."""
    used = agents_of(built.placement) - built.idle.keys() | agents_of(Placement(chains.models))
    by_reason: dict[str, list[AgentId]] = {}
    for agent in request.agents:
        if agent.agent_id not in used:
            why = _why_idle(request, agent, built, chains)
            by_reason.setdefault(why, []).append(agent.agent_id)
    return tuple(
        f"{', '.join(agents)} {'is' if len(agents) == 1 else 'are'} idle: {why}."
        for why, agents in sorted(by_reason.items())
    )


def _why_idle(request: PlanRequest, agent: Agent, built: BuiltPlan, chains: ComposedChains) -> str:
    name, others = agent.agent_id, request.others.models
    unable = [str(m.key) for m in request.models if name in request.unable.get(m.key, ())]
    found = [f"it could not load a part of {', '.join(unable)}"] if unable else []
    if name in built.idle:
        found.append(built.idle[name])
    elif others and request.chains_only:
        found.append("no pool of the plan that stays uses it")
    elif others and not unable:
        found.append(why_unused(others, agent, _memory_share(request)))
    return "; ".join((*found, *chains.idle.get(name, ())))


def _memory_share(request: PlanRequest) -> float:
    return _SHARE_BESIDE_CHAINS if request.generating else _SHARE_ALONE
