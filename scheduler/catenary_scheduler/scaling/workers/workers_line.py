"""Number of workers that a rate of arrivals needs: N_w = ceil(k5 * r_a + c5) for r_a > R (eq. 7).

The line is a least-squares fit, with k5, c5 >= 0, through pairs (rate, workers that suffice). There
are two kinds of pairs: those of a *prior*, from a simulation or from the closed form below, and
those of history, which fade. The prior weighs as much as a few pairs of history. It prevails where
nothing was observed, and keeps the line determined while only one rate was observed.

The paper learns the line from simulation and history and says no more. The closed form replaces the
simulation where there is none: in the steady state a worker spends a share r * p of its time on
prompts (p = time of one prefill), and the rest on decode steps of

    T (1 - r p) = (k2 l + c2) b + c3,     b = r l_out T     (Little's law)

where T is the time per token as the client sees it, b the number of sessions at a time and l their
mean context. With T = theta * T_dec this gives the rate r that one worker sustains within its
objective.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import ceil, inf, sqrt
from typing import NamedTuple

from catenary_services.domain.ids import NANOSECONDS_PER_SECOND
from catenary_services.domain.latency import LatencyLines, TokenObjectives

Pair = tuple[float, float]
"""Pair of arrivals per second and the number of workers that suffices for them."""

_PRIOR_LOADS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Loads of the prior's pairs, in multiples of what one worker sustains. A line through them is
close to the closed form from 0 to about 16."""


class SessionLengths(NamedTuple):
    """Mean lengths of the sessions of a model, in tokens.

    Attributes:
        prompt_tokens: Mean length of prompts.
        answer_tokens: Mean length of answers.
    """

    prompt_tokens: float
    answer_tokens: float


@dataclass(frozen=True, slots=True)
class WorkerCapability:
    """Load that one worker sustains.

    Attributes:
        rate_per_s: Sessions per second.
        sessions: Average number of sessions at a time.
    """

    rate_per_s: float
    sessions: float


def capability(
    lines: LatencyLines,
    objectives: TokenObjectives | None,
    lengths: SessionLengths,
    slots: int,
    theta: float,
) -> WorkerCapability:
    """Returns the load that a worker sustains in the steady state.

    Args:
        lines: Latency lines of the worker.
        objectives: Objectives of its sessions; None if only its slots limit it.
        lengths: Mean lengths of the sessions.
        slots: Largest number of sessions at a time; 0 for any number.
        theta: Share of the objective (or of the slots) that may be used.
    """
    answer = max(1.0, lengths.answer_tokens)
    prompt_s = lines.prefill(lengths.prompt_tokens) / NANOSECONDS_PER_SECOND
    context = lengths.prompt_tokens + answer / 2
    session_s = (
        lines.decode_context_token_ns * context + lines.decode_session_ns
    ) / NANOSECONDS_PER_SECOND
    fixed_s = lines.decode_ns / NANOSECONDS_PER_SECOND
    work_s = max(1e-9, session_s * answer + prompt_s)
    rate, per_token_s = 1.0 / work_s, inf
    if objectives is not None and objectives.per_token_ns:
        # No placement can go below the time per token of a lone request (T_dec >= t1).
        lone_s = max(lines.decode_lone_ns / NANOSECONDS_PER_SECOND, fixed_s + session_s)
        per_token_s = max(theta * objectives.per_token_ns / NANOSECONDS_PER_SECOND, 1.02 * lone_s)
        rate = max(0.0, per_token_s - fixed_s) / (per_token_s * work_s)
    if slots > 0:
        most = theta * slots
        step_s = session_s * most + fixed_s
        rate = min(rate, most / (answer * step_s + most * prompt_s))
    # One session after another is always possible, so the rate is at least that.
    lone_s = prompt_s + answer * max(lines.decode_lone_ns / NANOSECONDS_PER_SECOND, fixed_s)
    rate = max(rate, 1.0 / max(1e-9, lone_s + session_s * answer))
    if per_token_s == inf:  # the steady state determines the time per token
        per_token_s = fixed_s / max(1e-9, 1.0 - rate * work_s)
    sessions = min(float(slots or inf), rate * (answer * per_token_s + prompt_s))
    return WorkerCapability(rate, max(1.0, sessions))


def staffed(load: float, sessions: float, headroom: float) -> float:
    """Returns the workers for the mean of a load and for its usual peaks (square-root staffing).

    Args:
        load: Mean load, in multiples of what one worker sustains.
        sessions: Number of sessions at a time on one worker.
        headroom: Size of a peak, in standard deviations of the number of sessions (nearly Poisson).
    """
    return load + headroom * sqrt(load / max(1.0, sessions))


def prior_pairs(worker: WorkerCapability, headroom: float) -> list[Pair]:
    """Returns pairs such as a simulation of these workers would give."""
    return [
        (load * worker.rate_per_s, staffed(load, worker.sessions, headroom))
        for load in _PRIOR_LOADS
    ]


def least_rate(variation: float, window_s: float, error: float = 0.25) -> float:
    """Returns R, the least rate at which the sample of a window represents the lengths.

    The standard error of a mean of n lengths is SEM = sigma / sqrt(n); it must not be more than a
    share `error` of the mean.
    """
    return (variation / error) ** 2 / max(1e-9, window_s)


class WorkersLine:
    """The line's coefficients k5 and c5, and the sums they are fitted to.

    Learning a pair takes O(1).
    """

    def __init__(self, *, prior_weight: float = 8.0, memory: float = 40.0) -> None:
        self._prior_weight = prior_weight
        self._keeps = 1.0 - 1.0 / memory
        self._prior = _Sums()
        self._history = _Sums()
        self.k5, self.c5 = 0.0, 1.0

    @property
    def history_weight(self) -> float:
        """Number of pairs in the history, with old ones weighted less."""
        return self._history.weight

    def set_prior(self, pairs: Iterable[Pair]) -> None:
        """Replaces the pairs that come from a simulation, or from the closed form."""
        sums = _Sums()
        for rate, workers in pairs:
            sums.add(rate, workers, 1.0)
        self._prior = sums.scaled(self._prior_weight / sums.weight) if sums.weight else sums
        self._fit()

    def learn(self, rate: float, workers: float, weight: float = 1.0) -> None:
        """Adds a pair of a rate and the workers that sufficed for it to the history."""
        self._history = self._history.scaled(self._keeps)
        self._history.add(rate, workers, weight)
        self._fit()

    def forget(self) -> None:
        """Drops the history, because it was made with other lengths of sessions."""
        self._history = _Sums()
        self._fit()

    def workers(self, rate: float) -> float:
        """Returns k5 * rate + c5, the number of workers before it is rounded up."""
        return self.k5 * rate + self.c5

    def needed(self, rate: float) -> int:
        """Returns the number of workers N_w for a rate (eq. 7)."""
        return max(0, ceil(self.workers(rate) - 1e-9))

    def to_record(self) -> dict[str, list[float]]:
        """Returns the sums of prior and history, from which a successor goes on."""
        return {"prior": self._prior.as_list(), "history": self._history.as_list()}

    def restore(self, record: Mapping[str, list[float]]) -> None:
        """Restores what a predecessor has learned.

        Raises:
            ValueError: The record is malformed.
        """
        prior, history = _Sums.of(record.get("prior")), _Sums.of(record.get("history"))
        self._prior, self._history = prior, history
        self._fit()

    def _fit(self) -> None:
        s = self._prior.plus(self._history)
        if s.weight <= 0.0:
            return
        spread = s.weight * s.xx - s.x * s.x
        if spread <= 1e-12 * max(1.0, s.xx * s.weight):
            # With one rate only, the slope and the constant cannot be told apart.
            self.k5, self.c5 = (s.xy / s.xx, 0.0) if s.xx > 0 else (0.0, s.y / s.weight)
            return
        slope = (s.weight * s.xy - s.x * s.y) / spread
        constant = (s.y - slope * s.x) / s.weight
        # With two unknowns, where one is negative the best fit has it at zero.
        if slope < 0.0:
            slope, constant = 0.0, s.y / s.weight
        elif constant < 0.0:
            slope, constant = s.xy / s.xx, 0.0
        self.k5, self.c5 = slope, constant


@dataclass(slots=True)
class _Sums:
    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def add(self, x: float, y: float, weight: float) -> None:
        self.weight += weight
        self.x += weight * x
        self.y += weight * y
        self.xx += weight * x * x
        self.xy += weight * x * y

    def scaled(self, by: float) -> _Sums:
        return _Sums(*(each * by for each in self.as_list()))

    def plus(self, other: _Sums) -> _Sums:
        both = zip(self.as_list(), other.as_list(), strict=True)
        return _Sums(*(one + two for one, two in both))

    def as_list(self) -> list[float]:
        return [self.weight, self.x, self.y, self.xx, self.xy]

    @classmethod
    def of(cls, numbers: object) -> _Sums:
        if not isinstance(numbers, list) or len(numbers) != 5:
            raise ValueError("not five sums")
        return cls(*(float(each) for each in numbers))
