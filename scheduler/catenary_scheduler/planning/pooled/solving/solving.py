"""Which solver takes a task."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from catenary_scheduler.planning.pooled.assembly import PooledSolution
from catenary_scheduler.planning.pooled.columns.axes import TableAxes, axes_of
from catenary_scheduler.planning.pooled.columns.candidates import ColumnCandidates, candidates_of
from catenary_scheduler.planning.pooled.infeasible import why_no_pipeline
from catenary_scheduler.planning.pooled.objectives import Objective
from catenary_scheduler.planning.pooled.problem import PoolingProblem
from catenary_scheduler.planning.pooled.rules.free_rules import FreeRateTable
from catenary_scheduler.planning.pooled.solving.exact import solve_exactly

Solver = Literal["auto", "dp", "highs"]

_MOST_CELLS, _MOST_ROWS = 20_000, 400
"""Of a table that the dynamic programme fills in about a second."""


@dataclass(frozen=True, slots=True)
class SolveRequest:
    """A task and who is to solve it."""

    problem: PoolingProblem
    objective: Objective
    rates: Sequence[float] | None
    """What every model must reach; None asks for the most throughput."""
    solver: Solver
    seconds_left: Callable[[], float]
    """For HiGHS."""

    def takes_dp(self, axes: TableAxes) -> bool:
        """Returns whether the dynamic programme is asked for, or is quick enough to take."""
        small = axes.cells <= _MOST_CELLS and axes.rows <= _MOST_ROWS
        return self.solver == "dp" or (self.solver == "auto" and small)


Solve = Callable[[SolveRequest], PooledSolution | None]
"""Returns the best solution under some rules, or None if the cluster is too small."""


def solve_by_free_rules(request: SolveRequest) -> PooledSolution | None:
    """Returns the best solution under our own rules, or None if the cluster is too small."""
    candidates = all_candidates(request.problem)
    axes = axes_of(request.problem)
    if request.takes_dp(axes):
        return free_exactly(request, candidates, axes)
    # Imported where it is needed: HiGHS takes longer to load than a small plan takes to make.
    from catenary_scheduler.planning.pooled.solving.highs import SolverLimits, solve_with_highs
    from catenary_scheduler.planning.pooled.solving.milp import MilpTask

    pruned = [per_model.pruned for per_model in candidates]
    task = MilpTask(request.problem, pruned, request.objective, request.rates)
    return solve_with_highs(task, SolverLimits(request.seconds_left()))


def free_exactly(
    request: SolveRequest,
    candidates: Sequence[ColumnCandidates],
    axes: TableAxes,
    *,
    share: bool = True,
) -> PooledSolution | None:
    """Returns the optimum of our own rules by the dynamic programme, or None.

    Args:
        request: What is to be solved.
        candidates: Per model.
        axes: Of the tables.
        share: Whether two pipelines may share a GPU.
    """
    tables = [FreeRateTable(per_model, axes, share=share) for per_model in candidates]
    return solve_exactly(request.problem, tables, axes, request.objective, request.rates)


def all_candidates(problem: PoolingProblem) -> list[ColumnCandidates]:
    """Returns the candidates of every model; raises for one without a feasible pipeline."""
    candidates = []
    for model in problem.models:
        candidates.append(candidates_of(problem, model))
        if not len(candidates[-1].whole):
            raise why_no_pipeline(problem, model)
    return candidates
