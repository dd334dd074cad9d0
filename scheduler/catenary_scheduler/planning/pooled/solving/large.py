"""The tasks that HiGHS takes."""

from __future__ import annotations

from collections.abc import Sequence

from catenary_scheduler.planning.pooled.assembly import Solution
from catenary_scheduler.planning.pooled.columns.candidates import Candidates
from catenary_scheduler.planning.pooled.solving.highs import Limits, solve_with_highs
from catenary_scheduler.planning.pooled.solving.milp import Task
from catenary_scheduler.planning.pooled.solving.solving import Request


def free_by_highs(request: Request, candidates: Sequence[Candidates]) -> Solution | None:
    """Returns the best solution found on pools of whole GPUs, or None."""
    pruned = [per_model.pruned for per_model in candidates]
    task = Task(request.problem, pruned, request.objective, request.rates)
    return solve_with_highs(task, Limits(request.seconds_left()))
