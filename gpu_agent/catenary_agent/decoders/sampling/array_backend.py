"""The operations of sampling that NumPy and PyTorch spell differently."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from catenary_agent.decoders.sampling.sampling import SessionSampler

Asked = tuple[int, SessionSampler]
"""A session's number and its sampler."""


class SelectedColumns(NamedTuple):
    """Some columns of each row; every array is [rows, n]."""

    ids: Any
    """The column numbers."""
    values: Any
    """The values in these columns; negative infinity in columns that only pad a row."""
    ordered: Any
    """The same values in descending order."""
    floor: Any
    """Values above it are all included, [rows, 1]. With infinity the selection decides nothing."""


def most_few(vocabulary: int) -> int:
    """Returns the most tokens of a vocabulary that are processed apart from the rest.

    It is an eighth, since each of them takes six times the memory of a logit.
    """
    return max(64, vocabulary // 8)


class ArrayBackend(Protocol):
    """Operations that NumPy and PyTorch spell differently."""

    xp: Any
    """The module: `numpy` or `torch`."""
    block_numbers: int
    """Number of logits processed at a time, so that they fit into a cache or into spare memory. The
    memory this takes is in `catenary_services.domain.sampler_sizes`."""
    sorted_numbers: int
    """Number of logits processed at a time where whole vocabularies are sorted."""

    def put(self, array: NDArray[Any]) -> Any:
        """Returns a copy of an array on the device of the logits; without a copy if it is there."""
        ...

    def take(self, table: Any, columns: Any) -> Any:
        """Returns `table[i, columns[i, j]]`, [rows, columns]."""
        ...

    def likeliest(self, values: Any, count: int) -> SelectedColumns:
        """Returns at least `count` of the largest values of each row, among them the 0."""
        ...

    def descending(self, values: Any) -> Any:
        """Returns the values of each row in descending order."""
        ...

    def best_two(self, keys: Any) -> Any:
        """Returns the columns of the largest and second largest value of each row, [rows, 2].

        It may change `keys`.
        """
        ...

    def penalise(self, values: Any, rows: NDArray[np.int64], asked: Sequence[Asked]) -> None:
        """Applies repetition, frequency and presence penalties to the logits of these rows."""
        ...

    def forget(self, session: int) -> None:
        """Frees what is kept of a session."""
        ...

    def likeliest_columns(self, values: Any, count: int) -> Any:
        """Returns the columns of the `count` largest values of each row, in any order."""
        ...

    def host(self, array: Any) -> NDArray[Any]:
        """Returns an array on the host."""
        ...
