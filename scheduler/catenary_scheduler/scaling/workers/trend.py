"""Where a rate is going: arrivals per second over the last half minute, and their slope."""

from __future__ import annotations

from collections import deque
from math import sqrt

from catenary_services.domain.ids import NANOSECONDS_PER_SECOND, Nanoseconds

_SECONDS = 30
_LEAST_SECONDS = 12
_SIGNIFICANT = 4.0
"""A slope counts if it is so many standard errors from none."""
_MOST = 2.0
"""Nobody is told to expect more than this multiple of the present rate."""


class Trend:
    """Arrivals in bins of a second, since the last change of the rate."""

    def __init__(self) -> None:
        self._bins: deque[int] = deque(maxlen=_SECONDS)
        self._second: int | None = None

    def arrived(self, now: Nanoseconds) -> None:
        """Counts an arrival."""
        self._turn(now)
        self._bins[-1] += 1

    def restart(self, now: Nanoseconds) -> None:
        """Begins anew: what was before the change says nothing of what follows it."""
        self._bins.clear()
        self._second = None
        self._turn(now)

    def ahead(self, rate: float, ahead_ns: Nanoseconds, now: Nanoseconds) -> float:
        """Returns the rate to expect so much later: more than `rate` only if it clearly rises.

        Falling rates are not foreseen: taking workers away is in no hurry.
        """
        self._turn(now)
        counts = list(self._bins)[:-1]  # the present second is not over
        n = len(counts)
        if n < _LEAST_SECONDS or not any(counts):
            return rate
        mean = sum(counts) / n
        middle = (n - 1) / 2
        spread = sum((index - middle) ** 2 for index in range(n))
        slope = sum((index - middle) * count for index, count in enumerate(counts)) / spread
        error = sqrt(max(mean, 1.0 / n) / spread)  # counts are Poisson: their variance is the mean
        if slope <= _SIGNIFICANT * error:
            return rate
        seconds = ahead_ns / NANOSECONDS_PER_SECOND + middle
        return max(rate, min(mean + slope * seconds, _MOST * max(rate, mean)))

    def _turn(self, now: Nanoseconds) -> None:
        second = now // NANOSECONDS_PER_SECOND
        if self._second is None:
            self._bins.append(0)
        else:
            for _ in range(min(_SECONDS, second - self._second)):
                self._bins.append(0)
        self._second = second
