"""Prediction intervals: how far a measurement may be from its prediction.

The noise of a step is in proportion to its time, so fits weigh by 1 / t^2 and residuals are
relative. With p coefficients in use and k samples, s^2 = sum((y_i / f_i - 1)^2) / (k - p), where f
is the fit, and a new measurement at row x lies within

    f(x) * (1 +- t(k - p, share) * s * sqrt(1 + x' (X'WX)^-1 x / f(x)^2))

in `share` of all cases: the usual prediction interval of weighted least squares. It holds if noise
is independent from one step to the next. A machine that others use is slow for seconds at a time,
which the spread within one profile does not show.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist


@dataclass(frozen=True, slots=True)
class PredictionInterval:
    """A prediction, and an interval that should contain measurements."""

    low: float
    predicted: float
    high: float

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


def t_quantile(degrees: float, share: float) -> float:
    """Returns how many standard deviations hold `share` of a t distribution, both sides together.

    It uses the Cornish-Fisher expansion of the normal quantile (Abramowitz and Stegun 26.7.5), and
    exact formulas for 1 and 2 degrees. From 3 degrees on it is within 1 % for shares up to 99 %.
    """
    tail = (1.0 + share) / 2.0
    if degrees <= 1:
        return math.tan(math.pi * (tail - 0.5))
    if degrees <= 2:
        return (2.0 * tail - 1.0) / math.sqrt(2.0 * tail * (1.0 - tail))
    z, n = NormalDist().inv_cdf(tail), float(degrees)
    first = (z**3 + z) / 4.0
    second = (5.0 * z**5 + 16.0 * z**3 + 3.0 * z) / 96.0
    third = (3.0 * z**7 + 19.0 * z**5 + 17.0 * z**3 - 15.0 * z) / 384.0
    fourth = (79.0 * z**9 + 776.0 * z**7 + 1482.0 * z**5 - 1920.0 * z**3 - 945.0 * z) / 92160.0
    return z + first / n + second / n**2 + third / n**3 + fourth / n**4


def around(
    predicted: float, spread: float, leverage: float, degrees: float, share: float
) -> PredictionInterval:
    """Returns the interval of a new measurement; see the module for the formula.

    Args:
        predicted: Prediction f(x).
        spread: Relative standard deviation s.
        leverage: Leverage x' (X'WX)^-1 x / f(x)^2.
        degrees: Degrees of freedom k - p. If they are 0 or less, the spread is unknown and the
            interval is unbounded.
        share: Share of measurements that should lie inside, e.g. 0.9.
    """
    if degrees <= 0:
        return PredictionInterval(0.0, predicted, math.inf)
    half = t_quantile(degrees, share) * spread * math.sqrt(1.0 + leverage)
    return PredictionInterval(
        max(0.0, predicted * (1.0 - half)), predicted, predicted * (1.0 + half)
    )
