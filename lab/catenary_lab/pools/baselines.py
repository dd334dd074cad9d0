"""The baseline planners NP and DART-r (PPipe, section 7.1).

NP ("no partitioning") runs every model whole, each GPU by itself. DART-r cuts a model over pairs
of one GPU of each class, on the shares of the GPUs that NP gives the models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from catenary_scheduler.planning.pooled.assembly import (
    PooledSolution,
    assemble,
    gpus_in_use,
    least_share,
    with_promises,
)
from catenary_scheduler.planning.pooled.columns.axes import TableAxes, axes_of
from catenary_scheduler.planning.pooled.columns.candidates import ColumnCandidates, candidates_of
from catenary_scheduler.planning.pooled.columns.selection import ChosenPipeline
from catenary_scheduler.planning.pooled.infeasible import check_problem, why_no_pipeline
from catenary_scheduler.planning.pooled.objectives import MaxThroughput
from catenary_scheduler.planning.pooled.planner import Clock, plan_pools
from catenary_scheduler.planning.pooled.problem import (
    PooledModel,
    PooledPlan,
    PoolingProblem,
)
from catenary_scheduler.planning.pooled.rules.free_rules import FreeRateTable
from catenary_scheduler.planning.pooled.solving.exact import solve_exactly
from catenary_services.errors import InvalidInput, PlanInfeasible

Split = Mapping[str, Mapping[str, int]]
"""Number of GPUs that are a model's own, by model and class."""

_PARTITIONS_OF_A_PAIR = 2


def plan_without_partitioning(problem: PoolingProblem, *, clock: Clock | None = None) -> PooledPlan:
    """Returns the NP plan: one partition, whole GPUs, most throughput.

    Raises:
        PlanInfeasible: As in `plan_pools`; more often, since no model may be cut.
    """
    plan = plan_pools(_undivided(problem, 1), clock=clock)
    return replace(plan, solver=f"np/{plan.solver}")


def plan_dart_r(
    problem: PoolingProblem, *, split: Split | None = None, clock: Clock | None = None
) -> PooledPlan:
    """Returns the DART-r plan.

    Args:
        problem: A problem with one or two classes of GPUs.
        split: The GPUs of each model; None: NP's. GPUs that no model has are divided evenly,
            rounded down.
        clock: Clock for `PooledPlan.seconds`.

    Raises:
        InvalidInput: There are more classes than a pair has GPUs.
        PlanInfeasible: NP, or a model on its share, has no plan.
    """
    begun = clock() if clock else 0.0
    check_problem(problem)
    if len(problem.classes) > _PARTITIONS_OF_A_PAIR:
        raise InvalidInput("planner", "dart-r pairs GPUs of two classes; the cluster has more")
    shares = _with_unused(problem, split or _np_split(problem))
    chosen = [_on_share(problem, model, shares[model.name]) for model in problem.models]
    objective = least_share(problem, chosen)
    solution = PooledSolution(chosen, objective, objective, True, "dart-r")
    loads = {model.name: model.weight * objective for model in problem.models}
    plan = with_promises(problem, assemble(problem, solution), loads)
    return replace(plan, seconds=clock() - begun if clock else 0.0)


def _undivided(problem: PoolingProblem, max_partitions: int) -> PoolingProblem:
    classes = tuple(replace(gpu, levels=(1,)) for gpu in problem.classes)
    return replace(problem, classes=classes, max_partitions=max_partitions)


def _np_split(problem: PoolingProblem) -> Split:
    """Returns the GPUs that the NP plan needs, without left-over ones."""
    whole = _undivided(problem, 1)
    axes = axes_of(whole)
    tables = [FreeRateTable(_candidates(whole, model), axes) for model in whole.models]
    solution = solve_exactly(whole, tables, axes, MaxThroughput(), None)
    if solution is None:
        raise PlanInfeasible("np: the cluster has too few GPUs for all models")
    plan = assemble(whole, solution)
    return {served.name: gpus_in_use(replace(plan, models=(served,))) for served in plan.models}


def _candidates(problem: PoolingProblem, model: PooledModel) -> ColumnCandidates:
    candidates = candidates_of(problem, model)
    if not len(candidates.whole):
        raise why_no_pipeline(problem, model)
    return candidates


def _with_unused(problem: PoolingProblem, split: Split) -> Split:
    shares: dict[str, dict[str, int]] = {model.name: {} for model in problem.models}
    for gpu in problem.classes:
        taken = sum(own.get(gpu.name, 0) for own in split.values())
        extra = (gpu.count - taken) // len(problem.models)
        for name, share in shares.items():
            share[gpu.name] = split.get(name, {}).get(gpu.name, 0) + extra
    return shares


def _on_share(
    problem: PoolingProblem, model: PooledModel, share: Mapping[str, int]
) -> list[ChosenPipeline]:
    """Returns as many pairs as the share holds, and the more numerous class alone for the rest."""
    pairs = min((share[gpu.name] for gpu in problem.classes), default=0)
    chosen = []
    if pairs and len(problem.classes) == _PARTITIONS_OF_A_PAIR:
        chosen += _best(problem, model, _PARTITIONS_OF_A_PAIR, [1, 1], pairs)
    else:
        pairs = 0
    for index, gpu in enumerate(problem.classes):
        rest = share[gpu.name] - pairs
        if rest:
            counts = [int(at == index) for at in range(len(problem.classes))]
            chosen += _best(problem, model, 1, counts, rest)
    if not chosen:
        raise PlanInfeasible(
            f"{model.name}: dart-r has no pipeline on its share of the GPUs",
            details={"model": model.name, "constraint": "gpus"},
        )
    return chosen


def _best(
    problem: PoolingProblem,
    model: PooledModel,
    max_partitions: int,
    counts: Sequence[int],
    times: int,
) -> list[ChosenPipeline]:
    """Returns the best pipelines on a tiny cluster, each `times` times; none if there are none."""
    classes = tuple(
        replace(gpu, count=count, levels=(1,))
        for gpu, count in zip(problem.classes, counts, strict=True)
    )
    tiny = replace(problem, classes=classes, max_partitions=max_partitions)
    axes = TableAxes(tuple(range(len(counts))), tuple(counts))
    candidates = candidates_of(tiny, model)
    if not len(candidates.whole):
        return []
    table = FreeRateTable(candidates, axes)
    return [
        replace(pipeline, vgpus=tuple(times * vgpus for vgpus in pipeline.vgpus))
        for pipeline in table.pipelines(tuple(counts))
    ]
