"""Detection of a change in a rate, or in the mean of lengths: two-sided CUSUM, self-starting.

A cumulative sum (Page, 1954) adds up how much better the hypothesis of a change by a given amount
explains the observations than the hypothesis of no change. It never falls below zero. A change is
detected when the sum exceeds a threshold, and its moment is the last one at which the sum was zero.
Both hypotheses refer to an estimate that is learned from the observations since the last change, so
nothing has to be known beforehand. An observation costs constant time.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, log, sqrt

from catenary_services.domain.ids import NANOSECONDS_PER_SECOND, Nanoseconds


@dataclass(frozen=True, slots=True)
class RatePolicy:
    """Parameters of the detection of a change in the rate of arrivals."""

    ratio: float = 1.5
    """Factor, up or down, whose change is found soonest; smaller changes are found later."""
    threshold: float = 9.0
    """Value of a sum above which a change is believed. False alarms are at least e**threshold
    arrivals apart (measured: tens of thousands)."""
    memory_ns: Nanoseconds = 120 * NANOSECONDS_PER_SECOND
    """Age at which an arrival counts for 1/e of a new one. Slow drifts are thus followed without an
    alarm."""
    least_arrivals: float = 12.0
    """Number of expected arrivals from which changes are looked for."""
    least_rate_per_s: float = 0.05
    """Lowest rate that is assumed; a rate below it is watched as if it were this one."""
    cautious_ns: Nanoseconds = 5 * NANOSECONDS_PER_SECOND
    """Shortest time in which the first arrivals are assumed to have come."""


@dataclass(slots=True)
class _Run:
    """A cumulative sum, when it was last zero, and the arrivals since then."""

    sum: float = 0.0
    since_ns: Nanoseconds = 0
    arrivals: int = 0

    def restart(self, now: Nanoseconds) -> None:
        self.sum, self.since_ns, self.arrivals = 0.0, now, 0


class ArrivalWatch:
    """Estimator of a rate of arrivals that detects its changes (Poisson CUSUM in continuous time).

    Between arrivals the log-likelihood ratio of "the rate is `ratio` times what it was" falls by
    (ratio - 1) * rate * dt, and at an arrival it rises by log(ratio). That of "the rate is 1/ratio
    of what it was" behaves the other way round. Time alone can therefore raise the alarm that
    arrivals have stopped.
    """

    def __init__(self, policy: RatePolicy | None = None) -> None:
        self._policy = policy or RatePolicy()
        self._step = log(self._policy.ratio)
        self._count = 0.0
        """Number of arrivals since the last change, decayed to `_at_ns`."""
        self._since_ns: Nanoseconds | None = None
        """Moment of the last change; None before any arrival."""
        self._at_ns: Nanoseconds = 0
        self._more, self._fewer = _Run(), _Run()
        self.changes = 0
        """Number of changes that were detected."""

    def arrived(self, now: Nanoseconds) -> bool:
        """Counts an arrival. Returns True if a change of the rate is detected."""
        if self._since_ns is None:
            self._since_ns = self._at_ns = now
            self._more.restart(now)
            self._fewer.restart(now)
        changed = self.passed(now)
        self._count += 1.0
        if self._is_watching(self._weight_s(now)):
            step = self._step
            if self._more.sum <= 0.0:
                self._more.restart(now)
            self._more.sum += step
            self._fewer.sum -= step
            if self._fewer.sum <= 0.0:
                self._fewer.restart(now)
        self._more.arrivals += 1
        self._fewer.arrivals += 1
        return self._judged(self._more, now) or changed

    def passed(self, now: Nanoseconds) -> bool:
        """Lets time pass; True if so few sessions arrived that the rate must have fallen."""
        if self._since_ns is None or now <= self._at_ns:
            return False
        policy, weight_s = self._policy, self._weight_s(self._at_ns)
        if self._is_watching(weight_s):
            expected = self._expected_rate(weight_s) * (now - self._at_ns)
            expected /= NANOSECONDS_PER_SECOND
            self._more.sum = max(0.0, self._more.sum - (policy.ratio - 1.0) * expected)
            self._fewer.sum += (1.0 - 1.0 / policy.ratio) * expected
        self._count *= exp((self._at_ns - now) / policy.memory_ns)
        self._at_ns = now
        return self._judged(self._fewer, now)

    def rate(self, now: Nanoseconds) -> float:
        """Returns the arrivals per second since the last change."""
        if self._since_ns is None:
            return 0.0
        self.passed(now)
        return self._count / max(
            self._weight_s(now), self._policy.cautious_ns / NANOSECONDS_PER_SECOND
        )

    def seen(self, now: Nanoseconds) -> float:
        """Returns the decayed number of arrivals on which the rate rests."""
        self.passed(now)
        return self._count

    def _expected_rate(self, weight_s: float) -> float:
        estimate = self._count / max(1e-9, weight_s)
        return max(self._policy.least_rate_per_s, estimate)

    def _weight_s(self, now: Nanoseconds) -> float:
        """Returns how many seconds the decayed count represents."""
        assert self._since_ns is not None
        memory = self._policy.memory_ns
        lasted = 1.0 - exp((self._since_ns - now) / memory)
        return lasted * memory / NANOSECONDS_PER_SECOND

    def _is_watching(self, weight_s: float) -> bool:
        least = max(self._policy.least_rate_per_s * weight_s, self._count)
        half_s = 0.5 * self._policy.memory_ns / NANOSECONDS_PER_SECOND
        return least >= self._policy.least_arrivals or weight_s >= half_s

    def _judged(self, run: _Run, now: Nanoseconds) -> bool:
        if run.sum <= self._policy.threshold:
            return False
        # The run began with an arrival by definition, so that arrival says nothing about the new
        # rate.
        self._count = float(max(0, run.arrivals - 1))
        self._since_ns = min(run.since_ns, now - 1)
        self._more.restart(now)
        self._fewer.restart(now)
        self.changes += 1
        return True


@dataclass(frozen=True, slots=True)
class LengthPolicy:
    """Parameters of the detection of a change in lengths by `LengthWatch`."""

    allowance: float = 0.4
    """Half the change of the mean logarithm, in standard deviations, that is found soonest."""
    threshold: float = 10.0
    """Value of a sum, in standard deviations, above which a change is believed. False alarms are
    some ten thousand lengths apart."""
    least: int = 30
    memory: int = 400
    """Number of recent lengths over which the estimates average."""
    farthest: float = 3.0
    """Greatest distance from the mean, in standard deviations, at which a single length counts."""


class LengthWatch:
    """Estimator of the mean and spread of lengths that detects changes of the mean.

    Lengths of prompts and answers are skewed, but their logarithms are nearly normal. The CUSUM is
    therefore computed from the logarithms.
    """

    def __init__(self, policy: LengthPolicy | None = None) -> None:
        self._policy = policy or LengthPolicy()
        self._all = _Moments()
        self._up, self._down = _Moments(), _Moments()
        self._up_sum = self._down_sum = 0.0
        self.changes = 0

    @property
    def count(self) -> int:
        """Number of lengths since the last change."""
        return self._all.count

    @property
    def mean(self) -> float:
        """Mean length since the last change; 0 if there was none."""
        return self._all.mean

    @property
    def variation(self) -> float:
        """Standard deviation divided by the mean; 1 while fewer than two lengths are known."""
        moments = self._all
        if moments.count < 2 or moments.mean <= 0.0:
            return 1.0
        return sqrt(max(0.0, moments.squares - moments.mean**2)) / moments.mean

    def observed(self, tokens: int) -> bool:
        """Adds a length. Returns True if a change of the lengths is detected."""
        policy, value = self._policy, log(max(1, tokens))
        known = self._all
        spread = sqrt(max(1e-4, known.log_squares - known.log_mean**2))
        is_watching = known.count >= policy.least
        off = (value - known.log_mean) / spread if is_watching else 0.0
        off = max(-policy.farthest, min(policy.farthest, off))
        for run in (known, self._up, self._down):
            run.take(tokens, value, policy.memory)
        self._up_sum = max(0.0, self._up_sum + off - policy.allowance)
        self._down_sum = max(0.0, self._down_sum - off - policy.allowance)
        if self._up_sum > policy.threshold:
            return self._restart(self._up)
        if self._down_sum > policy.threshold:
            return self._restart(self._down)
        if self._up_sum == 0.0:
            self._up = _Moments()
        if self._down_sum == 0.0:
            self._down = _Moments()
        return False

    def _restart(self, run: _Moments) -> bool:
        self._all, self._up, self._down = run, _Moments(), _Moments()
        self._up_sum = self._down_sum = 0.0
        self.changes += 1
        return True


@dataclass(slots=True)
class _Moments:
    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    log_mean: float = 0.0
    log_squares: float = 0.0

    def take(self, tokens: int, logarithm: float, memory: int) -> None:
        self.count += 1
        weight = 1.0 / min(self.count, memory)
        self.mean += (tokens - self.mean) * weight
        self.squares += (tokens * tokens - self.squares) * weight
        self.log_mean += (logarithm - self.log_mean) * weight
        self.log_squares += (logarithm * logarithm - self.log_squares) * weight
