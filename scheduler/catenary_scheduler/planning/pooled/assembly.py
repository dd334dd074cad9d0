"""Assembly of chosen pipelines into a `PooledPlan`, and what the plan promises."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from catenary_scheduler.planning.pooled.columns.selection import ChosenPipeline, used_gpus
from catenary_scheduler.planning.pooled.objectives import Objective, price_per_gpu
from catenary_scheduler.planning.pooled.problem import (
    PooledModelPlan,
    PooledPartition,
    PooledPipeline,
    PooledPlan,
    PoolingProblem,
)
from catenary_scheduler.planning.pooled.timing import pool_rate_rps


@dataclass(frozen=True, slots=True)
class PooledSolution:
    """Result of a solver: the chosen pipelines, and how good they are."""

    chosen: Sequence[Sequence[ChosenPipeline]]
    """Pipelines of each model, in the problem's order of models."""
    objective: float
    """Value that the plan maximises (throughput) or minimises (cost, GPUs)."""
    bound: float
    """Bound on the objective that no plan within the rules can pass."""
    optimal: bool
    """True if objective and bound differ by no more than the solver's tolerance."""
    solver: str


def price_of(
    problem: PoolingProblem, chosen: Sequence[Sequence[ChosenPipeline]], objective: Objective
) -> float:
    """Returns the price of the GPUs in use under an objective."""
    used = used_gpus(chosen, len(problem.classes))
    prices = price_per_gpu(problem, objective)
    return float(sum(gpus * price for gpus, price in zip(used, prices, strict=True)))


def least_share(problem: PoolingProblem, chosen: Sequence[Sequence[ChosenPipeline]]) -> float:
    """Returns the least throughput / weight over the models."""
    return min(
        sum(pipeline.throughput_rps for pipeline in pipelines) / model.weight
        for model, pipelines in zip(problem.models, chosen, strict=True)
    )


def assemble(problem: PoolingProblem, solution: PooledSolution) -> PooledPlan:
    """Returns the plan of a solution, without `seconds`, `utilisation` and `binding`."""
    return PooledPlan(
        objective=solution.objective,
        bound=solution.bound,
        optimal=solution.optimal,
        solver=solution.solver,
        seconds=0.0,
        models=tuple(
            _model_plan(problem, model.name, pipelines)
            for model, pipelines in zip(problem.models, solution.chosen, strict=True)
        ),
    )


def with_promises(
    problem: PoolingProblem, plan: PooledPlan, loads: Mapping[str, float]
) -> PooledPlan:
    """Returns the plan with its utilisation at the loads, and the constraints that bind it.

    Args:
        problem: The problem that the plan solves.
        plan: The plan.
        loads: Requests per second of each model that the plan is made for.
    """
    busy = busy_gpus(problem, plan, loads)
    utilisation = {
        gpu.name: busy[gpu.name] / gpu.count if gpu.count else 0.0 for gpu in problem.classes
    }
    return replace(plan, utilisation=utilisation, binding=_binding(problem, plan, loads))


def busy_gpus(
    problem: PoolingProblem, plan: PooledPlan, loads: Mapping[str, float]
) -> dict[str, float]:
    """Returns the number of GPUs of each class that the loads keep busy."""
    models = {model.name: model for model in problem.models}
    classes = {gpu.name: gpu for gpu in problem.classes}
    busy = dict.fromkeys(classes, 0.0)
    for served in plan.models:
        for pipeline in served.pipelines:
            load = loads[served.name] * pipeline.throughput_rps / served.throughput_rps
            for part in pipeline.partitions:
                capacity = pool_rate_rps(
                    models[served.name], classes[part.gpu], part, pipeline.batch
                )
                busy[part.gpu] += load / capacity * part.gpus
    return busy


def gpus_in_use(plan: PooledPlan) -> dict[str, int]:
    """Returns the number of whole GPUs of each class that the plan uses.

    Fractions at one position of a model share GPUs.
    """
    used: dict[str, int] = {}
    for model in plan.models:
        fractions: dict[tuple[int, str], float] = {}
        for pipeline in model.pipelines:
            for position, part in enumerate(pipeline.partitions):
                key = (position, part.gpu)
                fractions[key] = fractions.get(key, 0.0) + part.gpus
        for (_, gpu), fraction in fractions.items():
            used[gpu] = used.get(gpu, 0) + int(np.ceil(fraction - 1e-6))
    return used


def _model_plan(
    problem: PoolingProblem, name: str, pipelines: Sequence[ChosenPipeline]
) -> PooledModelPlan:
    built = [_pipeline(problem, pipeline) for pipeline in pipelines]
    built.sort(key=lambda pipeline: -pipeline.throughput_rps)
    return PooledModelPlan(
        name=name,
        throughput_rps=sum(pipeline.throughput_rps for pipeline in built),
        pipelines=tuple(built),
    )


def _pipeline(problem: PoolingProblem, chosen: ChosenPipeline) -> PooledPipeline:
    columns, at = chosen.columns, chosen.index
    partitions = []
    for position, vgpus in enumerate(chosen.vgpus):
        if vgpus:
            level = int(columns.level[at, position])
            partitions.append(
                PooledPartition(
                    gpu=problem.classes[int(columns.gpu_class[at, position])].name,
                    level=level,
                    first_block=int(columns.cuts[at, position]),
                    last_block=int(columns.cuts[at, position + 1]),
                    vgpus=vgpus,
                    gpus=vgpus / level,
                )
            )
    return PooledPipeline(
        batch=int(columns.batch[at]),
        throughput_rps=chosen.throughput_rps,
        latency_us=float(columns.latency_us[at]),
        partitions=tuple(partitions),
    )


def _binding(
    problem: PoolingProblem, plan: PooledPlan, loads: Mapping[str, float]
) -> tuple[str, ...]:
    """Returns sentences on models that get only their load, and classes without idle GPUs."""
    tight = [
        f"{served.name} gets {served.throughput_rps:.1f} requests/s and no more"
        for served in plan.models
        if served.throughput_rps <= loads[served.name] * (1 + 1e-6)
    ]
    used = gpus_in_use(plan)
    full = [
        f"all {gpu.count} GPUs of class {gpu.name} are in use"
        for gpu in problem.classes
        if gpu.count and used.get(gpu.name, 0) >= gpu.count
    ]
    return (*tight, *full)
