"""The artifact's rules: one pipeline per slot, pools at one position may share a GPU.

Steps 2 and 4 of the dynamic programme in the specification, for up to two partitions and two
classes. The four slots form a ring: HH and HL meet at the first position on H, HL and LL at the
second on L, and so on; two slots that meet may share one GPU of that class there. First the slots
that start with the same class are joined, then the two results; both keep the fractions still to
be filled as axes of their tables. Virtual GPUs of different sizes may share a GPU, as there
(nobody has profiled that).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from catenary_lab.pools.artifact.slots import Phases, Slot, phases_of
from catenary_lab.pools.artifact.sums import Points, add_sums, rising, split_of
from catenary_scheduler.planning.pooled.columns.axes import TableAxes
from catenary_scheduler.planning.pooled.columns.columns import PipelineColumns
from catenary_scheduler.planning.pooled.columns.device_tables import Floats
from catenary_scheduler.planning.pooled.columns.selection import ChosenPipeline
from catenary_scheduler.planning.pooled.columns.tables import Cell

MAX_PARTITIONS = 2
MAX_CLASSES = 2

Phase = tuple[int, int]


class _Way(NamedTuple):
    """One way to combine two tables."""

    first: Phase
    second: Phase
    shared: Cell
    """GPUs that the two share, by axis."""


class ReferenceTable:
    """The best rates of one model under the artifact's rules; see `exact.ModelTable`."""

    def __init__(
        self, columns: PipelineColumns, axes: TableAxes, levels: Sequence[Sequence[int]]
    ) -> None:
        """Fills the tables.

        Args:
            columns: The model's pipelines of up to two partitions, on all levels.
            axes: Axes of the tables, one or two.
            levels: Levels of each axis's class.
        """
        assert columns.level.shape[1] == MAX_PARTITIONS
        assert len(axes.counts) <= MAX_CLASSES
        self._phases = [phases_of(each) for each in levels]
        every = range(len(axes.counts))
        self._slots = {
            slot: Slot(columns, slot, axes, self._phases) for slot in product(every, every)
        }
        self._same_first = [self._joined_at_first(axis) for axis in every]
        self.table: Floats = self._joined_at_second()

    def pipelines(self, cell: Cell, share: float = 1.0) -> list[ChosenPipeline]:
        """Returns the pipelines behind the rate of a cell, or that yield a share of it."""
        return [
            self._slots[slot].pipeline(phase, part, share)
            for slot, phase, part in self._slots_of(cell)
            if self._slots[slot].table[(*phase, *part)] > 0
        ]

    def _slots_of(self, cell: Cell) -> list[tuple[tuple[int, int], Phase, Cell]]:
        """Returns the slots behind the rate of a cell, with the phases and GPUs of each."""
        if len(self._same_first) == 1:
            return [((0, 0), (0, 0), cell)]
        one, other = self._same_first
        way, first, second = _origin(
            (one, other), self._ways_at_second(), cell, float(self.table[cell])
        )
        return self._pair_of(0, way.first, first) + self._pair_of(1, way.second, second)

    def _pair_of(
        self, axis: int, phase: Phase, cell: Cell
    ) -> list[tuple[tuple[int, int], Phase, Cell]]:
        """Returns the slots that start with one class, with the phases and GPUs of each."""
        tables = self._slots[axis, 0].table, self._slots[axis, 1].table
        rate = float(self._same_first[axis][(*phase, *cell)])
        way, first, second = _origin(tables, self._ways_at_first(axis, phase), cell, rate)
        return [((axis, 0), way.first, first), ((axis, 1), way.second, second)]

    def _joined_at_first(self, axis: int) -> Floats:
        """Returns the table of the slots (axis, 0) and (axis, 1) by their second phases."""
        one = self._slots[axis, 0].table
        if len(self._phases) == 1:
            return one
        other = self._slots[axis, 1].table
        rises = _rises(one), _rises(other)
        joined = np.zeros((one.shape[1], other.shape[1], *one.shape[2:]))
        for phase in product(range(joined.shape[0]), range(joined.shape[1])):
            here = joined[phase]
            for lower in _lower(phase):
                np.maximum(here, joined[lower], out=here)
            for way in self._ways_at_first(axis, phase):
                if way.first in rises[0] and way.second in rises[1]:
                    add_sums(here, rises[0][way.first], rises[1][way.second], way.shared)
        return joined

    def _joined_at_second(self) -> Floats:
        one = self._same_first[0]
        if len(self._same_first) == 1:
            return np.array(one[0, 0])
        rises = _rises(one), _rises(self._same_first[1])
        table = np.zeros(one.shape[2:])
        for way in self._ways_at_second():
            if way.first in rises[0] and way.second in rises[1]:
                add_sums(table, rises[0][way.first], rises[1][way.second], way.shared)
        return table

    def _ways_at_first(self, axis: int, phase: Phase) -> Iterator[_Way]:
        shared = tuple(int(at == axis) for at in range(len(self._phases)))
        for a, b in _meetings(self._phases[axis]):
            yield _Way((a, phase[0]), (b, phase[1]), shared if a else (0,) * len(shared))

    def _ways_at_second(self) -> Iterator[_Way]:
        for (a, b), (c, d) in product(_meetings(self._phases[0]), _meetings(self._phases[1])):
            yield _Way((a, c), (b, d), (int(a > 0), int(c > 0)))


def _meetings(phases: Phases) -> list[tuple[int, int]]:
    """Returns how two pools may meet on a GPU: not at all, or by fractions that fill it."""
    return [(0, 0), *phases.pairs]


def _lower(phase: Phase) -> Iterator[Phase]:
    if phase[0]:
        yield (phase[0] - 1, phase[1])
    if phase[1]:
        yield (phase[0], phase[1] - 1)


def _rises(table: Floats) -> dict[Phase, Points]:
    """Returns by phase the cells where less of anything yields less, plus cell 0 of phase (0, 0).

    In all other cells a smaller phase or fewer GPUs do as well, and these are looked at themselves.
    """
    rises, found = rising(table), {}
    for phase in product(range(table.shape[0]), range(table.shape[1])):
        cells = np.argwhere(rises[phase])
        if len(cells):
            found[phase] = Points(cells, table[phase][rises[phase]])
    return found


def _origin(
    tables: tuple[Floats, Floats], ways: Iterator[_Way], cell: Cell, rate: float
) -> tuple[_Way, Cell, Cell]:
    """Returns the way of combining two tables, and the cells of both, that make a rate."""
    for way in ways:
        room = tuple(gpus - taken for gpus, taken in zip(cell, way.shared, strict=True))
        split = split_of(tables[0][way.first], tables[1][way.second], room, rate)
        if split is not None:
            return way, *split
    raise AssertionError("a rate of the table comes from nowhere")
