"""Choice of the solver for a task."""

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
"""Size of a table that the dynamic programme fills in about a second: cells and rows."""


@dataclass(frozen=True, slots=True)
class SolveRequest:
    """A task, its objective, and the solver that is asked for."""

    problem: PoolingProblem
    objective: Objective
    rates: Sequence[float] | None
    """Rate that each model must reach; None asks for the most throughput."""
    solver: Solver
    seconds_left: Callable[[], float]
    """Returns the seconds that HiGHS may still take."""

    def takes_dp(self, axes: TableAxes) -> bool:
        """Returns True if the dynamic programme is asked for, or fast enough to be chosen."""
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
    # HiGHS is imported only here, because it takes longer to load than a small plan takes to make.
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

    Raises PlanInfeasible for a model without a feasible pipeline.
    """
    candidates = []
    for model in problem.models:
        candidates.append(candidates_of(problem, model))
        if not len(candidates[-1].whole):
            raise why_no_pipeline(problem, model)
    return candidates
