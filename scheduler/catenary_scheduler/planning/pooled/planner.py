"""Entry point `plan_pools`: from a problem to a plan that says what it promises."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import get_args

from catenary_scheduler.planning.pooled.assembly import PooledSolution, assemble, with_promises
from catenary_scheduler.planning.pooled.columns.selection import spend_left_over
from catenary_scheduler.planning.pooled.infeasible import check_problem, too_few_gpus
from catenary_scheduler.planning.pooled.objectives import MaxThroughput, Objective, required_rates
from catenary_scheduler.planning.pooled.problem import PooledModel, PooledPlan, PoolingProblem
from catenary_scheduler.planning.pooled.solving.solving import (
    Solve,
    Solver,
    SolveRequest,
    solve_by_free_rules,
)
from catenary_services.errors import InvalidInput

Clock = Callable[[], float]
"""Returns a time in seconds, of which only differences matter."""

DEFAULT_TIME_LIMIT_S = 9.0
"""Time limit of a plan in seconds. What HiGHS may take beyond it keeps a plan within 10 s."""


def plan_pools(
    problem: PoolingProblem,
    *,
    solve: Solve = solve_by_free_rules,
    solver: Solver = "auto",
    objective: Objective | None = None,
    time_limit_s: float = DEFAULT_TIME_LIMIT_S,
    clock: Clock | None = None,
) -> PooledPlan:
    """Returns the best plan of pooled pipelines within the rules.

    Args:
        problem: The cluster and the models.
        solve: Solver for a set of rules. Our own rules are: any number of pipelines per model;
            every pool has whole GPUs, except that two pipelines of a model may share one GPU at the
            same position, cut into equal virtual GPUs (the dynamic programme only).
        solver: "dp" is exact, for up to about 200 GPUs of two classes; "highs" is for any cluster
            and reports its gap; "auto" takes "dp" where that is fast.
        objective: The objective; `MaxThroughput()` if None.
        time_limit_s: Limit in seconds of everything: enumeration, search, and the reason why there
            is no plan. A first plan is made however short it is.
        clock: Clock for `PooledPlan.seconds` and the limit. With None only HiGHS is held to it.

    Raises:
        InvalidInput: The problem contradicts itself.
        PlanInfeasible: There is no plan. The error names the model and the constraint that rules
            every plan out, and for an SLO the nearest feasible one.
    """
    if solver not in get_args(Solver):
        raise InvalidInput("solver", f"must be one of {', '.join(get_args(Solver))}")
    check_problem(problem)
    begun = clock() if clock else 0.0
    goal = objective or MaxThroughput()
    rates = None if isinstance(goal, MaxThroughput) else required_rates(problem, goal)

    def seconds_left() -> float:
        return time_limit_s - (clock() - begun if clock else 0.0)

    request = SolveRequest(problem, goal, rates, solver, seconds_left)
    too_few = 0 < sum(gpu.count for gpu in problem.classes) < len(problem.models)
    solution = None if too_few else solve(request)
    if solution is None:
        raise too_few_gpus(problem, rates, partial(_alone, request, solve))
    plan = _with_promises(problem, solution, goal, rates)
    return replace(plan, seconds=clock() - begun if clock else 0.0)


def _alone(request: SolveRequest, solve: Solve, model: PooledModel) -> float | None:
    """Returns the rate that a model would reach with all GPUs; None if the time is up."""
    if request.seconds_left() <= 0:
        return None
    single = replace(request.problem, models=(replace(model, weight=1.0),))
    solution = solve(replace(request, problem=single, objective=MaxThroughput(), rates=None))
    return solution.objective if solution else 0.0


def _with_promises(
    problem: PoolingProblem,
    solution: PooledSolution,
    goal: Objective,
    rates: Sequence[float] | None,
) -> PooledPlan:
    loads = rates or [model.weight * solution.objective for model in problem.models]
    if isinstance(goal, MaxThroughput):
        counts = [gpu.count for gpu in problem.classes]
        solution = replace(solution, chosen=spend_left_over(solution.chosen, loads, counts))
    by_name = {model.name: load for model, load in zip(problem.models, loads, strict=True)}
    return with_promises(problem, assemble(problem, solution), by_name)
