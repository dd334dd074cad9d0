"""When a rate, or the mean of lengths, is no longer what it was: two-sided CUSUM, self-starting.

A cumulative sum (Page, 1954) adds up how much better "it has changed by so much" explains what is
seen than "it has not", never below zero; above a threshold the change is believed, and its moment
is the last one at which the sum was zero. Both are measured against an estimate that is learned
from what was seen since the last change, so nothing has to be known beforehand. An observation
costs the same few operations however many there were.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, log, sqrt

from catenary_services.domain.ids import NANOSECONDS_PER_SECOND, Nanoseconds


@dataclass(frozen=True, slots=True)
class RatePolicy:
    """How arrivals are watched."""

    ratio: float = 1.5
    """A change by this factor, up or down, is found soonest; smaller ones later."""
    threshold: float = 9.0
    """False alarms are e**threshold arrivals apart or more (measured: tens of thousands)."""
    memory_ns: Nanoseconds = 120 * NANOSECONDS_PER_SECOND
    """An arrival this old counts for 1/e of a new one: slow drifts are followed without alarm."""
    least_arrivals: float = 12.0
    """Changes are looked for once so many were expected."""
    least_rate_per_s: float = 0.05
    """A rate below this is watched as if it were this."""
    cautious_ns: Nanoseconds = 5 * NANOSECONDS_PER_SECOND
    """The first arrivals are taken as if they had come in no less time than this."""


@dataclass(slots=True)
class _Run:
    """A cumulative sum, and what came since it was zero."""

    sum: float = 0.0
    since_ns: Nanoseconds = 0
    arrivals: int = 0

    def restart(self, now: Nanoseconds) -> None:
        self.sum, self.since_ns, self.arrivals = 0.0, now, 0


class ArrivalWatch:
    """The rate of arrivals, and whether it has just changed (Poisson CUSUM in continuous time).

    Between arrivals the log-likelihood ratio of "the rate is `ratio` times what it was" falls by
    (ratio - 1) * rate * dt, at an arrival it rises by log(ratio); of "it is 1/ratio of it" the
    other way round. Time alone can therefore raise the alarm that arrivals have stopped.
    """

    def __init__(self, policy: RatePolicy | None = None) -> None:
        self._policy = policy or RatePolicy()
        self._step = log(self._policy.ratio)
        self._count = 0.0
        """Arrivals since the last change, decayed to `_at_ns`."""
        self._since_ns: Nanoseconds | None = None
        """The last change."""
        self._at_ns: Nanoseconds = 0
        self._more, self._fewer = _Run(), _Run()
        self.changes = 0
        """How often the rate has changed."""

    def arrived(self, now: Nanoseconds) -> bool:
        """Counts an arrival; True if the rate has just changed."""
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
        """Lets time pass; True if so little came that the rate has changed."""
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
        """Returns arrivals per second since the last change."""
        if self._since_ns is None:
            return 0.0
        self.passed(now)
        return self._count / max(
            self._weight_s(now), self._policy.cautious_ns / NANOSECONDS_PER_SECOND
        )

    def seen(self, now: Nanoseconds) -> float:
        """Returns how many arrivals the rate rests on."""
        self.passed(now)
        return self._count

    def _expected_rate(self, weight_s: float) -> float:
        estimate = self._count / max(1e-9, weight_s)
        return max(self._policy.least_rate_per_s, estimate)

    def _weight_s(self, now: Nanoseconds) -> float:
        """Returns how many seconds the decayed count stands for."""
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
        # The run began with an arrival because it was one: it says nothing of the new rate.
        self._count = float(max(0, run.arrivals - 1))
        self._since_ns = min(run.since_ns, now - 1)
        self._more.restart(now)
        self._fewer.restart(now)
        self.changes += 1
        return True


@dataclass(frozen=True, slots=True)
class LengthPolicy:
    """How lengths are watched; see `LengthWatch`."""

    allowance: float = 0.4
    """In standard deviations: a change of the mean logarithm by twice this is found soonest."""
    threshold: float = 10.0
    """Likewise; false alarms are some ten thousand lengths apart."""
    least: int = 30
    memory: int = 400
    """The estimates are those of about so many lengths."""
    farthest: float = 3.0
    """A single length counts as no farther from the mean than this."""


class LengthWatch:
    """Mean and spread of lengths, and whether the mean has just changed.

    Lengths of prompts and answers are skewed; their logarithms are nearly normal, and of these the
    CUSUM is made.
    """

    def __init__(self, policy: LengthPolicy | None = None) -> None:
        self._policy = policy or LengthPolicy()
        self._all = _Moments()
        self._up, self._down = _Moments(), _Moments()
        self._up_sum = self._down_sum = 0.0
        self.changes = 0

    @property
    def count(self) -> int:
        """Lengths since the last change."""
        return self._all.count

    @property
    def mean(self) -> float:
        """Mean length since the last change; 0 if there was none."""
        return self._all.mean

    @property
    def variation(self) -> float:
        """Standard deviation over mean; 1 while fewer than two are known."""
        moments = self._all
        if moments.count < 2 or moments.mean <= 0.0:
            return 1.0
        return sqrt(max(0.0, moments.squares - moments.mean**2)) / moments.mean

    def observed(self, tokens: int) -> bool:
        """Takes a length; True if lengths have just changed."""
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
