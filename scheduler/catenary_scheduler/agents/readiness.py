"""Tells which models can be served at this moment, and why the others cannot."""

from __future__ import annotations

from collections.abc import Iterable

from catenary_scheduler.agents.registry import AgentRegistry, hosts_in
from catenary_scheduler.dispatch.availability import Availability
from catenary_scheduler.planning import Placement, requirements
from catenary_services.domain.ids import ModelKey
from catenary_services.domain.plan import Plan


def judge(
    models: Iterable[ModelKey],
    plan: Plan | None,
    target: Placement | None,
    registry: AgentRegistry,
    availability: Availability,
) -> dict[ModelKey, str]:
    """Returns for every model the reason why it is not ready; empty if it is."""
    plans = {each.model: each for each in plan.models} if plan else {}
    serves = availability.can_serve
    problems = {}
    for model in models:
        served = plans.get(model)
        if served is None:
            problems[model] = _loading(model, target, registry, availability)
        elif any(requirements.can_serve(pipeline, serves) for pipeline in served.pipelines) or any(
            requirements.can_generate(chain, serves) for chain in served.chains
        ):
            problems[model] = ""
        else:
            problems[model] = "; ".join(requirements.empty_pools(served, serves))
    return problems


def _loading(
    model: ModelKey, target: Placement | None, registry: AgentRegistry, availability: Availability
) -> str:
    if target is None:
        return "no plan yet"
    lacking = requirements.missing(target, hosts_in(registry), lambda agent: False)
    mine = [
        (agent, key)
        for agent, key in lacking
        if key.model == model and not availability.failure(agent, key)
    ]
    absent = {a for a, _ in mine if a not in registry or registry[a].session is None}
    if absent:
        return f"waiting for {', '.join(sorted(absent))}"
    if mine:
        return "loading " + ", ".join(f"{key} on {agent}" for agent, key in mine)
    return "no plan contains it"
