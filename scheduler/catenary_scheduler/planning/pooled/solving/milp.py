"""Mixed-integer programme of the same choice, for HiGHS: big clusters, many classes, checks.

The variables of a column are its rate (continuous) and the size of each of its pools (integer). The
constraints are that pools carry the rate, GPUs of a class stay within the cluster, and a model's
columns add up to its load. Under our own rules the size is in whole GPUs. Under the reference's it
is in virtual GPUs, which are rounded up together per model, position and class, and a model has one
pipeline per slot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import highspy
import numpy as np
import numpy.typing as npt

from catenary_scheduler.planning.pooled.columns.columns import PipelineColumns
from catenary_scheduler.planning.pooled.columns.device_tables import Ints
from catenary_scheduler.planning.pooled.objectives import MaxThroughput, Objective, price_per_gpu
from catenary_scheduler.planning.pooled.problem import PoolingProblem
from catenary_scheduler.planning.pooled.solving.sparse import INFINITY, ProgrammeBuilder


@dataclass(frozen=True, slots=True)
class MilpTask:
    """A choice among columns that is to be solved."""

    problem: PoolingProblem
    columns: Sequence[PipelineColumns]
    """Columns of each model among which to choose."""
    objective: Objective
    rates: Sequence[float] | None
    """Rate that each model must reach; None asks for the most throughput."""
    reference_rules: bool = False
    complete: Sequence[bool] = ()
    """Whether the columns of each model are all it has; empty if all are."""


@dataclass(frozen=True, slots=True)
class MilpProgramme:
    """A programme to minimise, and where to find its variables."""

    lp: highspy.HighsLp
    rate_at: tuple[Ints, ...]
    """Indices of the rates of each model's columns, shape (columns,)."""
    pool_at: tuple[Ints, ...]
    """Indices of the sizes of each model's pools, shape (columns, K); -1 where there is no pool."""


def build(task: MilpTask) -> MilpProgramme:
    """Returns the mixed-integer programme of a task."""
    builder = ProgrammeBuilder()
    target = builder.variables(np.array([INFINITY]), integer=False)
    rate_at = tuple(
        builder.variables(np.full(len(some), INFINITY), integer=False) for some in task.columns
    )
    pool_at = tuple(_pools(builder, task, some) for some in task.columns)
    for at, some in enumerate(task.columns):
        _carry(builder, task, some, rate_at[at], pool_at[at])
        weight = task.problem.models[at].weight if task.rates is None else 0.0
        builder.row(
            np.append(rate_at[at], target),
            np.append(np.ones(len(some)), -weight),
            least=task.rates[at] if task.rates else 0.0,
        )
    gpus_at = _shared_gpus(builder, task, pool_at) if task.reference_rules else pool_at
    _within_cluster(builder, task, gpus_at)
    if task.reference_rules:
        for at, some in enumerate(task.columns):
            _one_per_slot(builder, task.problem, some, pool_at[at])
    if isinstance(task.objective, MaxThroughput):
        builder.minimise(target, -1.0)
    return MilpProgramme(builder.build(), rate_at, pool_at)


def _pools(builder: ProgrammeBuilder, task: MilpTask, columns: PipelineColumns) -> Ints:
    present = columns.gpu_class >= 0
    counts = np.array([gpu.count for gpu in task.problem.classes], dtype=np.float64)
    most = counts[columns.gpu_class[present]]
    if task.reference_rules:
        most = most * columns.level[present]
    at = np.full(present.shape, -1, dtype=np.int64)
    at[present] = builder.variables(most, integer=True)
    return at


def _carry(
    builder: ProgrammeBuilder,
    task: MilpTask,
    columns: PipelineColumns,
    rate_at: Ints,
    pool_at: Ints,
) -> None:
    """Adds the constraint that every pool is large enough for the rate of its column."""
    rate = columns.rate if task.reference_rules else columns.rate_per_gpu
    for position in range(pool_at.shape[1]):
        some = np.flatnonzero(pool_at[:, position] >= 0)
        index = np.stack([pool_at[some, position], rate_at[some]], axis=1)
        # Rows are divided by the rate, so that all coefficients are near one.
        value = np.stack([np.ones(len(some)), -1.0 / rate[some, position]], axis=1)
        builder.rows(index, value, least=0.0)


def _shared_gpus(
    builder: ProgrammeBuilder, task: MilpTask, pool_at: Sequence[Ints]
) -> tuple[Ints, ...]:
    """Rounds virtual GPUs up together. Returns the indices of whole GPUs, shape (classes, K)."""
    found = []
    for columns, pools in zip(task.columns, pool_at, strict=True):
        gpus_at = np.full((len(task.problem.classes), pools.shape[1]), -1, dtype=np.int64)
        for axis, position in product(*map(range, gpus_at.shape)):
            some = np.flatnonzero(columns.gpu_class[:, position] == axis)
            if len(some):
                count = float(task.problem.classes[axis].count)
                gpus = builder.variables(np.array([count]), integer=True)
                gpus_at[axis, position] = gpus[0]
                builder.row(
                    np.append(pools[some, position], gpus),
                    np.append(-1.0 / columns.level[some, position], 1.0),
                    least=0.0,
                )
        found.append(gpus_at)
    return tuple(found)


def _within_cluster(builder: ProgrammeBuilder, task: MilpTask, gpus_at: Sequence[Ints]) -> None:
    prices = price_per_gpu(task.problem, task.objective)
    for axis, gpu in enumerate(task.problem.classes):
        parts = []
        for columns, at in zip(task.columns, gpus_at, strict=True):
            parts.append(at[axis] if task.reference_rules else at[columns.gpu_class == axis])
        members = np.concatenate(parts)
        members = members[members >= 0]
        builder.row(members, np.ones(len(members)), least=0.0, most=float(gpu.count))
        if not isinstance(task.objective, MaxThroughput):
            builder.minimise(members, prices[axis])


def _one_per_slot(
    builder: ProgrammeBuilder, problem: PoolingProblem, columns: PipelineColumns, pool_at: Ints
) -> None:
    """Adds the constraint of at most one pipeline per ordered tuple of classes of full length.

    A shorter pipeline takes any slot that starts with its classes, so it suffices that pipelines
    with a common start are no more than the slots with that start.
    """
    used = builder.variables(np.ones(len(columns)), integer=True)
    counts = np.array([gpu.count for gpu in problem.classes], dtype=np.float64)
    most = counts[columns.gpu_class[:, 0]] * columns.level[:, 0]
    index = np.stack([used, pool_at[:, 0]], axis=1)
    builder.rows(index, np.stack([most, -np.ones(len(columns))], axis=1), least=0.0)
    for some, slots in slot_limits(columns, len(problem.classes)):
        builder.row(used[some], np.ones(int(some.sum())), least=0.0, most=float(slots))


def slot_limits(
    columns: PipelineColumns, classes: int
) -> Iterator[tuple[npt.NDArray[np.bool_], int]]:
    """Yields sets of columns, and how many columns of each set a model may use at most."""
    width = columns.gpu_class.shape[1]
    for length in range(1, width + 1):
        for start in product(range(classes), repeat=length):
            some = (columns.gpu_class[:, :length] == start).all(axis=1)
            if some.any():
                yield some, classes ** (width - length)
