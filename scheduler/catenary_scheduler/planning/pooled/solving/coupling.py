"""Coupling: division of the GPUs among the models, step 3 of the dynamic programme.

With the table of the best rate per cell of each model, a target is feasible if the cells that reach
it fit into the cluster together. For each number of the other GPUs, only the least number of GPUs
of the last class matters, so sums of cells are a (min,+) convolution of such rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from catenary_scheduler.planning.pooled.columns.device_tables import Floats
from catenary_scheduler.planning.pooled.columns.tables import TOLERANCE, Cell

Needs = npt.NDArray[np.int64]
"""Number of GPUs of the last class that are needed, by the number of GPUs of all others."""
NEVER = np.int64(1 << 40)


def best_target(tables: Sequence[Floats], weights: Sequence[float]) -> float:
    """Returns the largest target such that every model reaches weight x target."""
    reached = np.unique(
        np.concatenate([(table / w).ravel() for table, w in zip(tables, weights, strict=True)])
    )
    low, high = 0, len(reached) - 1  # reached[0] is 0, which is always feasible
    while low < high:
        middle = (low + high + 1) // 2
        target = float(reached[middle])
        needs = [least_last(table, w * target) for table, w in zip(tables, weights, strict=True)]
        if _together(needs)[-1].min() < tables[0].shape[-1]:
            low = middle
        else:
            high = middle - 1
    return float(reached[low])


def cheapest_cells(
    tables: Sequence[Floats], rates: Sequence[float], prices: Sequence[float]
) -> list[Cell] | None:
    """Returns a cell for each model so that all reach their rates at the least price.

    Returns None if the cluster is too small for that.
    """
    needs = [least_last(table, rate) for table, rate in zip(tables, rates, strict=True)]
    sums = _together(needs)
    total = sums[-1]
    price = total * prices[-1]
    for axis in range(total.ndim):
        shape = [-1 if at == axis else 1 for at in range(total.ndim)]
        price = price + (np.arange(total.shape[axis]) * prices[axis]).reshape(shape)
    price = np.where(total < tables[0].shape[-1], price, np.inf)
    if not np.isfinite(price.min()):
        return None
    end = np.unravel_index(int(price.argmin()), price.shape)
    return _split(needs, sums, tuple(int(index) for index in end))


def least_last(table: Floats, rate: float) -> Needs:
    """Returns the least GPUs of the last class that reach the rate, by number of other GPUs."""
    needs = (table < rate * (1 - TOLERANCE)).sum(axis=-1)
    least: Needs = np.where(needs < table.shape[-1], needs, NEVER)
    return least


def _together(needs: Sequence[Needs]) -> list[Needs]:
    """Returns the needs of the first model, of the first two together, and so on."""
    sums = [needs[0]]
    for need in needs[1:]:
        total = np.full_like(need, NEVER)
        for prefix in np.argwhere(need < NEVER).tolist():
            # With one class there are no prefixes; `...` then still gives a view instead of a
            # number.
            rest: tuple[Any, ...] = (..., *(slice(index, None) for index in prefix))
            fitting: tuple[Any, ...] = tuple(
                slice(0, size - index) for size, index in zip(need.shape, prefix, strict=True)
            )
            np.minimum(total[rest], sums[-1][fitting] + need[tuple(prefix)], out=total[rest])
        sums.append(np.minimum(total, NEVER))
    return sums


def _split(needs: Sequence[Needs], sums: Sequence[Needs], end: Cell) -> list[Cell]:
    cells: list[Cell] = []
    for need, before, total in zip(
        reversed(needs[1:]), reversed(sums[:-1]), reversed(sums[1:]), strict=True
    ):
        for prefix in np.argwhere(need < NEVER):
            rest = np.array(end) - prefix
            if (rest < 0).any():
                continue
            if before[tuple(rest.tolist())] + need[tuple(prefix.tolist())] == total[end]:
                cells.append((*(int(i) for i in prefix), int(need[tuple(prefix)])))
                end = tuple(int(index) for index in rest)
                break
    cells.append((*end, int(needs[0][end])))
    return cells[::-1]
