"""Sharing: two pipelines of a model that share one GPU, and what that gains over whole GPUs.

The artifact's MILP adds up the virtual GPUs of a model per position and class before it rounds up
to whole GPUs, so that pools at the same position may share a GPU. Here a shared GPU is cut into
equal virtual GPUs, as it was profiled (the artifact also mixes sizes), between two pipelines, and
a pipeline takes part in one such pair at most. Pairs count only where they beat whole GPUs alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from catenary_scheduler.planning.pooled.columns.columns import PipelineColumns
from catenary_scheduler.planning.pooled.columns.device_tables import Floats
from catenary_scheduler.planning.pooled.columns.halves import SharedStage, TablePoints, find_halves
from catenary_scheduler.planning.pooled.columns.tables import TOLERANCE, Cell


@dataclass(frozen=True, slots=True)
class PairMember:
    """One of the two pipelines that share a GPU."""

    place: SharedStage
    vgpus: int
    """Number of virtual GPUs of the shared GPU that it has."""
    cell: Cell
    """Whole GPUs besides the shared one, in the order of the table's axes."""
    rate: float


@dataclass(frozen=True, slots=True)
class PipelinePair:
    """Two pipelines that share a GPU.

    Their cells and the shared GPU add up to a cell of the table.
    """

    first: PairMember
    second: PairMember


class PairTable:
    """Best pair of each cell that beats whole GPUs. `table` holds the rates, and 0 elsewhere."""

    def __init__(self, columns: PipelineColumns, order: Sequence[int], whole: Floats) -> None:
        """Finds the pairs. The arguments are those of `find_halves`."""
        self.table: Floats = np.zeros_like(whole)
        self._whole = whole
        self._order = order
        self._origin: dict[Cell, PipelinePair] = {}
        for place, halves in find_halves(columns, order, whole).items():
            for vgpus in range(1, place.level // 2 + 1):
                self._combine(place, vgpus, halves[vgpus - 1], halves[place.level - vgpus - 1])

    def at(self, cell: Cell) -> PipelinePair:
        """Returns the pair behind the rate of a cell."""
        return self._origin[cell]

    def _combine(
        self, place: SharedStage, vgpus: int, one: TablePoints, other: TablePoints
    ) -> None:
        if not len(one.rates) or not len(other.rates):
            return
        shape = self.table.shape
        shared = np.array([index == place.gpu_class for index in self._order], dtype=np.int64)
        cells = (one.cells[:, None, :] + other.cells[None, :, :] + shared).reshape(-1, len(shape))
        rates = (one.rates[:, None] + other.rates[None, :]).reshape(-1)
        inside = np.flatnonzero((cells < shape).all(axis=1))
        at = np.ravel_multi_index(tuple(cells[inside].T), shape)
        known = np.maximum(self._whole, self.table).reshape(-1)
        better = rates[inside] > known[at] * (1 + TOLERANCE)
        at, found = at[better], inside[better]
        by_rate = np.argsort(rates[found], kind="stable")  # the last of a cell's entries stays
        at, found = at[by_rate], found[by_rate]
        self.table.reshape(-1)[at] = rates[found]
        for flat, pair in dict(zip(at.tolist(), found.tolist(), strict=True)).items():
            a, b = divmod(pair, len(other.rates))
            cell = tuple(int(index) for index in np.unravel_index(flat, shape))
            self._origin[cell] = PipelinePair(
                _member(place, vgpus, one, a), _member(place, place.level - vgpus, other, b)
            )


def _member(place: SharedStage, vgpus: int, points: TablePoints, at: int) -> PairMember:
    return PairMember(place, vgpus, tuple(points.cells[at].tolist()), float(points.rates[at]))
