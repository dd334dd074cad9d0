"""Processes of request arrivals: Poisson, Gamma, on/off, or a trace file; deterministic by seed."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from math import ceil, sqrt
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from catenary_services.domain.ids import NANOSECONDS_PER_SECOND
from catenary_services.errors import InvalidInput

Moments = npt.NDArray[np.float64]
"""Arrival times in seconds from the start, ascending; float64."""


class ArrivalProcess(Protocol):
    """A process of arrivals that can be drawn at any mean rate."""

    def moments(self, rate_rps: float, duration_s: float, random: np.random.Generator) -> Moments:
        """Returns arrival times in [0, duration_s), at a mean rate of `rate_rps` per second."""
        ...


@dataclass(frozen=True, slots=True)
class GammaArrivals:
    """Arrivals with Gamma-distributed gaps; with a coefficient of variation of 1, Poisson."""

    cv: float = 1.0

    def moments(self, rate_rps: float, duration_s: float, random: np.random.Generator) -> Moments:
        """Returns arrival times in [0, duration_s), at a mean rate of `rate_rps` per second."""
        shape = 1.0 / (self.cv * self.cv)
        return _renewals(lambda n: random.gamma(shape, 1.0 / shape, n), rate_rps, duration_s)


@dataclass(frozen=True, slots=True)
class PoissonArrivals:
    """A Poisson process: arrivals with exponentially distributed gaps."""

    def moments(self, rate_rps: float, duration_s: float, random: np.random.Generator) -> Moments:
        """Returns arrival times in [0, duration_s), at a mean rate of `rate_rps` per second."""
        return _renewals(random.standard_exponential, rate_rps, duration_s)


@dataclass(frozen=True, slots=True)
class OnOffArrivals:
    """Arrivals that are Poisson while on and absent while off; both periods are exponential."""

    on_s: float
    off_s: float

    def moments(self, rate_rps: float, duration_s: float, random: np.random.Generator) -> Moments:
        """Returns arrival times whose mean rate over on and off periods together is `rate_rps`."""
        cycle = self.on_s + self.off_s
        on = bool(random.random() < self.on_s / cycle)
        steps: list[tuple[float, float]] = []
        begin = 0.0
        while begin < duration_s:
            steps.append((begin, rate_rps * cycle / self.on_s if on else 0.0))
            begin += random.exponential(self.on_s if on else self.off_s)
            on = not on
        return _piecewise(steps, duration_s, random)


@dataclass(frozen=True, slots=True)
class TraceArrivals:
    """The gaps of recorded arrivals, scaled to a rate and repeated.

    The seed decides where in the trace a run begins.
    """

    gaps: tuple[float, ...]
    """Gaps between recorded arrivals, scaled to mean 1."""

    def moments(self, rate_rps: float, duration_s: float, random: np.random.Generator) -> Moments:
        """Returns arrival times at about `rate_rps`; a part of a trace has a rate of its own."""
        gaps = np.roll(np.asarray(self.gaps), -int(random.integers(len(self.gaps))))
        if rate_rps <= 0:
            return np.empty(0)
        laps = ceil(rate_rps * duration_s / len(gaps)) + 1
        moments = np.cumsum(np.tile(gaps, laps)) / rate_rps
        while moments[-1] < duration_s:
            moments = np.concatenate((moments, moments + moments[-1]))
        return moments[moments < duration_s]


@dataclass(frozen=True, slots=True)
class RateTraceArrivals:
    """Recorded rates, scaled to a mean rate and repeated; arrivals are Poisson within a step."""

    steps: tuple[tuple[float, float], ...]
    """Pairs of begin in seconds and rate, the first at 0; the mean of the rates over `length_s` is
    1."""
    length_s: float

    def moments(self, rate_rps: float, duration_s: float, random: np.random.Generator) -> Moments:
        """Returns arrival times in [0, duration_s); `rate_rps` is the mean over the trace."""
        laps = ceil(duration_s / self.length_s)
        steps = [
            (lap * self.length_s + begin, rate * rate_rps)
            for lap in range(laps)
            for begin, rate in self.steps
        ]
        return _piecewise(steps, duration_s, random)


def parse_arrivals(text: str) -> ArrivalProcess:
    """Returns the process named "poisson", "gamma:CV", "onoff:ON_S:OFF_S" or by a CSV file.

    A file has a header. With a column `seconds` (or `timestamp`, ISO 8601) it lists arrivals; with
    a second column `rps` each line gives the rate from that second until the next line's.

    Raises:
        InvalidInput: The text names no process, or its file is not a trace.
    """
    kind, *numbers = text.split(":")
    if kind == "poisson" and not numbers:
        return PoissonArrivals()
    if kind == "gamma" and len(numbers) == 1:
        return GammaArrivals(_positive(numbers[0]))
    if kind == "onoff" and len(numbers) == 2:
        return OnOffArrivals(_positive(numbers[0]), _positive(numbers[1]))
    path = Path(text)
    if not path.is_file():
        raise InvalidInput(
            "arrivals", f"{text!r} is not poisson, gamma:CV, onoff:ON_S:OFF_S or a file"
        )
    return read_trace(path)


def read_trace(path: Path) -> ArrivalProcess:
    """Returns the arrivals of a trace file in a format that `parse_arrivals` describes.

    Raises:
        InvalidInput: The file is not such a trace.
    """
    with path.open(newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    header = {name.strip().lower(): name for name in (lines[0] if lines else {}) if name}
    seconds = header.get("seconds") or header.get("timestamp")
    if seconds is None:
        raise InvalidInput("arrivals", f"{path} needs a column seconds or timestamp")
    try:
        moments = np.array([_seconds(line[seconds]) for line in lines])
        rates = [float(line[header["rps"]]) for line in lines] if "rps" in header else None
    except (TypeError, ValueError) as error:
        raise InvalidInput("arrivals", f"{path}: {error}") from None
    if len(moments) < 2 or not np.all(np.isfinite(moments)) or np.any(np.diff(moments) < 0):
        raise InvalidInput("arrivals", f"{path} needs two lines or more, in order of time")
    if moments[0] == moments[-1]:
        raise InvalidInput("arrivals", f"{path}: all lines have the same time")
    if rates is None:
        gaps = np.diff(moments)
        return TraceArrivals(tuple(float(gap) for gap in gaps / gaps.mean()))
    return _rates(path, moments - moments[0], np.array(rates))


def merged(
    processes: list[tuple[ArrivalProcess, float]], duration_s: float, seed: int
) -> tuple[list[int], list[int]]:
    """Returns all arrivals in nanoseconds, ascending, and the index of each one's process.

    Args:
        processes: Arrivals and rate of each; each has a random stream of its own, so that changing
            one model's rate leaves the others' arrivals as they are.
        duration_s: Length of the period in seconds; all arrivals lie in it.
        seed: Seed of all random streams.
    """
    moments, owners = [], []
    for index, (arrivals, rate) in enumerate(processes):
        random = np.random.default_rng((seed, 1000 + index))
        drawn = arrivals.moments(rate, duration_s, random) if rate > 0 else np.empty(0)
        moments.append((drawn * NANOSECONDS_PER_SECOND).astype(np.int64))
        owners.append(np.full(len(drawn), index, dtype=np.int64))
    everything, owner = np.concatenate(moments), np.concatenate(owners)
    order = np.argsort(everything, kind="stable")
    return everything[order].tolist(), owner[order].tolist()


def _rates(path: Path, begins: Moments, rates: Moments) -> RateTraceArrivals:
    lengths = np.append(np.diff(begins), begins[-1] - begins[-2])
    length = float(lengths.sum())
    total = float((lengths * rates).sum())
    if not np.all(np.isfinite(rates)) or np.any(rates < 0) or total <= 0:
        raise InvalidInput("arrivals", f"{path}: rates must be 0 or more, and some more than 0")
    shape = rates * (length / total)
    steps = tuple(zip(begins.tolist(), shape.tolist(), strict=True))
    return RateTraceArrivals(steps, length)


def _renewals(gaps: Callable[[int], Moments], rate_rps: float, duration_s: float) -> Moments:
    expected = rate_rps * duration_s
    some = int(expected + 6 * sqrt(expected)) + 16
    moments = np.cumsum(gaps(some)) / rate_rps
    while moments[-1] < duration_s:
        more = np.cumsum(gaps(some)) / rate_rps
        moments = np.concatenate((moments, moments[-1] + more))
    return moments[moments < duration_s]


def _piecewise(
    steps: list[tuple[float, float]], duration_s: float, random: np.random.Generator
) -> Moments:
    """Returns Poisson arrivals at a rate that is constant from each step to the next."""
    parts = []
    for at, (begin, rate) in enumerate(steps):
        end = min(duration_s, steps[at + 1][0] if at + 1 < len(steps) else duration_s)
        if end > begin:
            count = random.poisson(rate * (end - begin))
            parts.append(np.sort(random.uniform(begin, end, count)))
    return np.concatenate(parts) if parts else np.empty(0)


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return datetime.fromisoformat(text).timestamp()


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise InvalidInput("arrivals", f"{text!r} is not a number above 0")
    return number
