"""One slot of the reference's rules: the best pipeline for GPUs and fractions of shared ones.

The artifact lets a model have one pipeline per ordered pair of classes, its slot; a pipeline of
one partition takes any slot that starts with its class. At each position a pool may use a fraction
of one GPU that it shares with the other slot that has its class there. The table of a slot has two
axes for these fractions (as upper limits) in front of those for whole GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from catenary_scheduler.planning.pooled.columns.axes import TableAxes
from catenary_scheduler.planning.pooled.columns.columns import NO_CLASS, PipelineColumns
from catenary_scheduler.planning.pooled.columns.device_tables import Floats, Ints
from catenary_scheduler.planning.pooled.columns.selection import ChosenPipeline, quickest_that_fits
from catenary_scheduler.planning.pooled.columns.tables import TOLERANCE, Cell

_ALL_LEVELS = 12
"""Level of a pool that does not exist: finer than any real one."""


@dataclass(frozen=True, slots=True)
class Phases:
    """The fractions of a shared GPU that pools of a class may use, ascending from 0."""

    fractions: tuple[float, ...]
    pairs: tuple[tuple[int, int], ...]
    """Indices of fractions that fill a GPU between two pools; larger ones would not fit."""


def phases_of(levels: Sequence[int]) -> Phases:
    """Returns the phases of a class whose GPUs may be cut into these numbers of virtual GPUs."""
    fractions = sorted({part / level for level in levels for part in range(level)})
    pairs = []
    for index, fraction in enumerate(fractions[1:], start=1):
        rest = [at for at, other in enumerate(fractions) if fraction + other <= 1 + TOLERANCE]
        if rest[-1] > 0:
            pairs.append((index, rest[-1]))
    return Phases(tuple(fractions), tuple(pairs))


@dataclass(frozen=True, slots=True)
class _Variants:
    """Pipelines with fractions of shared GPUs; all arrays have shape (variants, 2 positions)."""

    rate: Floats
    """Rate of a GPU at each position; inf: there is no such pool."""
    fraction: Floats
    phase: Ints


class Slot:
    """The best rates of one slot, by phase at both positions and by whole GPUs."""

    def __init__(
        self,
        columns: PipelineColumns,
        slot: tuple[int, int],
        axes: TableAxes,
        phases: Sequence[Phases],
    ) -> None:
        """Fills the table.

        Args:
            columns: The model's pipelines of one or two partitions.
            slot: The axes of its classes.
            axes: The axes of the table.
            phases: The phases of each axis.
        """
        classes = [axes.order[axis] for axis in slot]
        fits = (columns.gpu_class[:, 0] == classes[0]) & np.isin(
            columns.gpu_class[:, 1], (classes[1], NO_CLASS)
        )
        self._columns = columns.take(np.flatnonzero(fits))
        self._axes = axes
        self._phases = [phases[axis] for axis in slot]
        shape = tuple(count + 1 for count in axes.counts)
        sizes = tuple(len(each.fractions) for each in self._phases)
        table = np.zeros((*sizes, *shape))
        variants = self._variants()
        for position, axis in enumerate(slot):
            _fill(table, variants, position, slot, shape[axis])
        for axis in range(table.ndim):  # more of any GPUs never yields less
            np.maximum.accumulate(table, axis=axis, out=table)
        self.table: Floats = table

    def pipeline(self, phase: tuple[int, int], cell: Cell, share: float) -> ChosenPipeline:
        """Returns the quickest pipeline that yields a share of the rate of the table there."""
        columns = self._columns
        rate = share * float(self.table[(*phase, *cell)]) * (1 - TOLERANCE)
        shared = np.stack(
            [
                np.floor(each.fractions[at] * columns.level[:, position] + TOLERANCE)
                for position, (each, at) in enumerate(zip(self._phases, phase, strict=True))
            ],
            axis=1,
        ).astype(np.int64)
        shared[columns.gpu_class == NO_CLASS] = 0
        vgpus = np.ceil(rate / columns.rate - TOLERANCE).astype(np.int64)
        gpus = np.ceil((vgpus - shared).clip(0) / columns.level).astype(np.int64)
        best = quickest_that_fits(columns, gpus, self._axes.to_classes(cell))
        counts = gpus[best] * columns.level[best] + shared[best]
        return ChosenPipeline(columns, best, tuple(counts.tolist()))

    def _variants(self) -> _Variants:
        """Returns every undominated pipeline with every fraction its levels allow."""
        columns = self._columns
        missing = columns.gpu_class == NO_CLASS
        rate = columns.rate_per_gpu
        level = np.where(missing, _ALL_LEVELS, columns.level)
        kept = _undominated(rate, level)
        rate, level = rate[kept], np.where(missing[kept], 1, level[kept])
        parts = np.arange(level.max(initial=1))
        row, first, second = np.nonzero(
            (parts[:, None] < level[:, 0, None, None]) & (parts < level[:, 1, None, None])
        )
        fraction = np.stack([first, second], axis=1) / level[row]
        phase = np.stack(
            [
                np.abs(np.array(each.fractions) - fraction[:, position, None]).argmin(axis=1)
                for position, each in enumerate(self._phases)
            ],
            axis=1,
        )
        return _Variants(rate[row], fraction, phase)


def _undominated(rate: Floats, level: Ints) -> Ints:
    """Returns the pipelines that no other one beats with virtual GPUs at least as fine."""
    reached = (rate[:, None] <= rate[None]) & (level[None] % level[:, None] == 0)
    beaten = reached.all(axis=2)
    earlier = np.tri(len(rate), k=-1, dtype=np.bool_)  # of equal ones the first stays
    kept: Ints = np.flatnonzero(~(beaten & (~beaten.T | earlier)).any(axis=1))
    return kept


def _fill(
    table: Floats, variants: _Variants, position: int, slot: tuple[int, int], size: int
) -> None:
    """Enters the rates at which the pool at a position is exactly full."""
    some = np.flatnonzero(np.isfinite(variants.rate[:, position]))
    rate, fraction = variants.rate[some], variants.fraction[some]
    rates = rate[:, position, None] * (np.arange(size) + fraction[:, position, None])
    used = [np.zeros(rates.shape, dtype=np.int64) for _ in range(table.ndim - 2)]
    for other, axis in enumerate(slot):
        need = np.ceil(rates / rate[:, other, None] - fraction[:, other, None] - TOLERANCE)
        used[axis] += need.clip(0).astype(np.int64)
    inside = np.ones(rates.shape, dtype=np.bool_)
    phase = variants.phase[some]
    flat = np.broadcast_to(
        (phase[:, 0] * table.shape[1] + phase[:, 1])[:, None], rates.shape
    ).copy()
    for axis, gpus in enumerate(used):
        inside &= gpus < table.shape[axis + 2]
        flat = flat * table.shape[axis + 2] + gpus
    np.maximum.at(table.reshape(-1), flat[inside], rates[inside])
