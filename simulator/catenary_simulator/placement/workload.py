"""Workloads of requests to be placed: their arrivals, prompt lengths and answer lengths."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from catenary_services.domain.ids import NANOSECONDS_PER_SECOND, Nanoseconds
from catenary_services.domain.prefixes import PREFIX_BLOCK_TOKENS
from catenary_services.errors import InvalidInput
from catenary_simulator.arrivals import ArrivalProcess

Integers = npt.NDArray[np.int64]
_MOST_BLOCKS = 1 << 20
"""More blocks than any text has."""


@dataclass(frozen=True, slots=True)
class LengthPopulation:
    """Lengths of prompts and their answers in tokens, as a population to draw from.

    Attributes:
        prompts: Lengths of the prompts, l_in.
        answers: Lengths of their answers, l_out.
        moments_s: Arrival times in seconds if they are of a trace; empty otherwise.
    """

    prompts: tuple[int, ...]
    answers: tuple[int, ...]
    moments_s: tuple[float, ...] = ()

    def halves(self) -> tuple[LengthPopulation, LengthPopulation]:
        """Returns every other length to learn from, and the rest to be served."""
        return self._part(slice(0, None, 2)), self._part(slice(1, None, 2))

    def within(self, context_tokens: int) -> LengthPopulation:
        """Returns the lengths whose prompt and answer together fit a model's context."""
        kept = [
            index
            for index, prompt in enumerate(self.prompts)
            if prompt + self.answers[index] <= context_tokens
        ]
        return LengthPopulation(
            tuple(self.prompts[index] for index in kept),
            tuple(self.answers[index] for index in kept),
            tuple(self.moments_s[index] for index in kept) if self.moments_s else (),
        )

    def _part(self, part: slice) -> LengthPopulation:
        return LengthPopulation(self.prompts[part], self.answers[part], self.moments_s[part])


@dataclass(frozen=True, slots=True)
class SharedText:
    """The text of a request, by what it has in common with others.

    Attributes:
        head: The beginning that it shares with all texts of that head.
        head_tokens: Tokens of that beginning.
        conversation: What follows is shared with the other turns of this conversation.
    """

    head: int
    head_tokens: int
    conversation: int

    def blocks(self, tokens: int) -> tuple[int, ...]:
        """Returns one number for each whole block of the first `tokens`, equal in equal texts."""
        common = self.head_tokens // PREFIX_BLOCK_TOKENS
        whole = tokens // PREFIX_BLOCK_TOKENS
        head, own = -1 - self.head, self.conversation
        return tuple((head if n < common else own) * _MOST_BLOCKS + n for n in range(whole))


@dataclass(frozen=True, slots=True)
class RequestWorkload:
    """Requests in the order of arrival: times, and prompt and answer lengths in tokens."""

    arrived_ns: list[Nanoseconds]
    prompts: list[int]
    answers: list[int]
    texts: list[SharedText] = field(default_factory=list)
    """The parts that texts have in common; empty: none."""

    def __len__(self) -> int:
        return len(self.arrived_ns)

    def blocks(self, number: int, tokens: int) -> tuple[int, ...]:
        """Returns the numbers of the blocks of a request's first `tokens`."""
        return self.texts[number].blocks(tokens) if self.texts else ()


def read_lengths(path: Path) -> LengthPopulation:
    """Returns the lengths of a CSV file with columns l_in and l_out, and if present t in seconds.

    Raises:
        InvalidInput: The file cannot be read, has other columns or no line.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            lines = list(csv.DictReader(file))
            prompts = tuple(max(1, int(line["l_in"])) for line in lines)
            answers = tuple(max(1, int(line["l_out"])) for line in lines)
            moments = tuple(float(line["t"]) for line in lines if "t" in line)
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise InvalidInput("lengths", f"{path}: {error!r}") from None
    if not prompts:
        raise InvalidInput("lengths", f"{path} has no line")
    return LengthPopulation(prompts, answers, moments)


def lognormal_lengths(
    prompt: tuple[float, float], answer: tuple[float, float], count: int, seed: int
) -> LengthPopulation:
    """Returns lengths drawn from lognormal distributions, prompt and answer independently.

    Args:
        prompt: Median of the prompts, and the standard deviation of their logarithm.
        answer: Median of the answers, and the standard deviation of their logarithm.
        count: Number of lengths.
        seed: Seed of the random stream.
    """
    random = np.random.default_rng((seed, 3))

    def drawn(median: float, sigma: float) -> tuple[int, ...]:
        values = np.exp(np.log(median) + sigma * random.standard_normal(count))
        return tuple(np.maximum(1, np.rint(values)).astype(int).tolist())

    return LengthPopulation(drawn(*prompt), drawn(*answer))


def drawn_workload(
    lengths: LengthPopulation,
    arrivals: ArrivalProcess,
    rate_per_s: float,
    duration_s: float,
    seed: int,
) -> RequestWorkload:
    """Returns requests whose lengths are drawn with replacement.

    Args:
        lengths: The population to draw from.
        arrivals: Process of arrivals.
        rate_per_s: Mean rate of the process.
        duration_s: Seconds during which requests arrive.
        seed: Seed of arrivals and lengths, each with a random stream of its own.
    """
    moments = arrivals.moments(rate_per_s, duration_s, np.random.default_rng((seed, 1)))
    chosen = np.random.default_rng((seed, 2)).integers(len(lengths.prompts), size=len(moments))
    return _workload(moments * NANOSECONDS_PER_SECOND, lengths, chosen.tolist())


def stepped_workload(
    lengths: LengthPopulation,
    arrivals: ArrivalProcess,
    rates_per_s: Sequence[float],
    duration_s: float,
    seed: int,
) -> RequestWorkload:
    """Returns requests at one rate after the other, each for an equal part of the duration."""
    part_s = duration_s / len(rates_per_s)
    whole = RequestWorkload([], [], [])
    for number, rate in enumerate(rates_per_s):
        if rate <= 0:
            continue
        own = np.random.SeedSequence((seed, number)).generate_state(1).tolist()[0]
        part = drawn_workload(lengths, arrivals, rate, part_s, own)
        begin = round(number * part_s * NANOSECONDS_PER_SECOND)
        whole.arrived_ns.extend(begin + moment for moment in part.arrived_ns)
        whole.prompts.extend(part.prompts)
        whole.answers.extend(part.answers)
    return whole


def replayed_workload(
    lengths: LengthPopulation, rate_per_s: float, duration_s: float, seed: int
) -> RequestWorkload:
    """Returns a stretch of a trace in its order, at a speed that gives the mean rate.

    Args:
        lengths: The lengths of a trace, with times.
        rate_per_s: Mean rate of the whole trace after scaling.
        duration_s: Length of the stretch after scaling, in seconds.
        seed: Seed of the random begin of the stretch.

    Raises:
        InvalidInput: The lengths have no times, or the trace is too short.
    """
    if len(lengths.moments_s) < 2:
        raise InvalidInput("lengths", "a trace with the moments of its requests is needed")
    moments = np.array(lengths.moments_s)
    moments = (moments - moments[0]) * ((len(moments) - 1) / (moments[-1] - moments[0]))
    moments /= rate_per_s
    latest = moments[-1] - duration_s
    if latest < 0:
        raise InvalidInput("duration_s", f"the trace lasts {moments[-1]:.0f} s at this rate")
    begin = float(np.random.default_rng((seed, 1)).uniform(0.0, latest))
    first, last = np.searchsorted(moments, (begin, begin + duration_s)).tolist()
    part = (moments[first:last] - begin) * NANOSECONDS_PER_SECOND
    return _workload(part, lengths, range(first, last))


def _workload(
    moments_ns: npt.NDArray[np.float64], lengths: LengthPopulation, chosen: Sequence[int]
) -> RequestWorkload:
    return RequestWorkload(
        moments_ns.astype(np.int64).tolist(),
        [lengths.prompts[index] for index in chosen],
        [lengths.answers[index] for index in chosen],
    )
