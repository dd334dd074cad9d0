"""Plans in words, for readers who have not seen the JSON."""

from __future__ import annotations

from collections.abc import Mapping

from catenary_scheduler.admin.cluster_view import ClusterView
from catenary_scheduler.agents.registry import AgentState
from catenary_scheduler.dispatch.availability import UNFIT, Impairment
from catenary_scheduler.planning.survival import agents_of, survival_of
from catenary_scheduler.replanning.provenance import HAND
from catenary_services.domain.ids import (
    NANOSECONDS_PER_MILLISECOND,
    NANOSECONDS_PER_SECOND,
    AgentId,
    ServerId,
)
from catenary_services.domain.latency import TokenObjectives
from catenary_services.domain.model import TokenUnits
from catenary_services.domain.packing import PackingGoal
from catenary_services.domain.plan import Chain, ModelPlan, Pipeline, Plan, Stage

_NOT_NAMED = "the plan does not name it; `catenary plan replan` has one made that may"
_UNFIT = {each.name.lower() for each in Impairment if each >= UNFIT}
_BY_STATE = {"lost": "the cluster does not hear it", "draining": "it is draining"}


def explain(view: ClusterView, plan: Plan) -> str:
    """Returns what runs where and why, for a reader who has not seen the JSON of a plan."""
    provenance, report = view.provenance, view.rollout_report()
    lines = [f"Plan {plan.plan_id} serves {len(plan.models)} model(s)."]
    if provenance is not None:
        lines += provenance.in_words()
    if view.plan_problem:
        lines.append(f"Note: {view.plan_problem}.")
    lines += _unplanned(view, plan)
    for model in plan.models:
        lines += ["", *_model(model), _survival(model, view.servers)]
    if report is not None:
        lines += ["", report.in_words()]
    return "\n".join(lines)


def _unplanned(view: ClusterView, plan: Plan) -> list[str]:
    """Returns a sentence on every idle agent of which whoever made the plan says nothing."""
    by_hand = view.provenance is not None and view.provenance.planner == HAND
    told = {agent for model in plan.models for agent in agents_of(model)}
    if not by_hand:
        told |= view.planned_agents
    return [
        f"{agent} is idle: {_NOT_NAMED if by_hand else _why_unplanned(view, record)}."
        for agent, record in sorted(view.registry.items())
        if agent not in told
    ]


def _why_unplanned(view: ClusterView, record: AgentState) -> str:
    if (state := view.state_of(record)) in _BY_STATE:
        return _BY_STATE[state]
    reports = view.impairments(record.agent.agent_id)
    unfit = [f"it is {each.kind}: {each.why}" for each in reports if each.kind in _UNFIT]
    return unfit[0] if unfit else "it joined after the plan was made"


def _model(model: ModelPlan) -> list[str]:
    if model.chains:
        return _chains(model)
    cast = "float16" if model.float16_boundaries else "their own type"
    lines = [
        f"{model.model}: deadline {_ms(model.slo_ns)} unless a request names one;"
        f" feature maps between partitions travel as {cast}."
    ]
    for number, pipeline in enumerate(model.pipelines, start=1):
        kind = "Pipeline" if not pipeline.is_shared else "Shared route"
        lines += [f"  {kind} {number}, batches of up to {_size(pipeline, model.units)}:"]
        lines += [f"    {_stage(stage, pipeline.batch_size)}" for stage in pipeline.stages]
        lines += [f"    {_limits(pipeline, model.units)}"]
    return lines


def _size(pipeline: Pipeline, units: TokenUnits | None) -> str:
    if units is None:
        return f"{pipeline.batch_size}"
    tokens = pipeline.batch_size * units.tokens
    return f"{tokens} tokens (texts times the longest of them, at most {units.text_tokens})"


def _survival(model: ModelPlan, servers: Mapping[AgentId, ServerId]) -> str:
    survival = survival_of(model, servers)
    return f"  {'Warning: it' if survival.is_fragile else 'It'} {survival.in_words()}."


_PACKING: dict[PackingGoal, str] = {
    "pack": " Running sessions are moved onto few chains.",
    "balance": " Running sessions are moved so that chains are evenly loaded.",
    "off": "",
}
_ROLES = {"mixed": "", "prefill": " for prompts", "decode": " for what follows them"}


def _chains(model: ModelPlan) -> list[str]:
    slots = {(cache.agent, cache.partition): cache.block_slots for cache in model.caches}
    lines = [
        f"{model.model}: generates text; sessions of up to {model.session_tokens} tokens;"
        f" the first token within {_ms(model.slo_ns)}, else it is given up."
        f"{_objectives(model.objectives)}{_PACKING[model.packing]}"
    ]
    for number, chain in enumerate(model.chains, start=1):
        path = ", then ".join(
            f"blocks {hop.first_block} to {hop.last_block - 1} on {hop.agent}" for hop in chain.hops
        )
        lines.append(
            f"  Chain {number}{_ROLES[chain.role]}, {chain.capacity} session(s) at a time"
            f"{_tokens(model, chain)}, a mean one takes {_ms(chain.service_ns)}: {path}."
        )
    hosted = [
        f"{agent} hosts blocks {key.first_block} to {key.last_block - 1} with {number} block slots"
        for (agent, key), number in slots.items()
    ]
    return [*lines, f"  {'; '.join(hosted)}."]


def _tokens(model: ModelPlan, chain: Chain) -> str:
    """Returns in words how many tokens fit a chain; empty if all sessions can have full length."""
    if not 0 < chain.cache_tokens < chain.capacity * model.session_tokens:
        return ""
    return f" with {chain.cache_tokens:.0f} tokens in all"


def _objectives(objectives: TokenObjectives | None) -> str:
    if objectives is None:
        return ""
    wanted = []
    if objectives.first_token_ns:
        wanted.append(f"its first token within {_ms(objectives.first_token_ns)}")
    if objectives.per_token_ns:
        wanted.append(f"each further one within {_ms(objectives.per_token_ns)} in the mean")
    return f" A request that names no objectives gets {' and '.join(wanted)}." if wanted else ""


def _stage(stage: Stage, batch: int) -> str:
    blocks = f"blocks {stage.partition.first_block} to {stage.partition.last_block - 1}"
    where = " or ".join(stage.agents)
    enters = f", {stage.input_bytes * batch} bytes enter" if stage.input_bytes else ""
    return f"{blocks} on {where}: {_ms(stage.compute_ns[batch - 1])} a batch{enters}."


def _limits(pipeline: Pipeline, units: TokenUnits | None) -> str:
    batch = pipeline.batch_size
    total = sum(stage.compute_ns[batch - 1] for stage in pipeline.stages)
    slowest = max(pipeline.stages, key=lambda s: s.compute_ns[batch - 1] / len(s.agents))
    rate = batch * NANOSECONDS_PER_SECOND * len(slowest.agents)
    rate_per_s = rate / max(1, slowest.compute_ns[batch - 1])
    most = (
        f"{rate_per_s:.0f} rows/s" if units is None else f"{rate_per_s * units.tokens:.0f} tokens/s"
    )
    return (
        f"Computing takes {_ms(total)} from end to end; at most {most}, limited by"
        f" blocks {slowest.partition.first_block} to {slowest.partition.last_block - 1}."
    )


def _ms(duration_ns: int) -> str:
    return f"{duration_ns / NANOSECONDS_PER_MILLISECOND:.1f} ms"
