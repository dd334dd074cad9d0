"""Order of the classes along the axes of tables: fewest GPUs first."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from catenary_scheduler.planning.pooled.columns.tables import Cell
from catenary_scheduler.planning.pooled.problem import PoolingProblem


@dataclass(frozen=True, slots=True)
class TableAxes:
    """Axes of all tables of a problem. Plans do not depend on their order, speed does."""

    order: tuple[int, ...]
    """Index of the class of each axis in the problem."""
    counts: tuple[int, ...]
    """Number of GPUs along each axis."""

    @property
    def cells(self) -> int:
        return prod(count + 1 for count in self.counts)

    @property
    def rows(self) -> int:
        """Number of rows of a table along its last axis."""
        return prod(count + 1 for count in self.counts[:-1])

    def to_classes(self, cell: Cell) -> Cell:
        """Returns a cell in the problem's order of classes."""
        back = [0] * len(cell)
        for axis, index in enumerate(self.order):
            back[index] = cell[axis]
        return tuple(back)


def axes_of(problem: PoolingProblem) -> TableAxes:
    counts = [gpu.count for gpu in problem.classes]
    order = sorted(range(len(counts)), key=lambda index: counts[index])
    return TableAxes(tuple(order), tuple(counts[index] for index in order))
