"""The choice of a solver under the rules of PPipe's artifact, and of HiGHS's starting solution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from catenary_lab.pools.artifact.reference_rules import (
    MAX_CLASSES,
    MAX_PARTITIONS,
    ReferenceTable,
)
from catenary_lab.pools.artifact.slot_sums import SlotSums
from catenary_scheduler.planning.pooled.assembly import PooledSolution
from catenary_scheduler.planning.pooled.columns.axes import TableAxes, axes_of
from catenary_scheduler.planning.pooled.columns.columns import (
    NO_CLASS,
    PipelineColumns,
    concatenate,
    enumerate_columns,
)
from catenary_scheduler.planning.pooled.columns.device_tables import device_tables
from catenary_scheduler.planning.pooled.columns.pruning import groups_of_equal_rows
from catenary_scheduler.planning.pooled.columns.selection import ChosenPipeline
from catenary_scheduler.planning.pooled.infeasible import check_pipelines
from catenary_scheduler.planning.pooled.problem import PooledModel, PoolingProblem
from catenary_scheduler.planning.pooled.solving.exact import solve_exactly
from catenary_scheduler.planning.pooled.solving.highs import SolverLimits, solve_with_highs
from catenary_scheduler.planning.pooled.solving.milp import MilpTask
from catenary_scheduler.planning.pooled.solving.rounding import keeps_slots
from catenary_scheduler.planning.pooled.solving.solving import (
    SolveRequest,
    all_candidates,
    free_exactly,
)
from catenary_services.errors import InvalidInput


def solve_by_reference_rules(request: SolveRequest) -> PooledSolution | None:
    """Returns the best solution under the artifact's rules, or None."""
    problem = request.problem
    axes = axes_of(problem)
    if request.takes_dp(axes):
        if problem.max_partitions == 1:
            # With nothing to share, a model can have no more than the best pipeline of each class.
            return free_exactly(request, all_candidates(problem), axes, share=False)
        if len(problem.classes) <= MAX_CLASSES and problem.max_partitions == MAX_PARTITIONS:
            levels = [problem.classes[index].levels for index in axes.order]
            tables = [
                ReferenceTable(columns, axes, levels) for columns in all_reference_columns(problem)
            ]
            return solve_exactly(problem, tables, axes, request.objective, request.rates)
        if request.solver == "dp":
            raise InvalidInput(
                "solver",
                f"with the reference's rules dp takes up to {MAX_PARTITIONS} partitions and "
                f"{MAX_CLASSES} classes; use highs",
            )
    return reference_by_highs(request, axes)


def reference_columns(problem: PoolingProblem, model: PooledModel) -> PipelineColumns:
    """Returns every pipeline that keeps the SLO, on all levels; pools may share GPUs."""
    tables = device_tables(problem, model)
    most_spare = problem.max_partitions
    return enumerate_columns(model, tables, most_spare, most_spare=most_spare)


def all_reference_columns(problem: PoolingProblem) -> list[PipelineColumns]:
    """Returns every model's pipelines under the reference's rules, on all levels."""
    columns = []
    for model in problem.models:
        columns.append(reference_columns(problem, model))
        check_pipelines(problem, model, columns[-1])
    return columns


def undominated_in_order(columns: PipelineColumns) -> PipelineColumns:
    """Returns the columns that are of use when virtual GPUs count one by one, by position.

    A pipeline is superfluous if another one is on the same classes in the same order, and each pool
    yields at least as much per GPU with virtual GPUs at least as fine. Of equal ones the one with
    the lower latency stays.
    """
    by_latency = columns.take(np.argsort(columns.latency_us, kind="stable"))
    rate = np.where(by_latency.gpu_class == NO_CLASS, 0.0, by_latency.rate_per_gpu)
    kept = []
    for members in groups_of_equal_rows(by_latency.gpu_class):
        rest = members[np.argsort(-rate[members].sum(axis=1), kind="stable")]
        while len(rest):
            first = rest[0]
            kept.append(first)
            coarser = (by_latency.level[first] % by_latency.level[rest] == 0).all(axis=1)
            rest = rest[~(coarser & (rate[rest] <= rate[first]).all(axis=1))]
    return by_latency.take(np.sort(np.array(kept, dtype=np.int64)))


def reference_by_highs(request: SolveRequest, axes: TableAxes) -> PooledSolution | None:
    """Solves with HiGHS, starting from our own plan where the reference's rules allow it."""
    pruned = [undominated_in_order(columns) for columns in all_reference_columns(request.problem)]
    task = MilpTask(request.problem, pruned, request.objective, request.rates, reference_rules=True)
    task, start = _with_start(task, _known_solutions(request, axes))
    return solve_with_highs(task, SolverLimits(request.seconds_left), start)


def _known_solutions(request: SolveRequest, axes: TableAxes) -> list[PooledSolution]:
    """Returns solutions to start from, the best first; the rules may forbid some of them."""
    if not request.takes_dp(axes):
        return []
    problem, candidates = request.problem, all_candidates(request.problem)
    tables = [SlotSums(per_model.whole, axes) for per_model in candidates]
    found = [
        free_exactly(request, candidates, axes),
        solve_exactly(problem, tables, axes, request.objective, request.rates),
    ]
    return [solution for solution in found if solution is not None]


def _with_start(
    task: MilpTask, known: Sequence[PooledSolution]
) -> tuple[MilpTask, Sequence[Sequence[ChosenPipeline]] | None]:
    """Returns the task with the columns of the first allowed solution, and that solution."""
    for solution in known:
        columns: list[PipelineColumns] = []
        start: list[list[ChosenPipeline]] = []
        for some, pipelines in zip(task.columns, solution.chosen, strict=True):
            own = [pipeline.columns.take(np.array([pipeline.index])) for pipeline in pipelines]
            together = concatenate([some, *own])
            columns.append(together)
            start.append(
                [
                    replace(pipeline, columns=together, index=len(some) + at)
                    for at, pipeline in enumerate(pipelines)
                ]
            )
        extended = replace(task, columns=columns)
        if keeps_slots(extended, start):
            return extended, start
    return task, None
