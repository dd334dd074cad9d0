"""The tasks that HiGHS takes, and what its search begins with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from catenary_scheduler.planning.pooled.assembly import Solution
from catenary_scheduler.planning.pooled.columns.axes import Axes
from catenary_scheduler.planning.pooled.columns.candidates import Candidates
from catenary_scheduler.planning.pooled.columns.columns import Columns, concatenate
from catenary_scheduler.planning.pooled.columns.pruning import undominated_in_order
from catenary_scheduler.planning.pooled.columns.selection import Chosen
from catenary_scheduler.planning.pooled.rules.slot_sums import SlotSums
from catenary_scheduler.planning.pooled.solving.exact import solve_exactly
from catenary_scheduler.planning.pooled.solving.highs import Limits, solve_with_highs
from catenary_scheduler.planning.pooled.solving.milp import Task
from catenary_scheduler.planning.pooled.solving.rounding import keeps_slots
from catenary_scheduler.planning.pooled.solving.solving import (
    Request,
    all_candidates,
    all_reference_columns,
    free_exactly,
)


def free_by_highs(request: Request, candidates: Sequence[Candidates]) -> Solution | None:
    """Returns the best solution found on pools of whole GPUs, or None."""
    pruned = [per_model.pruned for per_model in candidates]
    task = Task(request.problem, pruned, request.objective, request.rates)
    return solve_with_highs(task, Limits(request.seconds_left()))


def reference_by_highs(request: Request, axes: Axes) -> Solution | None:
    """Solves with HiGHS, beginning with our own plan where the reference's rules allow it."""
    pruned = [undominated_in_order(columns) for columns in all_reference_columns(request.problem)]
    task = Task(request.problem, pruned, request.objective, request.rates, reference_rules=True)
    task, start = _with_start(task, _known_solutions(request, axes))
    return solve_with_highs(task, Limits(request.seconds_left()), start)


def _known_solutions(request: Request, axes: Axes) -> list[Solution]:
    """Returns solutions to begin with, the best first; the rules may forbid some of them."""
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
    task: Task, known: Sequence[Solution]
) -> tuple[Task, Sequence[Sequence[Chosen]] | None]:
    """Returns the task with the columns of the first allowed solution, and that solution."""
    for solution in known:
        columns: list[Columns] = []
        start: list[list[Chosen]] = []
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
