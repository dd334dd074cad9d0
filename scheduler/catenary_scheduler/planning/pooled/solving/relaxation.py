"""Relaxation: the choice without whole numbers, a small linear programme that bounds all plans.

A column at rate x takes x / (rate of a GPU) of a GPU for each of its pools, so only the rates are
left as variables, with one row per class and one per model. Its dual prices tell which columns
cannot be part of a better plan than a known one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import highspy
import numpy as np
import numpy.typing as npt

from catenary_scheduler.planning.pooled.columns.columns import PipelineColumns
from catenary_scheduler.planning.pooled.columns.device_tables import Floats
from catenary_scheduler.planning.pooled.objectives import MaxThroughput, price_per_gpu
from catenary_scheduler.planning.pooled.solving.milp import MilpTask
from catenary_scheduler.planning.pooled.solving.sparse import INFINITY, ProgrammeBuilder


@dataclass(frozen=True, slots=True)
class Relaxation:
    """An optimal solution of the relaxation, whose objective is to be minimised."""

    flows: tuple[Floats, ...]
    """Rate of each column, by model."""
    bound: float
    price_of_gpu: Floats
    """Saving from one GPU more, plus its cost, by class."""
    worth_of_rate: Floats
    """Saving from one request per second less, by model."""


def relax(task: MilpTask) -> Relaxation | None:
    """Returns the relaxation of a task, or None if even fractions of GPUs do not suffice."""
    builder = ProgrammeBuilder()
    target = builder.variables(np.array([INFINITY]), integer=False)
    rate_at = [builder.variables(np.full(len(c), INFINITY), integer=False) for c in task.columns]
    prices = price_per_gpu(task.problem, task.objective)
    cost = np.zeros(1 + sum(len(columns) for columns in task.columns))
    flat = np.concatenate(rate_at)
    for axis, gpu in enumerate(task.problem.classes):
        gpus = np.concatenate([_gpus_per_rate(columns, axis) for columns in task.columns])
        used = np.flatnonzero(gpus)
        builder.row(flat[used], gpus[used], least=0.0, most=float(gpu.count))
        cost[flat] += gpus * prices[axis]
    for at, model in enumerate(task.problem.models):
        weight = model.weight if task.rates is None else 0.0
        builder.row(
            np.append(rate_at[at], target),
            np.append(np.ones(len(rate_at[at])), -weight),
            least=task.rates[at] if task.rates else 0.0,
        )
    lp = builder.build()
    free_of_charge = isinstance(task.objective, MaxThroughput)
    lp.col_cost_ = np.append(-1.0, np.zeros(len(cost) - 1)) if free_of_charge else cost
    return _solved(task, lp, rate_at, np.zeros(len(prices)) if free_of_charge else np.array(prices))


def _gpus_per_rate(columns: PipelineColumns, axis: int) -> Floats:
    gpus: Floats = np.where(columns.gpu_class == axis, 1.0 / columns.rate_per_gpu, 0.0).sum(axis=1)
    return gpus


def _solved(
    task: MilpTask, lp: highspy.HighsLp, rate_at: Sequence[npt.NDArray[np.int64]], cost: Floats
) -> Relaxation | None:
    solver = highspy.Highs()  # type: ignore[no-untyped-call]
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("threads", 1)
    solver.passModel(lp)
    solver.run()
    if solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        return None
    solution = solver.getSolution()
    values, duals = np.array(solution.col_value), np.array(solution.row_dual)
    classes = len(task.problem.classes)
    return Relaxation(
        flows=tuple(values[at] for at in rate_at),
        bound=float(solver.getInfo().objective_function_value),
        price_of_gpu=cost - duals[:classes],
        worth_of_rate=duals[classes:],
    )


def may_improve(
    task: MilpTask, relaxation: Relaxation, model: int, value: float
) -> npt.NDArray[np.bool_]:
    """Returns a mask of the columns of a model that a better plan than a known one may use.

    Every pool has at least one GPU (one virtual GPU where they are shared). At the prices of the
    relaxation, a pipeline at rate x then loses at least price x max(1, x / rate) over its pools
    minus the worth of x. That is least where some pool is exactly full. A plan cannot be better if
    it loses more than the difference between the known plan and the bound.

    Args:
        task: The task to solve.
        relaxation: The relaxation of the task.
        model: Index of the model.
        value: Objective of the known plan, to be minimised.
    """
    columns = task.columns[model]
    present = columns.gpu_class >= 0
    price = np.where(present, relaxation.price_of_gpu[columns.gpu_class], 0.0)
    unit = columns.rate if task.reference_rules else columns.rate_per_gpu
    if task.reference_rules:
        price = price / columns.level
    loss = np.full(len(columns), np.inf)
    for position in range(unit.shape[1]):
        rate = np.where(present[:, position], unit[:, position], 0.0)
        size = np.where(present, np.maximum(1.0, rate[:, None] / unit), 0.0)
        here = (price * size).sum(axis=1) - relaxation.worth_of_rate[model] * rate
        np.minimum(loss, np.where(present[:, position], here, np.inf), out=loss)
    slack = value - relaxation.bound
    kept: npt.NDArray[np.bool_] = loss <= slack + 1e-9 * abs(value)
    return kept
