"""Numbers of reports: means over runs that may lack them, and cells of tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

import numpy as np


def known_mean(values: Iterable[float | None]) -> float | None:
    """Returns the mean of the values that are known; None if none is."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Returns a percentile of values, between which it interpolates; None if there are none."""
    return float(np.percentile(values, percent)) if len(values) else None


def rounded(value: float | None, digits: int = 2, unit: str = "") -> str | None:
    """Returns a number as text for a cell; None if it is unknown."""
    return None if value is None else f"{value:.{digits}f}{unit}"
