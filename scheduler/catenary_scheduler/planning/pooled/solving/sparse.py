"""Builder of a mixed-integer programme, which is handed to HiGHS in one piece."""

from __future__ import annotations

import highspy
import numpy as np
import numpy.typing as npt

from catenary_scheduler.planning.pooled.columns.device_tables import Floats, Ints

INFINITY = highspy.kHighsInf


class ProgrammeBuilder:
    """A programme under construction.

    Variables are at least 0; rows of equal length can be added together.
    """

    def __init__(self) -> None:
        self._upper: list[Floats] = []
        self._integer: list[npt.NDArray[np.bool_]] = []
        self._cost: dict[int, float] = {}
        self._size = 0
        self._index: list[Ints] = []
        self._value: list[Floats] = []
        self._lengths: list[Ints] = []
        self._lower_of_rows: list[Floats] = []
        self._upper_of_rows: list[Floats] = []

    def variables(self, upper: Floats, *, integer: bool) -> Ints:
        """Adds variables with these upper bounds, and returns their indices."""
        self._upper.append(upper)
        self._integer.append(np.full(len(upper), integer))
        begin, self._size = self._size, self._size + len(upper)
        return np.arange(begin, self._size)

    def minimise(self, index: Ints, cost: float) -> None:
        """Sets the cost of some variables in the objective."""
        self._cost |= dict.fromkeys(index.tolist(), cost)

    def row(self, index: Ints, value: Floats, *, least: float, most: float = INFINITY) -> None:
        """Adds the constraint least <= sum of value x variable <= most."""
        self.rows(index[None, :], value[None, :], least=least, most=most)

    def rows(self, index: Ints, value: Floats, *, least: float, most: float = INFINITY) -> None:
        """Adds several constraints; `index` and `value` have shape (rows, length)."""
        self._index.append(index.reshape(-1))
        self._value.append(value.reshape(-1))
        self._lengths.append(np.full(len(index), index.shape[1]))
        self._lower_of_rows.append(np.full(len(index), least))
        self._upper_of_rows.append(np.full(len(index), most))

    def build(self) -> highspy.HighsLp:
        cost = np.zeros(self._size)
        cost[list(self._cost)] = list(self._cost.values())
        lengths = np.concatenate(self._lengths)
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = self._size, len(lengths)
        lp.col_cost_, lp.col_lower_ = cost, np.zeros(self._size)
        lp.col_upper_ = np.concatenate(self._upper)
        lp.row_lower_ = np.concatenate(self._lower_of_rows)
        lp.row_upper_ = np.concatenate(self._upper_of_rows)
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lp.a_matrix_.start_ = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        lp.a_matrix_.index_ = np.concatenate(self._index).astype(np.int32)
        lp.a_matrix_.value_ = np.concatenate(self._value)
        kinds = highspy.HighsVarType
        lp.integrality_ = [
            kinds.kInteger if whole else kinds.kContinuous
            for whole in np.concatenate(self._integer).tolist()
        ]
        return lp
