"""Halves: pipelines that use a fraction of one GPU on top of whole ones, as candidates for sharing.

A *half* is one pipeline whose pool at one position has j of the v virtual GPUs of a shared GPU. It
counts only if it yields more than any pipelines with the same whole GPUs and nothing shared. All
halves of a model are computed together, as rows of arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from catenary_scheduler.planning.pooled.columns.columns import NO_CLASS, PipelineColumns
from catenary_scheduler.planning.pooled.columns.device_tables import Floats, Ints
from catenary_scheduler.planning.pooled.columns.pruning import (
    groups_of_equal_rows,
    undominated_rows,
)
from catenary_scheduler.planning.pooled.columns.tables import TOLERANCE


@dataclass(frozen=True, slots=True)
class SharedStage:
    """The place of a shared GPU in a pipeline, and the number of virtual GPUs it is cut into."""

    position: int
    gpu_class: int
    level: int


@dataclass(frozen=True, slots=True)
class TablePoints:
    """Cells of a table, shape (n, axes), and the rate in each of them."""

    cells: Ints
    rates: Floats


@dataclass(frozen=True, slots=True)
class _Rows:
    """Pipelines with the pool that shares first, and the others behind it by class and rate."""

    place: Ints
    """Index of the shared stage among those found."""
    level: Ints
    """Level of the pool that shares."""
    rate: Floats
    """Requests per second of a GPU of each pool, shape (rows, K); inf where there is no pool."""
    axis: Ints
    """Axis of each pool's class, shape (rows, K); the number of axes where there is no pool."""

    def take(self, index: Ints) -> _Rows:
        return _Rows(self.place[index], self.level[index], self.rate[index], self.axis[index])


def find_halves(
    columns: PipelineColumns, order: Sequence[int], whole: Floats
) -> dict[SharedStage, list[TablePoints]]:
    """Returns the points where a half beats whole GPUs, by place and for j = 1 .. level - 1.

    Args:
        columns: The model's pipelines, including levels that are of use only when shared.
        order: Index of the class of each axis of the table.
        whole: Table of the best rates of any number of pipelines on whole GPUs.
    """
    places, rows = _rows(columns, order)
    found: dict[tuple[int, int], TablePoints] = {}
    if places:
        # More of a GPU never yields less, so a half that gains nothing with the most gains nothing
        # with less.
        most = _beating(rows, rows.level - 1, whole)
        found |= _by_place(rows, rows.level - 1, most, whole.shape)
        rest = rows.take(np.unique(most.row))
        for vgpus in range(1, int(rows.level.max()) - 1):
            finer = rest.take(np.flatnonzero(rest.level - 1 > vgpus))
            taken = np.full(len(finer.level), vgpus)
            found |= _by_place(finer, taken, _beating(finer, taken, whole), whole.shape)
    nothing = TablePoints(np.zeros((0, whole.ndim), dtype=np.int64), np.zeros(0))
    return {
        place: [found.get((index, vgpus), nothing) for vgpus in range(1, place.level)]
        for index, place in enumerate(places)
    }


def _rows(columns: PipelineColumns, order: Sequence[int]) -> tuple[list[SharedStage], _Rows]:
    width = columns.level.shape[1]
    axis_of = np.empty(len(order) + 1, dtype=np.int64)
    axis_of[list(order)] = np.arange(len(order))
    axis_of[NO_CLASS] = len(order)
    parts, keys = [], []
    for position in range(width):
        others = np.delete(columns.spare, position, axis=1).any(axis=1)
        index = np.flatnonzero((columns.level[:, position] > 1) & ~others)
        turn = np.roll(np.arange(width), -position)
        rate, axis = (
            columns.rate_per_gpu[index][:, turn],
            axis_of[columns.gpu_class[index]][:, turn],
        )
        by_class = np.lexsort((rate[:, 1:], axis[:, 1:]), axis=1)
        rate[:, 1:] = np.take_along_axis(rate[:, 1:], by_class, axis=1)
        axis[:, 1:] = np.take_along_axis(axis[:, 1:], by_class, axis=1)
        level = columns.level[index, position]
        place = np.full(len(index), position)
        parts.append((place, level, rate, axis))
        keys.append(np.column_stack([place, level, axis]))
    position_of, level, rate, axis = (np.concatenate(part) for part in zip(*parts, strict=True))
    key = np.concatenate(keys)
    if not len(key):
        return [], _Rows(position_of, level, rate, axis)
    kept = np.concatenate(
        [group[undominated_rows(rate[group])] for group in groups_of_equal_rows(key)]
    )
    named, place = np.unique(key[kept, :3], axis=0, return_inverse=True)
    places = [SharedStage(int(p), order[int(axis)], int(level)) for p, level, axis in named]
    return places, _Rows(place.reshape(-1), level[kept], rate[kept], axis[kept])


@dataclass(frozen=True, slots=True)
class _Found:
    """Halves that beat whole GPUs: row, flat index of the cell, and rate of each."""

    row: Ints
    cell: Ints
    rate: Floats


def _beating(rows: _Rows, vgpus: Ints, whole: Floats) -> _Found:
    """Returns all halves with `vgpus` virtual GPUs of the shared GPU that beat `whole`.

    A pipeline yields more only if some pool gets one more GPU, so only the rates at which one of
    its pools is exactly full have to be examined.
    """
    found = []
    for pool in range(rows.rate.shape[1]):
        for axis, size in enumerate(whole.shape):
            some = np.flatnonzero(rows.axis[:, pool] == axis)
            if len(some):
                found.append(_full(rows, vgpus, some, pool, size, whole))
    return _Found(
        np.concatenate([part.row for part in found] or [np.zeros(0, dtype=np.int64)]),
        np.concatenate([part.cell for part in found] or [np.zeros(0, dtype=np.int64)]),
        np.concatenate([part.rate for part in found] or [np.zeros(0)]),
    )


def _full(rows: _Rows, vgpus: Ints, some: Ints, pool: int, size: int, whole: Floats) -> _Found:
    """Returns the halves at rates that fill this pool exactly.

    The pool of the rows `some` must be on the axis of `size`.
    """
    part = rows.take(some)
    fraction = (vgpus[some] / part.level)[:, None]
    steps = np.arange(size) + (fraction if pool == 0 else 0.0)
    rates = part.rate[:, pool, None] * steps
    used = np.zeros((len(whole.shape) + 1, *rates.shape), dtype=np.int64)
    for other in range(part.rate.shape[1]):
        need = rates / part.rate[:, other, None] - TOLERANCE
        if other == 0:
            need -= fraction
        gpus = np.ceil(need).clip(0).astype(np.int64)
        for axis in np.unique(part.axis[:, other]):
            members = np.flatnonzero(part.axis[:, other] == axis)
            used[axis, members] += gpus[members]
    inside = np.ones(rates.shape, dtype=np.bool_)
    cell = np.zeros(rates.shape, dtype=np.int64)
    for axis, count in enumerate(whole.shape):
        inside &= used[axis] < count
        cell = cell * count + used[axis]
    row, step = np.nonzero(inside)
    cell, rate = cell[row, step], rates[row, step]
    better = rate > whole.reshape(-1)[cell] * (1 + TOLERANCE)
    return _Found(some[row[better]], cell[better], rate[better])


def _by_place(
    rows: _Rows, vgpus: Ints, found: _Found, shape: tuple[int, ...]
) -> dict[tuple[int, int], TablePoints]:
    """Returns the best rate of each cell where fewer GPUs yield less, by place and virtual GPUs."""
    if not len(found.row):
        return {}
    pairs = np.column_stack([rows.place[found.row], vgpus[found.row]])
    keys, which = np.unique(pairs, axis=0, return_inverse=True)
    best = np.zeros((len(keys), int(np.prod(shape))))
    np.maximum.at(best, (which.reshape(-1), found.cell), found.rate)
    best = best.reshape(len(keys), *shape)
    reached = best
    for axis in range(1, best.ndim):
        reached = np.maximum.accumulate(reached, axis=axis)
    rises = best > 0
    for axis in range(1, best.ndim):
        ahead = tuple(slice(1, None) if at == axis else slice(None) for at in range(best.ndim))
        behind = tuple(slice(None, -1) if at == axis else slice(None) for at in range(best.ndim))
        rises[ahead] &= best[ahead] > reached[behind] * (1 + TOLERANCE)
    return {
        (int(place), int(count)): TablePoints(np.argwhere(rises[at]), best[at][rises[at]])
        for at, (place, count) in enumerate(keys)
    }
