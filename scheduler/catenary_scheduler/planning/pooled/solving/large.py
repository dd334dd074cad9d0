"""The tasks that HiGHS takes."""

from __future__ import annotations

from collections.abc import Sequence

from catenary_scheduler.planning.pooled.assembly import PooledSolution
from catenary_scheduler.planning.pooled.columns.candidates import ColumnCandidates
from catenary_scheduler.planning.pooled.solving.highs import SolverLimits, solve_with_highs
from catenary_scheduler.planning.pooled.solving.milp import MilpTask
from catenary_scheduler.planning.pooled.solving.solving import SolveRequest


def free_by_highs(
    request: SolveRequest, candidates: Sequence[ColumnCandidates]
) -> PooledSolution | None:
    """Returns the best solution found on pools of whole GPUs, or None."""
    pruned = [per_model.pruned for per_model in candidates]
    task = MilpTask(request.problem, pruned, request.objective, request.rates)
    return solve_with_highs(task, SolverLimits(request.seconds_left()))
