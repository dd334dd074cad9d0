"""Solver for clusters of any size, which improves on a first plan as long as there is time.

The first plan is the relaxation, rounded. Then models are given other shares of the GPUs
(`improving`), and what gap is left HiGHS tries to close with the whole programme (`milp`), without
the columns that cannot be part of a better plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import highspy
import numpy as np
import numpy.typing as npt

from catenary_scheduler.planning.pooled.assembly import PooledSolution, least_share, price_of
from catenary_scheduler.planning.pooled.columns.columns import PipelineColumns
from catenary_scheduler.planning.pooled.columns.device_tables import Floats, Ints
from catenary_scheduler.planning.pooled.columns.selection import ChosenPipeline
from catenary_scheduler.planning.pooled.objectives import MaxThroughput, price_per_gpu
from catenary_scheduler.planning.pooled.solving.improving import PlanBounds, TargetSearch
from catenary_scheduler.planning.pooled.solving.milp import MilpProgramme, MilpTask, build
from catenary_scheduler.planning.pooled.solving.paths import least_price
from catenary_scheduler.planning.pooled.solving.relaxation import Relaxation, may_improve, relax
from catenary_scheduler.planning.pooled.solving.rounding import rounded
from catenary_scheduler.planning.pooled.solving.shares import share_of

PROVEN_GAP = 1e-4
"""Relative gap to the bound at which a plan counts as optimal (Gurobi's default as well)."""


_MOST_OF_REST = 0.8
"""Part of the time left that HiGHS gets: it looks at its clock only now and then."""
_PART_OF_EVEN_PRICES = 0.1
_FEW_MODELS, _PART_OF_WHOLE = 2, 0.4
"""Number of models for each class up to which part of the time is kept for the whole programme: the
fewer models, the more of them have fractions of shares."""


@dataclass(frozen=True, slots=True)
class SolverLimits:
    """Limits at which the search stops."""

    seconds_left: Callable[[], float]
    """Returns the seconds that are left for it."""
    gap: float = PROVEN_GAP
    """Relative gap between the plan and the bound."""


def solve_with_highs(
    task: MilpTask, limits: SolverLimits, start: Sequence[Sequence[ChosenPipeline]] | None = None
) -> PooledSolution | None:
    """Returns the best solution found; None if there is none, or none was found in time.

    Args:
        task: The task to solve.
        limits: Limits at which the search stops.
        start: Pipelines that are known to be allowed, from the task's own columns. A search begins
            with the better of these and the rounded relaxation.
    """
    relaxation = relax(task)
    if relaxation is None:
        return None
    bound = relaxation.bound
    known = (_worth(task, rounded(task, relaxation.flows)), _worth(task, start))
    best = min(filter(None, known), key=lambda worth: worth.value, default=None)
    by_shares = isinstance(task.objective, MaxThroughput) and not task.reference_rules
    if by_shares and _is_open(best, bound, limits):
        found = _by_shares(task, relaxation, limits, best)
        if found is None:
            return None
        best, bound = found
    if _is_open(best, bound, limits):
        best, proven = _search(task, relaxation, limits, best)
        bound = max(bound, proven)
    if best is None:
        return None
    if not all(task.complete):
        bound = min(bound, _bound_by_paths(task, relaxation, limits))
    bound = min(bound, best.value)  # rounding errors alone can make them cross
    optimal = _gap(best.value, bound) <= limits.gap
    sign = -1.0 if isinstance(task.objective, MaxThroughput) else 1.0
    return PooledSolution(best.chosen, sign * best.value, sign * bound, optimal, "highs")


def _bound_by_paths(task: MilpTask, relaxation: Relaxation, limits: SolverLimits) -> float:
    """Returns the bound at the relaxation's prices, with paths where columns are missing.

    A class that costs nothing among the columns may be all that a missing one uses. Then all
    classes cost something.
    """
    problem, prices = task.problem, relaxation.price_of_gpu
    counts = np.array([gpu.count for gpu in problem.classes])
    even = float(prices @ counts) / max(int(counts.sum()), 1)
    bound = _bound_at(task, prices, counts, limits)
    if bound > -np.inf:
        return bound
    return _bound_at(task, prices + _PART_OF_EVEN_PRICES * even, counts, limits)


def _bound_at(task: MilpTask, prices: Floats, counts: Ints, limits: SolverLimits) -> float:
    problem = task.problem
    least = [
        float(_price_per_request(columns, prices).min())
        if complete
        else least_price(problem, model, prices, limits.seconds_left)
        for model, columns, complete in zip(
            problem.models, task.columns, task.complete, strict=True
        )
    ]
    if task.rates is None:
        cost = float(np.dot([model.weight for model in problem.models], least))
        return -float(prices @ counts) / cost if cost > 0 else -np.inf
    saved = prices - np.array(price_per_gpu(problem, task.objective))
    return float(np.dot(task.rates, least) - saved @ counts)


def _price_per_request(columns: PipelineColumns, prices: Floats) -> Floats:
    """Returns the price per request of each column."""
    price = np.where(columns.gpu_class >= 0, prices[columns.gpu_class], 0.0)
    per_request: Floats = (price / columns.rate_per_gpu).sum(axis=1)
    return per_request


def _is_open(best: _Worth | None, bound: float, limits: SolverLimits) -> bool:
    """Returns True if there is something left to search for, and time."""
    if limits.seconds_left() <= 0:
        return False
    return best is None or _gap(best.value, bound) > limits.gap


def _by_shares(
    task: MilpTask, relaxation: Relaxation, limits: SolverLimits, best: _Worth | None
) -> tuple[_Worth | None, float] | None:
    """Returns the best plan that shares of the models make up, and the bound; None if none can."""
    models, classes = len(task.problem.models), len(task.problem.classes)
    rest = limits.seconds_left() * (_PART_OF_WHOLE if models <= _FEW_MODELS * classes else 0.0)
    search = TargetSearch(task, relaxation.price_of_gpu, lambda: limits.seconds_left() - rest)
    bounds = PlanBounds(-best.value if best else 0.0, -relaxation.bound, None)
    if best is not None:
        search.know([share_of(some, len(task.problem.classes)) for some in best.chosen])
    elif not search.can_be_reached(bounds):
        return None
    search.improve(bounds, limits.gap)
    if bounds.shares is not None:
        chosen = [
            share.chosen(columns)
            for share, columns in zip(bounds.shares, task.columns, strict=True)
        ]
        best = _worth(task, chosen)
    return best, -bounds.most


def _search(
    task: MilpTask, relaxation: Relaxation, limits: SolverLimits, best: _Worth | None
) -> tuple[_Worth | None, float]:
    """Returns the best plan of a search, and the bound. Columns that cannot matter are left out."""
    if best is not None:
        kept = [
            may_improve(task, relaxation, model, best.value) for model in range(len(task.columns))
        ]
        for model, pipelines in enumerate(best.chosen):
            kept[model][[pipeline.index for pipeline in pipelines]] = True
        task, best = _restricted(task, kept, best)
    programme = build(task)
    solver = _solver(programme, limits)
    if best is not None:
        solver.setSolution(_start(programme, task, best.chosen))
    solver.run()
    info = solver.getInfo()
    bound = relaxation.bound
    if np.isfinite(info.mip_dual_bound):
        bound = max(bound, info.mip_dual_bound)
    if info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible:
        values = np.array(solver.getSolution().col_value)
        found = _worth(task, rounded(task, [values[at] for at in programme.rate_at]))
        if found and (best is None or found.value < best.value):
            best = found
    return best, bound


def _restricted(
    task: MilpTask, kept: Sequence[npt.NDArray[np.bool_]], best: _Worth
) -> tuple[MilpTask, _Worth]:
    """Returns the task with fewer columns, and the known plan in terms of these."""
    columns = [some.take(mask) for some, mask in zip(task.columns, kept, strict=True)]
    chosen = [
        [
            replace(pipeline, columns=some, index=int(mask[: pipeline.index].sum()))
            for pipeline in pipelines
        ]
        for some, mask, pipelines in zip(columns, kept, best.chosen, strict=True)
    ]
    return replace(task, columns=columns), _Worth(chosen, best.value)


def _solver(programme: MilpProgramme, limits: SolverLimits) -> highspy.Highs:
    solver = highspy.Highs()  # type: ignore[no-untyped-call]
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("threads", 1)
    solver.setOptionValue("time_limit", max(limits.seconds_left() * _MOST_OF_REST, 0.0))
    solver.setOptionValue("mip_rel_gap", limits.gap)
    solver.passModel(programme.lp)
    return solver


def _start(
    programme: MilpProgramme, task: MilpTask, chosen: Sequence[Sequence[ChosenPipeline]]
) -> highspy.HighsSolution:
    """Returns rates and pools as a first solution. HiGHS derives the other values from them."""
    values = np.full(programme.lp.num_col_, highspy.kHighsInf)  # = not given
    for model, pipelines in enumerate(chosen):
        values[programme.rate_at[model]] = 0.0
        values[programme.pool_at[model][programme.pool_at[model] >= 0]] = 0.0
        for pipeline in pipelines:
            values[programme.rate_at[model][pipeline.index]] = pipeline.throughput_rps
            at = programme.pool_at[model][pipeline.index]
            level = task.columns[model].level[pipeline.index]
            size = np.array(pipeline.vgpus) / (1 if task.reference_rules else level)
            values[at[at >= 0]] = size[at >= 0]
    solution = highspy.HighsSolution()
    solution.col_value = values.tolist()
    return solution


class _Worth(NamedTuple):
    """Pipelines, and their value, which is to be minimised."""

    chosen: Sequence[Sequence[ChosenPipeline]]
    value: float


def _worth(task: MilpTask, chosen: Sequence[Sequence[ChosenPipeline]] | None) -> _Worth | None:
    if chosen is None:
        return None
    if not isinstance(task.objective, MaxThroughput):
        return _Worth(chosen, price_of(task.problem, chosen, task.objective))
    return _Worth(chosen, -least_share(task.problem, chosen))


def _gap(value: float, bound: float) -> float:
    return (value - bound) / max(abs(value), 1e-12)
