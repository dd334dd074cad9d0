"""Workloads of sessions to be packed: their arrivals, first sizes and growth."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, log

import numpy as np

from catenary_services.domain.ids import NANOSECONDS_PER_SECOND
from catenary_services.errors import InvalidInput
from catenary_simulator.arrivals import ArrivalProcess
from catenary_simulator.placement.workload import LengthPopulation, RequestWorkload


@dataclass(frozen=True, slots=True)
class LognormalLengths:
    """A distribution of lengths in tokens.

    Attributes:
        mean: Mean of the lengths themselves, not of their logarithms.
        sigma: Standard deviation of the logarithm.
    """

    mean: float
    sigma: float

    def drawn(self, random: np.random.Generator, count: int) -> list[int]:
        """Returns `count` random lengths of at least one token."""
        middle = log(self.mean) - self.sigma**2 / 2
        values = np.exp(middle + self.sigma * random.standard_normal(count))
        return [int(value) for value in np.maximum(1, np.rint(values))]

    @property
    def median(self) -> float:
        """The median of the distribution, in tokens."""
        return self.mean * exp(-(self.sigma**2) / 2)


@dataclass(frozen=True, slots=True)
class RateStep:
    """A stretch of time with one mean rate of arrivals."""

    rate_per_s: float
    seconds: float


def drawn_sessions(
    prompts: LognormalLengths,
    answers: LognormalLengths,
    arrivals: ArrivalProcess,
    steps: tuple[RateStep, ...],
    seed: int,
) -> RequestWorkload:
    """Returns sessions with lengths drawn independently.

    Args:
        prompts: Distribution of l_in.
        answers: Distribution of l_out.
        arrivals: Process of arrivals.
        steps: Its mean rate over time.
        seed: Seed of arrivals and lengths, each with a random stream of its own.
    """
    moments: list[float] = []
    begin = 0.0
    for number, step in enumerate(steps):
        random = np.random.default_rng((seed, 1, number))
        if step.rate_per_s > 0:
            drawn = arrivals.moments(step.rate_per_s, step.seconds, random)
            moments += [begin + float(moment) for moment in drawn]
        begin += step.seconds
    random = np.random.default_rng((seed, 2))
    return RequestWorkload(
        [round(moment * NANOSECONDS_PER_SECOND) for moment in moments],
        prompts.drawn(random, len(moments)),
        answers.drawn(random, len(moments)),
    )


def traced_sessions(
    lengths: LengthPopulation, duration_s: float, *, every: int = 1, scale: int = 1, first: int = 0
) -> RequestWorkload:
    """Returns the sessions of a stretch of a trace, at their recorded times.

    Args:
        lengths: The lengths of a trace, with times.
        duration_s: Length of the stretch in seconds.
        every: Step through the arrivals: only every such arrival is taken.
        scale: Factor of all lengths.
        first: Number of arrivals to skip.

    Raises:
        InvalidInput: The lengths have no times, or the trace is too short.
    """
    if not lengths.moments_s:
        raise InvalidInput("lengths.file", "a trace with the moments of its requests is needed")
    chosen = range(first, len(lengths.prompts), every)
    lasts_s = lengths.moments_s[-1] - lengths.moments_s[first] if chosen else 0.0
    if lasts_s < duration_s - 1:
        raise InvalidInput("duration_s", f"the trace lasts {lasts_s:.0f} s from there on")
    begin_s = lengths.moments_s[first]
    chosen = range(
        first,
        first + int(np.searchsorted(lengths.moments_s[first:], begin_s + duration_s)),
        every,
    )
    return RequestWorkload(
        [round((lengths.moments_s[at] - begin_s) * NANOSECONDS_PER_SECOND) for at in chosen],
        [scale * lengths.prompts[at] for at in chosen],
        [scale * lengths.answers[at] for at in chosen],
    )


def fitting(
    sessions: RequestWorkload, most_tokens: int, *, cut: bool = False
) -> tuple[RequestWorkload, int]:
    """Returns the sessions that fit an empty GPU to their end, and how many do not (G13).

    Args:
        sessions: All sessions.
        most_tokens: Tokens that a GPU holds.
        cut: Whether to cut the others until they fit, answers first, instead of refusing them.
    """
    kept = RequestWorkload([], [], [])
    unfit = 0
    for moment, prompt, answer in zip(
        sessions.arrived_ns, sessions.prompts, sessions.answers, strict=True
    ):
        if prompt + answer > most_tokens:
            unfit += 1
            if not cut:
                continue
        kept.arrived_ns.append(moment)
        kept.prompts.append(min(prompt, most_tokens - 1))
        kept.answers.append(min(answer, most_tokens - kept.prompts[-1]))
    return kept, unfit
