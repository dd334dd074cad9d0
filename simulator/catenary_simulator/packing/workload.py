"""Sessions to be packed: when they arrive, what they hold at first and how far they grow."""

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
        mean: Of the lengths themselves, not of their logarithms.
        sigma: Standard deviation of the logarithm.
    """

    mean: float
    sigma: float

    def drawn(self, random: np.random.Generator, count: int) -> list[int]:
        """Returns lengths of at least one token."""
        middle = log(self.mean) - self.sigma**2 / 2
        values = np.exp(middle + self.sigma * random.standard_normal(count))
        return [int(value) for value in np.maximum(1, np.rint(values))]

    @property
    def median(self) -> float:
        """Half of the lengths are below it."""
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
        seed: Decides moments and lengths, each by a stream of its own.
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
    """Returns a stretch of a trace at its own moments.

    Args:
        lengths: Of a trace, with moments.
        duration_s: Of the stretch.
        every: Only every so manieth arrival.
        scale: Lengths are multiplied by it.
        first: Arrivals to skip.

    Raises:
        InvalidInput: If the lengths have no moments, or the trace is too short.
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
    """Returns the sessions that fit an empty GPU to their end, and how many did not (G13).

    Args:
        sessions: All.
        most_tokens: That a GPU holds.
        cut: Make the others fit, answers first, instead of refusing them.
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
