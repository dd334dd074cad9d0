"""How far off a prediction may be.

The noise of a step is in proportion to its time, so fits weigh by 1 / t^2 and residuals are
relative. With p coefficients in use and k samples, s^2 = sum((y_i / f_i - 1)^2) / (k - p), where f
is the fit, and a new measurement at row x lies within

    f(x) * (1 +- t(k - p, share) * s * sqrt(1 + x' (X'WX)^-1 x / f(x)^2))

in `share` of all cases: the usual prediction interval of weighted least squares. It holds where
noise is independent from one step to the next; a machine that others use is slow for seconds at a
time, and the spread within one profile does not tell of that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist


@dataclass(frozen=True, slots=True)
class PredictionInterval:
    """A prediction, and what measurements should lie between."""

    low: float
    predicted: float
    high: float

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


def t_quantile(degrees: float, share: float) -> float:
    """Returns how many standard deviations hold `share` of a t distribution, both sides together.

    Cornish-Fisher expansion of the normal quantile (Abramowitz and Stegun 26.7.5), exact formulas
    for 1 and 2 degrees: within 1 % up to 99 % from 3 degrees on.
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
        predicted: f(x).
        spread: s, relative.
        leverage: x' (X'WX)^-1 x / f(x)^2.
        degrees: k - p; 0 or less: nothing is known of the spread, the interval is everything.
        share: Of measurements that should lie inside, e.g. 0.9.
    """
    if degrees <= 0:
        return PredictionInterval(0.0, predicted, math.inf)
    half = t_quantile(degrees, share) * spread * math.sqrt(1.0 + leverage)
    return PredictionInterval(
        max(0.0, predicted * (1.0 - half)), predicted, predicted * (1.0 + half)
    )
