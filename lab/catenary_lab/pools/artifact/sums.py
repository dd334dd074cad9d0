"""(max,+) sums of tables: the best rate of two parts that divide the GPUs between them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from catenary_scheduler.planning.pooled.columns.device_tables import Floats, Ints
from catenary_scheduler.planning.pooled.columns.tables import TOLERANCE, Cell


class Points(NamedTuple):
    """Cells, shape (n, axes), and the rate of each."""

    cells: Ints
    rates: Floats


def rising(table: Floats) -> NDArray[np.bool_]:
    """Returns a mask of cell 0 and of the cells where less of anything yields less."""
    rises = table > 0
    for axis in range(table.ndim):
        ahead = tuple(slice(1, None) if at == axis else slice(None) for at in range(table.ndim))
        behind = tuple(slice(None, -1) if at == axis else slice(None) for at in range(table.ndim))
        rises[ahead] &= table[ahead] > table[behind] * (1 + TOLERANCE)
    rises[(0,) * table.ndim] = True
    return rises


def rises_of(table: Floats) -> Points:
    """Returns cell 0 and the cells where a GPU less of any class yields less."""
    rises = rising(table)
    return Points(np.argwhere(rises), table[rises])


def add_sums(table: Floats, one: Points, other: Points, shared: Cell) -> None:
    """Raises a table to all sums of two sets of points, and to what more GPUs then yield at least.

    Args:
        table: Rates by number of whole GPUs of each class.
        one: Points of the first summand.
        other: Points of the second summand.
        shared: GPUs that both use together, by axis.
    """
    few, many = sorted((one, other), key=lambda points: len(points.rates))
    dense = np.full(table.shape, -np.inf)
    dense[tuple(many.cells.T)] = many.rates
    for axis in range(table.ndim):
        np.maximum.accumulate(dense, axis=axis, out=dense)
    for cell, rate in zip((few.cells + shared).tolist(), few.rates.tolist(), strict=True):
        if all(gpus < size for gpus, size in zip(cell, table.shape, strict=True)):
            ahead = table[tuple(slice(gpus, None) for gpus in cell)]
            near = dense[tuple(slice(0, size) for size in ahead.shape)]
            np.maximum(ahead, near + rate, out=ahead)


def split_of(one: Floats, other: Floats, room: Cell, rate: float) -> tuple[Cell, Cell] | None:
    """Returns cells of two tables within the room whose rates add up to a rate, or None."""
    if min(room) < 0:
        return None
    box = tuple(slice(0, gpus + 1) for gpus in room)
    sums = one[box] + np.flip(other[box])
    if sums.max() < rate * (1 - TOLERANCE):
        return None
    first = tuple(int(at) for at in np.unravel_index(int(sums.argmax()), sums.shape))
    return first, tuple(gpus - used for gpus, used in zip(room, first, strict=True))
