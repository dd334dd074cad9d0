"""Closure over any number of pipelines per model: an unbounded knapsack of whole GPUs."""

from __future__ import annotations

import numpy as np

from catenary_scheduler.planning.pooled.columns.device_tables import Floats, Ints
from catenary_scheduler.planning.pooled.columns.tables import TOLERANCE, Cell, breakpoints


class RateTable:
    """Best rate of any number of pipelines in each cell, and the pipelines it consists of.

    The table is filled row by row along the last axis, which should be the class with the most
    GPUs. A row is the best of two kinds of sums: an atom that uses GPUs of another class on top of
    an earlier row, and an atom that uses all of these on top of GPUs of the last class only. An
    atom is a breakpoint of the table of single pipelines that smaller ones together do not reach.
    """

    def __init__(self, single: Floats) -> None:
        width = single.shape[-1]
        self._single = single
        self._rises = np.zeros(single.shape, dtype=np.bool_)
        self._rises[tuple(breakpoints(single).T)] = True
        # The entries left of each row are -inf, so that a shift beyond the row never wins.
        padded = np.full((*single.shape[:-1], 2 * width - 1), -np.inf)
        self.table: Floats = padded[..., width - 1 :]
        self._rows = np.lib.stride_tricks.sliding_window_view(
            padded.reshape(-1, 2 * width - 1), width, axis=1
        )
        rises = int(self._rises.sum())
        self._atoms: Ints = np.zeros((rises, single.ndim), dtype=np.int64)
        self._atom_rates: Floats = np.zeros(rises)
        self._count = 0
        self._on_last = self._fill_first_row()
        for prefix in np.ndindex(*single.shape[:-1]):
            if any(prefix):
                self._fill_row(prefix)

    @property
    def atoms(self) -> Ints:
        """Cells of the single pipelines of which all others are composed."""
        return self._atoms[: self._count]

    def parts(self, cell: Cell) -> list[tuple[Cell, float]]:
        """Returns the cells and rates of single pipelines that together make up a cell's rate."""
        atoms, rates = self.atoms, self._atom_rates[: self._count]
        here = np.array(cell)
        found = []
        while (value := self.table[tuple(here)]) > 0:
            left = here - atoms
            fits = np.flatnonzero((left >= 0).all(axis=1))
            total = rates[fits] + self.table[tuple(left[fits].T)]
            best = fits[total.argmax()] if len(fits) else None
            if best is not None and total.max() >= value * (1 - TOLERANCE):
                found.append((tuple(atoms[best].tolist()), float(rates[best])))
                here = left[best]
            else:  # this cell has one GPU too many for its rate
                here = here - next(
                    step
                    for step in np.eye(len(here), dtype=np.int64)
                    if (here >= step).all() and self.table[tuple(here - step)] >= value
                )
        return found

    def _fill_first_row(self) -> Floats:
        """Fills the row with GPUs of the last class only, and returns its shifts as a matrix."""
        zero = (0,) * (self._single.ndim - 1)
        single, row, rises = self._single[zero], self.table[zero], self._rises[zero]
        row[0] = 0.0
        for cell in range(1, len(row)):
            sums = row[cell - 1 : 0 : -1] + single[1:cell]
            best = max(row[cell - 1], sums.max(initial=0.0))
            if rises[cell] and single[cell] > best * (1 + TOLERANCE):
                self._keep((*zero, cell), single[cell])
                best = single[cell]
            row[cell] = best
        distance = np.arange(len(row))[:, None] - np.arange(len(row))[None, :]
        shifts: Floats = np.where(distance > 0, row[np.maximum(distance, 0)], -np.inf)
        return shifts

    def _fill_row(self, prefix: Cell) -> None:
        row, single = self.table[prefix], self._single[prefix]
        best = self._on_earlier_rows(prefix)
        best = np.maximum(best, (self._on_last + single).max(axis=1))
        new = self._rises[prefix] & (single > best * (1 + TOLERANCE))
        np.maximum(best, np.where(new, single, 0.0), out=row)
        for cell in np.flatnonzero(new):
            self._keep((*prefix, int(cell)), single[cell])

    def _on_earlier_rows(self, prefix: Cell) -> Floats:
        shape, width = self._single.shape[:-1], self._single.shape[-1]
        atoms, rates = self._atoms[: self._count], self._atom_rates[: self._count]
        usable = (atoms[:, :-1] <= prefix).all(axis=1) & (atoms[:, :-1] > 0).any(axis=1)
        atoms, rates = atoms[usable], rates[usable]
        best: Floats = np.zeros(width)
        for axis in range(len(prefix)):  # one GPU may stay idle
            if prefix[axis]:
                before = tuple(index - (at == axis) for at, index in enumerate(prefix))
                np.maximum(best, self.table[before], out=best)
        if len(atoms):
            rows = np.ravel_multi_index(tuple((np.array(prefix) - atoms[:, :-1]).T), shape)
            sums = self._rows[rows, width - 1 - atoms[:, -1]] + rates[:, None]
            np.maximum(best, sums.max(axis=0), out=best)
        return best

    def _keep(self, cell: Cell, rate: float) -> None:
        self._atoms[self._count] = cell
        self._atom_rates[self._count] = rate
        self._count += 1
