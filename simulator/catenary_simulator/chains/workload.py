"""Workloads of sessions: their arrivals and the work they are."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np
import numpy.typing as npt

from catenary_services.domain.ids import NANOSECONDS_PER_SECOND, Nanoseconds
from catenary_services.errors import InvalidInput
from catenary_simulator.arrivals import ArrivalProcess

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class SessionWorkload:
    """Sessions in the order of arrival; equal indices belong to one session."""

    arrived_ns: list[Nanoseconds]
    sizes: list[float]
    """Factor of each session's time; the mean is 1."""
    inputs: list[float]
    outputs: list[float]
    """Number of output tokens of each session; `inputs` are its input tokens."""

    def __len__(self) -> int:
        return len(self.arrived_ns)

    @property
    def rate_per_s(self) -> float:
        """Mean arrival rate from the first arrival to the last."""
        span = self.arrived_ns[-1] - self.arrived_ns[0]
        return (len(self) - 1) * NANOSECONDS_PER_SECOND / span if span else float("inf")


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """Recorded requests: seconds since the first one, and input and output tokens."""

    seconds: Floats
    inputs: Floats
    outputs: Floats

    def part(self, first: int, count: int, speed: float = 1.0) -> SessionWorkload:
        """Returns `count` requests from index `first` on, replayed `speed` times as fast.

        Raises:
            InvalidInput: The trace has fewer requests.
        """
        stretch = slice(first, first + count)
        seconds = self.seconds[stretch]
        if len(seconds) < count:
            raise InvalidInput("trace", f"has {len(self.seconds)} requests, not {first + count}")
        moments = (seconds - seconds[0]) / speed
        return _workload(moments, np.ones(count), self.inputs[stretch], self.outputs[stretch])


def exponential(
    arrivals: ArrivalProcess, rate_per_s: float, tokens: tuple[float, float], count: int, seed: int
) -> SessionWorkload:
    """Returns sessions of exponential size with mean 1.

    Args:
        arrivals: The process of arrivals.
        rate_per_s: Mean rate of the process.
        tokens: Input and output tokens of every session.
        count: Number of sessions.
        seed: Seed of arrivals and sizes, each with a random stream of its own.
    """
    moments = moments_of(arrivals, rate_per_s, count, seed)
    sizes = np.random.default_rng((seed, 2)).standard_exponential(count)
    return _workload(moments, sizes, np.full(count, tokens[0]), np.full(count, tokens[1]))


def with_tokens_of(
    trace: RequestTrace,
    arrivals: ArrivalProcess,
    rate_per_s: float,
    stretch: tuple[int, int],
    seed: int,
) -> SessionWorkload:
    """Returns the tokens of a trace's stretch (first, count) with arrivals of a process."""
    part = trace.part(*stretch)
    moments = moments_of(arrivals, rate_per_s, len(part), seed)
    return _workload(moments, np.ones(len(part)), np.array(part.inputs), np.array(part.outputs))


def moments_of(arrivals: ArrivalProcess, rate_per_s: float, count: int, seed: int) -> Floats:
    """Returns the first `count` arrivals of a process, in seconds."""
    duration = 1.2 * count / rate_per_s
    while True:
        random = np.random.default_rng((seed, 1))
        moments = arrivals.moments(rate_per_s, duration, random)
        if len(moments) >= count:
            return moments[:count]
        duration *= 2


def read_trace(path: Path) -> RequestTrace:
    """Returns an Azure LLM inference trace (columns TIMESTAMP, ContextTokens, GeneratedTokens).

    Raises:
        InvalidInput: The file cannot be read, or is not such a trace.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            lines = [
                (
                    _seconds(line["TIMESTAMP"]),
                    float(line["ContextTokens"]),
                    float(line["GeneratedTokens"]),
                )
                for line in csv.DictReader(file)
            ]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise InvalidInput("trace", f"{path}: {error!r}") from None
    columns = np.array(lines, dtype=np.float64).reshape(-1, 3)
    if len(columns) < 2 or np.any(np.diff(columns[:, 0]) < 0):
        raise InvalidInput("trace", f"{path} needs two lines or more, in order of time")
    return RequestTrace(columns[:, 0] - columns[0, 0], columns[:, 1], columns[:, 2])


def _seconds(text: str) -> float:
    """Returns seconds since 1970; a trace has seven decimals, a datetime only six."""
    whole, _, decimals = text.strip().partition(".")
    fraction = float(f"0.{decimals}") if decimals else 0.0
    return datetime.fromisoformat(f"{whole}+00:00").timestamp() + fraction


def _workload(moments: Floats, sizes: Floats, inputs: Floats, outputs: Floats) -> SessionWorkload:
    arrived = (moments * NANOSECONDS_PER_SECOND).astype(np.int64)
    return SessionWorkload(arrived.tolist(), sizes.tolist(), inputs.tolist(), outputs.tolist())
