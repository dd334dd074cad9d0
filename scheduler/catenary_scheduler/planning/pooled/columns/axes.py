"""The order of the classes in the tables: fewest GPUs first, so that the last axis is longest."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from catenary_scheduler.planning.pooled.columns.tables import Cell
from catenary_scheduler.planning.pooled.problem import PoolingProblem


@dataclass(frozen=True, slots=True)
class TableAxes:
    """Of all tables of a problem; plans do not depend on it, speed does."""

    order: tuple[int, ...]
    """Per axis the index of its class."""
    counts: tuple[int, ...]
    """Per axis how many GPUs there are."""

    @property
    def cells(self) -> int:
        """Size of a table."""
        return prod(count + 1 for count in self.counts)

    @property
    def rows(self) -> int:
        """Rows of a table along its last axis."""
        return prod(count + 1 for count in self.counts[:-1])

    def to_classes(self, cell: Cell) -> Cell:
        """Returns the cell in the problem's order of classes."""
        back = [0] * len(cell)
        for axis, index in enumerate(self.order):
            back[index] = cell[axis]
        return tuple(back)


def axes_of(problem: PoolingProblem) -> TableAxes:
    """Returns the axes for a problem's classes."""
    counts = [gpu.count for gpu in problem.classes]
    order = sorted(range(len(counts)), key=lambda index: counts[index])
    return TableAxes(tuple(order), tuple(counts[index] for index in order))
