"""Explanation of a plan in plain words."""

from __future__ import annotations

from catenary_scheduler.planning.pooled.assembly import gpus_in_use
from catenary_scheduler.planning.pooled.problem import (
    PooledModel,
    PooledPartition,
    PooledPipeline,
    PooledPlan,
    PoolingProblem,
)

_EXACT = 1e-9
"""Relative gap that comes from rounding errors alone."""


def explain_plan(problem: PoolingProblem, plan: PooledPlan) -> list[str]:
    """Returns sentences that say what the plan does, what it promises and what binds it."""
    models = {model.name: model for model in problem.models}
    lines = []
    for served in plan.models:
        model = models[served.name]
        lines.append(
            f"{served.name} can serve {served.throughput_rps:.1f} requests/s "
            f"within {_milliseconds(model.slo_us)}{_margin(model)}:"
        )
        lines += [f"  {_pipeline(pipeline)}" for pipeline in served.pipelines]
    return lines + explain_limits(problem, plan)


def explain_limits(problem: PoolingProblem, plan: PooledPlan) -> list[str]:
    """Returns sentences on the GPUs in use, on what binds the plan and on what is proven."""
    lines = _classes(problem, plan)
    lines += [f"What binds: {fact}." for fact in plan.binding]
    return [*lines, _proof(plan)]


def _milliseconds(microseconds: float) -> str:
    return f"{microseconds / 1e3:.1f} ms"


def _margin(model: PooledModel) -> str:
    if not model.margin_us:
        return ""
    return f", {_milliseconds(model.margin_us)} of it kept free for queueing"


def _pipeline(pipeline: PooledPipeline) -> str:
    path = ", then ".join(_partition(part) for part in pipeline.partitions)
    return (
        f"{pipeline.throughput_rps:.1f} requests/s in batches of {pipeline.batch} that take "
        f"{_milliseconds(pipeline.latency_us)}: {path}"
    )


def _partition(part: PooledPartition) -> str:
    if part.last_block - part.first_block == 1:
        blocks = f"block {part.first_block}"
    else:
        blocks = f"blocks {part.first_block} to {part.last_block - 1}"
    if part.level == 1:
        return f"{blocks} on {part.vgpus} {part.gpu}"
    noun = "virtual GPU" if part.vgpus == 1 else "virtual GPUs"
    return f"{blocks} on {part.vgpus} {noun} of 1/{part.level} {part.gpu}"


def _classes(problem: PoolingProblem, plan: PooledPlan) -> list[str]:
    used = gpus_in_use(plan)
    lines = []
    for gpu in problem.classes:
        line = f"{gpu.name}: {used.get(gpu.name, 0)} of {gpu.count} GPUs in use"
        if gpu.name in plan.utilisation:
            line += f", {plan.utilisation[gpu.name]:.0%} of all their time at the planned load"
        lines.append(f"{line}.")
    return lines


def _proof(plan: PooledPlan) -> str:
    gap = abs(plan.bound - plan.objective) / max(abs(plan.objective), 1e-12)
    if plan.optimal and gap < _EXACT:
        return f"No plan within the rules does better (proven by {plan.solver})."
    return f"A better plan could gain {100 * gap:.3g}% at most (bound of {plan.solver})."
