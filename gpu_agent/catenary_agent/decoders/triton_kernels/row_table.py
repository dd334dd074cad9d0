"""The table in which kernels are told of the rows of a step, and what they answer.

A step's parameters reach the device in one copy, and the finalists come back in one.
"""

from __future__ import annotations

import math
import struct
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from catenary_services.domain.sampling import SamplingParameters


class RowColumn(IntEnum):
    """A column of the table, which is int64 [rows, `COLUMNS`]."""

    ROW = 0
    """The row of the logits."""
    STREAM = 1
    """The number from which the noise derives."""
    TEMPERATURE = 2
    """The bits of a float32."""
    LEAST = 3
    """The bits of the lowest scaled logit that min-p leaves, without its sign."""
    TOP_K = 4
    """The number of tokens to leave; 0 for all."""
    TOP_P = 5
    """The bits of a float64, 1 for all tokens."""
    DRAWS = 6
    """1 if a token is drawn, 0 if the likeliest one is taken."""
    CODE = 7
    """The result of a row whose largest logit is not finite."""


COLUMNS = len(RowColumn)
NO_BOUND = 0x7FFFFFFF
"""A size that no scaled logit exceeds."""
RESULTS = 8
"""Numbers of each row of what kernels answer, int32: two tokens, their random bits, the bits of
their scaled logits, and 1 if they are too near to each other for rough noise to decide."""

RowConstants = tuple[int, int, int, int, int]
"""The columns of a session that never change: temperature, least, top-k, top-p, and draws."""


class StepFilters(NamedTuple):
    """Whether some row of a step draws, and with which filters."""

    draws: bool
    top_k: bool
    top_p: bool


def row_constants(parameters: SamplingParameters) -> RowConstants:
    """Returns the columns of a session's rows that its parameters decide alone."""
    if parameters.greedy:
        return _float_bits(1.0), NO_BOUND, 0, _double_bits(1.0), 0
    least = NO_BOUND
    if parameters.min_p:
        least = _float_bits(math.log(parameters.min_p)) & NO_BOUND
    return (
        _float_bits(parameters.temperature),
        least,
        parameters.top_k,
        _double_bits(parameters.top_p),
        1,
    )


def filters_of(table: NDArray[np.int64]) -> StepFilters:
    """Returns what the rows of a table ask for."""
    shares = table[:, RowColumn.TOP_P].view(np.float64)
    return StepFilters(
        bool(table[:, RowColumn.DRAWS].any()),
        bool(table[:, RowColumn.TOP_K].any()),
        bool((shares < 1).any()),
    )


def _float_bits(number: float) -> int:
    return int(np.float32(number).view(np.int32))


def _double_bits(number: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", number))[0])
