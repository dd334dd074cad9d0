"""Pruning: columns that another one makes superfluous are dropped before anything is solved."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from catenary_scheduler.planning.pooled.columns.columns import NO_CLASS, PipelineColumns
from catenary_scheduler.planning.pooled.columns.device_tables import Floats, Ints

_FEW_ROWS, _MANY_ROWS = 4, 300
_BLOCK = 32


def undominated(columns: PipelineColumns, classes: int) -> PipelineColumns:
    """Returns the columns that are of use when every pool has whole GPUs of its own.

    A pipeline is superfluous if another one has as many pools on each class, each yielding at least
    as much per GPU (the order of the pools does not matter to the GPUs). Of equal ones the one with
    the lower latency stays.
    """
    if not len(columns):
        return columns
    by_latency = columns.take(np.argsort(columns.latency_us, kind="stable"))
    rates = sorted_rates(by_latency, range(classes))
    pools = np.stack([by_latency.pools_of(index) for index in range(classes)], axis=1)
    kept = [members[pareto_front(rates[members])] for members in groups_of_equal_rows(pools)]
    return by_latency.take(np.sort(np.concatenate(kept)))


def sorted_rates(columns: PipelineColumns, order: Sequence[int]) -> Floats:
    """Returns the rates per GPU, shape (columns, K), by class in the given order.

    Within a class they ascend.
    """
    place = np.empty(len(order) + 1, dtype=np.int64)
    place[list(order)] = np.arange(len(order))
    place[NO_CLASS] = len(order)
    keys = (columns.rate_per_gpu, place[columns.gpu_class])
    rates: Floats = np.take_along_axis(columns.rate_per_gpu, np.lexsort(keys, axis=1), axis=1)
    return rates


def groups_of_equal_rows(rows: Ints) -> list[Ints]:
    """Returns the indices of each set of equal rows of small numbers, ascending within a set."""
    key = np.zeros(len(rows), dtype=np.int64)
    for column in rows.T:  # one number per row sorts much faster than rows do
        least, most = (int(column.min()), int(column.max())) if len(rows) else (0, 0)
        key = key * (most - least + 1) + (column - least)
    order = np.argsort(key, kind="stable")
    starts = np.flatnonzero(np.diff(key[order])) + 1
    return [np.asarray(part, dtype=np.int64) for part in np.split(order, starts)]


def pareto_front(values: Floats) -> Ints:
    """Returns the indices of rows that no other row matches in all entries.

    Of equal rows the first stays.
    """
    finite = np.where(np.isinf(values), 0.0, values)
    # In this order no row is dominated by one behind it. The sort is stable for equal rows.
    order = np.argsort(-finite.sum(axis=1), kind="stable")
    rest, kept = order, []
    while len(rest):
        first, rest = rest[:_BLOCK], rest[_BLOCK:]
        beaten = ~_above_somewhere(finite[first], finite[first])
        first = first[~(beaten & np.tri(len(first), k=-1, dtype=np.bool_)).any(axis=1)]
        kept.append(first)
        rest = rest[_above_somewhere(finite[rest], finite[first]).all(axis=1)]
    return np.sort(np.concatenate([*kept, np.zeros(0, dtype=np.int64)]))


def _above_somewhere(some: Floats, others: Floats) -> npt.NDArray[np.bool_]:
    """Returns a mask by (row, other row): True if the row exceeds the other one in some entry."""
    above = np.zeros((len(some), len(others)), dtype=np.bool_)
    for one, other in zip(some.T, others.T, strict=True):
        above |= one[:, None] > other[None, :]
    return above


def undominated_rows(values: Floats) -> Ints:
    """Returns the rows of `pareto_front`, faster if there are few; very few rows unpruned."""
    if len(values) > _MANY_ROWS:
        return pareto_front(values)
    if len(values) <= _FEW_ROWS:
        return np.arange(len(values))
    finite = np.where(np.isinf(values), 0.0, values)
    reached = ~_above_somewhere(finite, finite)
    # Of equal rows the first one stays.
    earlier = np.tri(len(values), k=-1, dtype=np.bool_)
    worse = reached & (~reached.T | earlier)
    kept: Ints = np.flatnonzero(~worse.any(axis=1))
    return kept
