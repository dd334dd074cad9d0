"""Trend of a rate: arrivals per second over the last half minute, and their slope."""

from __future__ import annotations

from collections import deque
from math import sqrt

from catenary_services.domain.ids import NANOSECONDS_PER_SECOND, Nanoseconds

_SECONDS = 30
_LEAST_SECONDS = 12
_SIGNIFICANT = 4.0
"""Number of standard errors by which a slope must exceed zero to count."""
_MOST = 2.0
"""Largest multiple of the present rate that is ever predicted."""


class ArrivalTrend:
    """Number of arrivals in each second since the rate last changed, up to half a minute."""

    def __init__(self) -> None:
        self._bins: deque[int] = deque(maxlen=_SECONDS)
        self._second: int | None = None

    def arrived(self, now: Nanoseconds) -> None:
        self._turn(now)
        self._bins[-1] += 1

    def restart(self, now: Nanoseconds) -> None:
        """Starts over, because arrivals before a change say nothing about those after it."""
        self._bins.clear()
        self._second = None
        self._turn(now)

    def ahead(self, rate: float, ahead_ns: Nanoseconds, now: Nanoseconds) -> float:
        """Returns the rate to expect in `ahead_ns`: more than `rate` only if it clearly rises.

        Falling rates are not predicted, because removing workers is never urgent.
        """
        self._turn(now)
        counts = list(self._bins)[:-1]  # the present second is not over yet
        n = len(counts)
        if n < _LEAST_SECONDS or not any(counts):
            return rate
        mean = sum(counts) / n
        middle = (n - 1) / 2
        spread = sum((index - middle) ** 2 for index in range(n))
        slope = sum((index - middle) * count for index, count in enumerate(counts)) / spread
        error = sqrt(max(mean, 1.0 / n) / spread)  # counts are Poisson: variance equals mean
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
