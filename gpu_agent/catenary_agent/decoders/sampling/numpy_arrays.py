"""The array operations of sampling in NumPy; see `array_backend`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from catenary_agent.decoders.sampling.array_backend import Asked, SelectedColumns, most_few
from catenary_agent.decoders.sampling.choosing import TokenSampler
from catenary_services.domain.sampler_sizes import CPU_BLOCK_NUMBERS

_NEAR = np.float32(10)
"""Tokens less likely than the likeliest by a factor of e^10 are mostly removed by the filters."""
_GROUP = 64
_GROUP_SHARE = 4
"""The maxima of groups are searched instead of all values if there are at least this many times as
many groups as values are wanted."""


def numpy_chooser(vocabulary: int) -> TokenSampler:
    """Returns a sampler for logits in NumPy arrays."""
    return TokenSampler(NumpyArrayBackend(), vocabulary)


class NumpyArrayBackend:
    """The `ArrayBackend` of NumPy."""

    xp: Any = np
    block_numbers = sorted_numbers = CPU_BLOCK_NUMBERS

    def put(self, array: NDArray[Any]) -> NDArray[Any]:
        """Returns the array itself."""
        return array

    def take(self, table: NDArray[Any], columns: NDArray[Any]) -> NDArray[Any]:
        found: NDArray[Any] = table[np.arange(len(table))[:, None], columns]
        return found

    def likeliest(self, values: NDArray[Any], count: int) -> SelectedColumns:
        """Selects the values near the largest; see `ArrayBackend.likeliest`."""
        floor = np.full((len(values), 1), -_NEAR)
        if count:
            np.minimum(floor, _below_the_largest(values, count), out=floor)
        near = values >= floor
        most = most_few(values.shape[1])
        if np.count_nonzero(near) > most:  # the count over all rows is faster than one per row
            crowded = np.count_nonzero(near, axis=1) > most
            near[crowded, 1:] = False  # one column is left, whichever
            near[crowded, 0] = True
            floor[crowded] = np.inf
        places = np.flatnonzero(near)
        del near
        rows, ids = np.divmod(places, values.shape[1])
        starts = np.searchsorted(rows, np.arange(len(values)))
        columns = np.arange(len(rows)) - starts[rows]
        shape = (len(values), int(columns.max(initial=0)) + 1)
        few = SelectedColumns(
            np.zeros(shape, np.int64), np.full(shape, -np.inf, np.float32), None, floor
        )
        few.ids[rows, columns] = ids
        few.values[rows, columns] = values.ravel()[places]
        return few._replace(ordered=self.descending(few.values))

    def descending(self, values: NDArray[Any]) -> NDArray[Any]:
        return np.sort(values, axis=1)[:, ::-1]

    def best_two(self, keys: NDArray[Any]) -> NDArray[Any]:
        first = keys.argmax(1)
        keys[np.arange(len(keys)), first] = -np.inf
        return np.stack((first, keys.argmax(1)), 1)

    def likeliest_columns(self, values: NDArray[Any], count: int) -> NDArray[np.int64]:
        edge = values.shape[1] - count
        if edge == 0 or count == 0:
            return np.broadcast_to(np.arange(count, dtype=np.int64), (len(values), count))
        columns: NDArray[np.int64] = np.argpartition(values, edge, axis=1)[:, edge:]
        return columns

    def penalise(
        self, values: NDArray[Any], rows: NDArray[np.int64], asked: Sequence[Asked]
    ) -> None:
        """Changes only the logits of tokens that occurred; see `ArrayBackend.penalise`."""
        for row, (_, sampler) in zip(rows, asked, strict=True):
            said, p = sampler.said, sampler.parameters
            assert said is not None
            logits = values[row]
            found = logits[said.ids]
            if p.repetition_penalty != 1:
                factor = np.float32(p.repetition_penalty)
                found = np.where(found < 0, found * factor, found / factor)
            if p.frequency_penalty or p.presence_penalty:
                off = said.counts * np.float32(p.frequency_penalty)
                off += np.float32(p.presence_penalty)
                found = found - np.where(said.counts > 0, off, np.float32(0))
            logits[said.ids] = found

    def forget(self, session: int) -> None:
        """Does nothing, since nothing is kept."""

    def host(self, array: NDArray[Any]) -> NDArray[Any]:
        """Returns the array itself."""
        return array


def _below_the_largest(values: NDArray[Any], count: int) -> NDArray[Any]:
    """Returns a bound that at least `count` values of each row reach, [rows, 1]."""
    rows, columns = values.shape
    groups = columns // _GROUP
    if count * _GROUP_SHARE <= groups:
        # The count-th largest of the groups' maxima is no more than the count-th largest of all.
        values = values[:, : groups * _GROUP].reshape(rows, _GROUP, groups).max(1)
    edge = values.shape[1] - count
    return np.partition(values, edge, axis=1)[:, edge : edge + 1]
