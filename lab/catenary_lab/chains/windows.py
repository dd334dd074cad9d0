"""Windows of consecutive blocks: the common part of the placements of PETALS and BPRR."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm


@dataclass(frozen=True, slots=True)
class Window:
    """The blocks `[first_block, last_block)` that one server hosts; none if it is empty."""

    first_block: int
    last_block: int

    @property
    def blocks(self) -> int:
        """Number of blocks in the window."""
        return self.last_block - self.first_block


EMPTY = Window(0, 0)


def window_sums(values: Sequence[int], length: int) -> list[int]:
    """Returns the sum of every window of this length, by first block."""
    total = sum(values[:length])
    sums = [total]
    for first in range(1, len(values) - length + 1):
        total += values[first + length - 1] - values[first - 1]
        sums.append(total)
    return sums


def least_sorted(values: Sequence[int], length: int) -> int:
    """Returns the first block of the window whose sorted values are least, lexicographically.

    Of several such windows, it is the first.
    """
    windows = range(len(values) - length + 1)
    return min(windows, key=lambda first: sorted(values[first : first + length]))


def common_integers(values: Sequence[Fraction]) -> list[int]:
    """Returns integers in the same proportions: order and ties as exact as the fractions'."""
    denominator = lcm(*(value.denominator for value in values))
    return [int(value * denominator) for value in values]


def complete(windows: Sequence[Window], blocks: int) -> bool:
    """Returns whether every block is hosted, so that a path through all of them exists."""
    hosted = [False] * blocks
    for window in windows:
        hosted[window.first_block : window.last_block] = [True] * window.blocks
    return all(hosted)
