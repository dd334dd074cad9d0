"""One pipeline per slot on whole GPUs, for any number of partitions and classes.

These are not all plans that the reference's rules allow, as nothing is shared. But they are found
quickly, and HiGHS begins its search with them.
"""

from __future__ import annotations

from itertools import product

import numpy as np

from catenary_lab.pools.artifact.sums import add_sums, rises_of, split_of
from catenary_scheduler.planning.pooled.columns.axes import TableAxes
from catenary_scheduler.planning.pooled.columns.columns import NO_CLASS, PipelineColumns
from catenary_scheduler.planning.pooled.columns.device_tables import Floats
from catenary_scheduler.planning.pooled.columns.pruning import undominated
from catenary_scheduler.planning.pooled.columns.selection import ChosenPipeline, quickest_pipeline
from catenary_scheduler.planning.pooled.columns.tables import Cell, single_table


class SlotSums:
    """The best rates of one model with one pipeline per slot; see `exact.ModelTable`."""

    def __init__(self, columns: PipelineColumns, axes: TableAxes) -> None:
        """Fills the tables from the model's pipelines."""
        self._axes = axes
        width, classes = columns.level.shape[1], len(axes.counts)
        self._columns: list[PipelineColumns] = []
        self._tables: list[Floats] = []
        for slot in product(range(classes), repeat=width):
            fits = (columns.gpu_class == slot) | (columns.gpu_class == NO_CLASS)
            some = columns.take(np.flatnonzero(fits.all(axis=1)))
            if len(some):
                self._columns.append(some)
                pruned = undominated(some, classes)
                self._tables.append(single_table(pruned, axes.order, axes.counts))
        self._sums = [self._tables[0]]
        for table in self._tables[1:]:
            total = np.zeros_like(table)
            nothing = (0,) * table.ndim
            add_sums(total, rises_of(self._sums[-1]), rises_of(table), nothing)
            self._sums.append(total)

    @property
    def table(self) -> Floats:
        """The best rate by number of whole GPUs of each class."""
        return self._sums[-1]

    def pipelines(self, cell: Cell, share: float = 1.0) -> list[ChosenPipeline]:
        """Returns the pipelines behind the rate of a cell, or that yield a share of it."""
        chosen = []
        for at in range(len(self._tables) - 1, -1, -1):
            here = cell
            if at:
                rate = float(self._sums[at][cell])
                split = split_of(self._sums[at - 1], self._tables[at], cell, rate)
                assert split is not None
                cell, here = split
            if (rate := float(self._tables[at][here])) > 0:
                in_classes = self._axes.to_classes(here)
                chosen.append(quickest_pipeline(self._columns[at], in_classes, share * rate))
        return chosen
