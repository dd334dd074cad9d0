"""Whether figures of a long run stay where they are: slopes and their limits (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

WARM_UP = 0.5
"""Share of the run that does not count: caches, pools and the last 4096 timings fill at first."""
MEBIBYTE = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Limit:
    """How much a figure may grow: a slope, and a growth over the run that is mere noise."""

    per_minute: float
    noise: float


LIMITS = {
    "rss": Limit(0.25 * MEBIBYTE, 6 * MEBIBYTE),
    "fds": Limit(0.1, 4),
    "threads": Limit(0.05, 2),
}


@dataclass(frozen=True, slots=True)
class Slope:
    """How a figure of one process went, in its unit per minute."""

    process: str
    figure: str
    per_minute: float
    growth: float
    first: float
    last: float
    limit: Limit

    @property
    def is_too_steep(self) -> bool:
        return self.per_minute > self.limit.per_minute and self.growth > self.limit.noise


def slope(process: str, figure: str, samples: Sequence[tuple[float, float]]) -> Slope:
    """Returns the slope by Theil and Sen: the median over pairs, which single peaks do not move.

    Args:
        process: Whose figure it is.
        figure: One of `LIMITS`.
        samples: Moments in seconds, and values.
    """
    limit = LIMITS[figure]
    if len(samples) < 2:
        return Slope(process, figure, 0.0, 0.0, 0.0, 0.0, limit)
    times = np.array([at for at, _ in samples])
    values = np.array([value for _, value in samples])
    kept = times >= times[0] + WARM_UP * (times[-1] - times[0])
    times, values = times[kept], values[kept]
    if len(times) > 400:
        step = len(times) // 400 + 1
        times, values = times[::step], values[::step]
    left, right = np.triu_indices(len(times), 1)
    between = times[right] - times[left]
    rates = (values[right] - values[left])[between > 0] / between[between > 0]
    per_s = float(np.median(rates)) if len(rates) else 0.0
    return Slope(
        process,
        figure,
        60 * per_s,
        per_s * float(times[-1] - times[0]),
        float(values[0]),
        float(values[-1]),
        limit,
    )
