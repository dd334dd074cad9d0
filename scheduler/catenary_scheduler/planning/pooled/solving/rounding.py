"""Rounding of a solver's rates of columns to pools that fit the cluster."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from catenary_scheduler.planning.pooled.columns.columns import PipelineColumns
from catenary_scheduler.planning.pooled.columns.device_tables import Floats
from catenary_scheduler.planning.pooled.columns.selection import ChosenPipeline, used_gpus
from catenary_scheduler.planning.pooled.objectives import MaxThroughput
from catenary_scheduler.planning.pooled.solving.milp import MilpTask, slot_limits

SOLVER_TOLERANCE = 1e-6
"""Fraction of a GPU by which solvers may violate their constraints."""
_HALVINGS = 40


def rounded(task: MilpTask, flows: Sequence[Floats]) -> list[list[ChosenPipeline]] | None:
    """Returns pipelines for the rates, or None if they do not fit.

    If the objective is throughput, all rates may be lowered by one factor until their pools fit.

    Args:
        task: The task, with its columns, rules and numbers of GPUs.
        flows: Rate of each column, by model.
    """
    chosen = _pipelines(task, flows, 1.0)
    if not _fits(task, chosen) and isinstance(task.objective, MaxThroughput):
        low, high = 0.0, 1.0
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            if _fits(task, _pipelines(task, flows, middle)):
                low = middle
            else:
                high = middle
        chosen = _pipelines(task, flows, low)
    allowed = _fits(task, chosen) and all(chosen) and keeps_slots(task, chosen)
    return chosen if allowed else None


def _pipelines(
    task: MilpTask, flows: Sequence[Floats], fraction: float
) -> list[list[ChosenPipeline]]:
    return [
        _of_model(columns, flow * fraction, whole_gpus=not task.reference_rules)
        for columns, flow in zip(task.columns, flows, strict=True)
    ]


def _of_model(columns: PipelineColumns, flow: Floats, *, whole_gpus: bool) -> list[ChosenPipeline]:
    used = np.flatnonzero(flow > 0)
    some = columns.take(used)
    unit = some.level if whole_gpus else np.ones_like(some.level)
    size = np.ceil(flow[used, None] / (some.rate * unit) - SOLVER_TOLERANCE).clip(0)
    kept = np.flatnonzero(size.max(axis=1, initial=0) > 0)
    # Even a pool that needs next to nothing needs one.
    least = (some.gpu_class >= 0).astype(np.int64)
    vgpus = np.maximum(size.astype(np.int64), least) * unit
    return [
        ChosenPipeline(columns, int(used[at]), tuple((vgpus[at] * least[at]).tolist()))
        for at in kept
    ]


def _fits(task: MilpTask, chosen: Sequence[Sequence[ChosenPipeline]]) -> bool:
    used = used_gpus(chosen, len(task.problem.classes))
    return all(taken <= gpu.count for taken, gpu in zip(used, task.problem.classes, strict=True))


def keeps_slots(task: MilpTask, chosen: Sequence[Sequence[ChosenPipeline]]) -> bool:
    """Returns True if no model has more pipelines than the rules have slots for them."""
    if not task.reference_rules:
        return True
    for columns, pipelines in zip(task.columns, chosen, strict=True):
        index = [pipeline.index for pipeline in pipelines]
        for some, slots in slot_limits(columns, len(task.problem.classes)):
            if some[index].sum() > slots:
                return False
    return True
