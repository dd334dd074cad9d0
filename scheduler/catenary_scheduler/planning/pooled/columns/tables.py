"""Rate tables: the best rate of a model for every number of whole GPUs of each class.

A table has one axis per class with `count + 1` entries: `table[h, l]` is the best rate with h GPUs
of one class and l of the other. `single_table` is for one pipeline, `closure` for any number of
them. They are steps 1 and 2 of the dynamic programme in the specification.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from catenary_scheduler.planning.pooled.columns.columns import PipelineColumns
from catenary_scheduler.planning.pooled.columns.device_tables import Floats, Ints
from catenary_scheduler.planning.pooled.columns.pruning import groups_of_equal_rows, sorted_rates

Cell = tuple[int, ...]
"""Number of whole GPUs of each class, in the order of a table's axes."""

TOLERANCE = 1e-9
"""Relative tolerance for rates. Sums of rates in another order differ by less."""


def single_table(columns: PipelineColumns, order: Sequence[int], counts: Sequence[int]) -> Floats:
    """Returns the best rate of one pipeline for each number of GPUs of each class.

    Args:
        columns: The pipelines to choose from.
        order: Index of the class of each axis of the table.
        counts: Number of GPUs along each axis.
    """
    table = np.zeros([count + 1 for count in counts])
    if not len(columns):
        return table
    rates = sorted_rates(columns, order)
    pools = np.stack([columns.pools_of(index) for index in order], axis=1)
    for members in groups_of_equal_rows(pools):
        best = np.full((len(members),) + (1,) * len(counts), np.inf)
        start = 0
        for axis, count in enumerate(counts):
            width = int(pools[members[0], axis])
            if width:
                part = pool_rates(rates[members, start : start + width], count)
                shape = [len(members)] + [1] * len(counts)
                shape[axis + 1] = count + 1
                best = np.minimum(best, part.reshape(shape))
            start += width
        np.maximum(table, best.max(axis=0), out=table)
    return table


def pool_rates(rates: Floats, count: int) -> Floats:
    """Returns, for 0 to `count` GPUs, the rate of the slowest pool under the best split.

    The pools of a pipeline share a class.

    Each GPU goes to the pool that is slowest so far, which is the best split for every number of
    GPUs.

    Args:
        rates: Shape (pipelines, pools): requests per second of one GPU of the pool.
        count: Number of GPUs of the class.
    """
    pipelines, pools = rates.shape
    if pools == 1:
        return rates * np.arange(count + 1)
    best = np.zeros((pipelines, count + 1))
    gpus = np.ones_like(rates)
    reached = rates.copy()
    every = np.arange(pipelines)
    for total in range(pools, count + 1):
        slowest = reached.argmin(axis=1)
        best[:, total] = reached[every, slowest]
        gpus[every, slowest] += 1
        reached[every, slowest] = gpus[every, slowest] * rates[every, slowest]
    return best


def breakpoints(table: Floats) -> Ints:
    """Returns the cells, shape (n, axes), in which one GPU less of any class yields less."""
    rises = table > 0
    for axis in range(table.ndim):
        ahead = [slice(None)] * table.ndim
        behind = [slice(None)] * table.ndim
        ahead[axis], behind[axis] = slice(1, None), slice(None, -1)
        rises[tuple(ahead)] &= table[tuple(ahead)] > table[tuple(behind)] * (1 + TOLERANCE)
    return np.argwhere(rises)
