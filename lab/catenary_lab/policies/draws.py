"""Random numbers for dispatchers that break ties at random."""

from __future__ import annotations

import numpy as np

_DRAWN = 4096


class Draws:
    """A source of random numbers, which are drawn many at a time.

    Args:
        seed: Decides all of them.
    """

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng((seed, 5))
        self._numbers: list[float] = []

    def below(self, limit: int) -> int:
        """Returns a number of [0, limit), each equally likely."""
        if not self._numbers:
            self._numbers = self._random.random(_DRAWN).tolist()
        return int(self._numbers.pop() * limit)
