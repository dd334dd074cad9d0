"""Reasons for which an agent is used by no pipeline, and what would use it."""

from __future__ import annotations

from collections.abc import Iterable

from catenary_scheduler.planning.comparing.promises import Groups
from catenary_scheduler.planning.placement import Placement
from catenary_scheduler.planning.pooled.problem import GpuClass, PooledModel, PoolingProblem
from catenary_scheduler.planning.requirements import agents_of
from catenary_services.domain.ids import AgentId


def idle_reasons(problem: PoolingProblem, in_time: Placement, groups: Groups) -> dict[AgentId, str]:
    """Returns the reason, in words, for every agent that no pipeline within the objectives uses.

    Args:
        problem: The task with the times of every class.
        in_time: The placement, without pipelines that are too slow.
        groups: The class of every agent.
    """
    used = agents_of(in_time)
    reasons = {gpu.name: _reason(gpu, problem.models) for gpu in problem.classes}
    return {agent: reasons[group] for agent, group in groups.items() if agent not in used}


def _reason(gpu: GpuClass, models: Iterable[PooledModel]) -> str:
    said = [_of_model(gpu, model) for model in models]
    return "; ".join(dict.fromkeys(said))


def _of_model(gpu: GpuClass, model: PooledModel) -> str:
    memory, weights = gpu.memory_bytes, model.block_weight_bytes
    if memory is not None and weights and min(weights) > memory:
        needed = min(weights) / 1e6
        return f"no block of {model.name} fits into its memory; {needed:.0f} MB would hold one"
    taken_us = float(model.latency_us[gpu.name, 1][:, 0].sum())
    free_us = model.slo_us - model.margin_us
    if taken_us > free_us:
        share = free_us / model.slo_us
        slo_ms = taken_us / share / 1e3
        return (
            f"one row of {model.name} takes {taken_us / 1e3:.1f} ms on {gpu.name}, and the"
            f" objective leaves {free_us / 1e3:.1f} ms; an objective of {slo_ms:.0f} ms would use"
            " it for whole models"
        )
    if memory is not None and sum(weights) > memory:
        needed = sum(weights) / 1e9
        return (
            f"{model.name} does not fit into its memory as a whole, and no pool gains by a part of"
            f" it; {needed:.1f} GB, or more agents of its class, would use it"
        )
    return f"no pool of {model.name} gains by it; a larger share of the load would use it"
