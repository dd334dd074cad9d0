"""Choice of the solver for a task."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from catenary_scheduler.planning.pooled.assembly import PooledSolution
from catenary_scheduler.planning.pooled.columns.axes import TableAxes, axes_of
from catenary_scheduler.planning.pooled.columns.candidates import ColumnCandidates, candidates_of
from catenary_scheduler.planning.pooled.columns.columns import PipelineColumns, enumerate_columns
from catenary_scheduler.planning.pooled.columns.device_tables import device_tables
from catenary_scheduler.planning.pooled.columns.pruning import undominated
from catenary_scheduler.planning.pooled.infeasible import check_pipelines
from catenary_scheduler.planning.pooled.objectives import Objective
from catenary_scheduler.planning.pooled.problem import PoolingProblem
from catenary_scheduler.planning.pooled.rules.free_rules import FreeRateTable
from catenary_scheduler.planning.pooled.solving.exact import solve_exactly

Solver = Literal["auto", "dp", "highs"]

_MOST_CELLS, _MOST_ROWS = 40_000, 1_000
"""Size of a table, in cells and rows, up to which the dynamic programme is worth its time."""
_CELL_S = 2e-5
"""Seconds for a cell of the dynamic programme, generously."""
_PART_FOR_COLUMNS = 0.4
"""Part of the time that is left in which pipelines of all lengths are enumerated."""


@dataclass(frozen=True, slots=True)
class SolveRequest:
    """A task, its objective, and the solver that is asked for."""

    problem: PoolingProblem
    objective: Objective
    rates: Sequence[float] | None
    """Rate that each model must reach; None asks for the most throughput."""
    solver: Solver
    seconds_left: Callable[[], float]
    """Returns the seconds that are left for the whole answer."""

    def takes_dp(self, axes: TableAxes) -> bool:
        """Returns True if the dynamic programme is asked for, or fast enough to be chosen."""
        small = axes.cells <= _MOST_CELLS and axes.rows <= _MOST_ROWS
        seconds = axes.cells * len(self.problem.models) * _CELL_S
        in_time = small and seconds <= self.seconds_left()
        return self.solver == "dp" or (self.solver == "auto" and in_time)


Solve = Callable[[SolveRequest], PooledSolution | None]
"""Returns the best solution under some rules, or None if the cluster is too small."""


def solve_by_free_rules(request: SolveRequest) -> PooledSolution | None:
    """Returns the best solution under our own rules, or None if the cluster is too small."""
    problem = request.problem
    axes = axes_of(problem)
    if request.takes_dp(axes):
        return free_exactly(request, all_candidates(problem), axes)
    # HiGHS is imported only here, because it takes longer to load than a small plan takes to make.
    from catenary_scheduler.planning.pooled.solving.highs import SolverLimits, solve_with_highs
    from catenary_scheduler.planning.pooled.solving.milp import MilpTask

    columns, complete = _columns_in_time(request)
    task = MilpTask(problem, columns, request.objective, request.rates, complete=complete)
    return solve_with_highs(task, SolverLimits(request.seconds_left))


def _columns_in_time(request: SolveRequest) -> tuple[list[PipelineColumns], list[bool]]:
    """Returns columns of each model, and whether they are all it has.

    When the time for that is up, the other models have the shortest pipelines only.
    """
    problem = request.problem
    limit = request.seconds_left()
    columns: list[PipelineColumns] = []
    complete: list[bool] = []
    for model in problem.models:
        tables = device_tables(problem, model)
        used = 1 - request.seconds_left() / limit if limit > 0 else 1.0
        late = used > _PART_FOR_COLUMNS if columns else False
        shortest = 1 if used > 1.5 * _PART_FOR_COLUMNS else 2
        length = min(shortest, problem.max_partitions) if late else problem.max_partitions
        for longest in range(length, problem.max_partitions + 1):
            found = enumerate_columns(model, tables, longest, most_spare=0)
            if len(found):
                break
        found = found.take(np.flatnonzero(~found.spare.any(axis=1)))
        if longest == problem.max_partitions:
            check_pipelines(problem, model, found)
        columns.append(undominated(found, len(problem.classes)))
        complete.append(longest == problem.max_partitions)
    return columns, complete


def free_exactly(
    request: SolveRequest,
    candidates: Sequence[ColumnCandidates],
    axes: TableAxes,
    *,
    share: bool = True,
) -> PooledSolution | None:
    """Returns the optimum under our own rules by the dynamic programme; None if there is none.

    Args:
        request: The task to solve.
        candidates: Candidates of each model.
        axes: The axes of the tables.
        share: Whether two pipelines may share a GPU.
    """
    tables = [FreeRateTable(per_model, axes, share=share) for per_model in candidates]
    return solve_exactly(request.problem, tables, axes, request.objective, request.rates)


def all_candidates(problem: PoolingProblem) -> list[ColumnCandidates]:
    """Returns the candidates of every model.

    Raises PlanInfeasible for a model without a pipeline that the cluster has GPUs for.
    """
    candidates = []
    for model in problem.models:
        candidates.append(candidates_of(problem, model))
        check_pipelines(problem, model, candidates[-1].whole)
    return candidates
