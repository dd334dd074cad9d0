"""Replay of sessions that arrived once on chains that might serve them.

The bounds of Theorem 3.7 know the mean rate and the mean session only, and take arrivals for a
Poisson process. Sessions that come in bursts, or differ much in length, need more caches than the
bounds choose. So c is also tuned by what really arrived: each session takes the fastest free chain,
or waits in one queue (Algorithm 3), for as long as its own tokens take there. That is what the
dispatcher does by JFFC, without its bookkeeping: some microseconds for a session.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush

from catenary_scheduler.planning.chains.problem import ComposedChain, Composition
from catenary_services.domain.ids import NANOSECONDS_PER_SECOND, Nanoseconds

LEAST_SESSIONS = 200
"""Number of sessions below which a log says too little: means of fewer are chance."""
Duration = Callable[[int, int], Nanoseconds]
"""Returns the time of a session on a chain, both by their numbers."""


def replayed(
    capacities: Sequence[int], arrived_ns: Sequence[Nanoseconds], duration: Duration
) -> list[Nanoseconds]:
    """Returns how long every session takes from its arrival, its wait included.

    Args:
        capacities: Sessions at a time of every chain, the fastest chain first.
        arrived_ns: The arrivals, in order. Who ends at the moment of an arrival has ended before.
        duration: The time of session `number` on chain `rank`.
    """
    left = list(capacities)
    free = [rank for rank, capacity in enumerate(left) if capacity > 0]  # in order, so a heap
    running: list[tuple[Nanoseconds, int, int]] = []
    waiting: deque[int] = deque()
    responses = [0] * len(arrived_ns)
    started = 0

    def start(number: int, rank: int, now: Nanoseconds) -> None:
        nonlocal started
        end = now + duration(number, rank)
        started += 1
        heappush(running, (end, started, rank))
        responses[number] = end - arrived_ns[number]

    def end_first() -> None:
        end, _, rank = heappop(running)
        if waiting:
            start(waiting.popleft(), rank, end)
            return
        left[rank] += 1
        if left[rank] == 1:
            heappush(free, rank)

    for number, now in enumerate(arrived_ns):
        while running and running[0][0] <= now:
            end_first()
        if not free:
            waiting.append(number)
            continue
        rank = free[0]
        left[rank] -= 1
        if not left[rank]:
            heappop(free)
        start(number, rank, now)
    while waiting:
        end_first()
    return responses


@dataclass(frozen=True, slots=True)
class SessionLog:
    """Sessions that arrived, in order; equal positions belong to one session."""

    arrived_ns: tuple[Nanoseconds, ...]
    prompt_tokens: tuple[int, ...]
    output_tokens: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.arrived_ns)

    def at_rate(self, rate_per_s: float) -> SessionLog:
        """Returns the same sessions with arrivals stretched to another mean rate."""
        span_ns = self.arrived_ns[-1] - self.arrived_ns[0]
        if span_ns <= 0:
            return self
        wanted_ns = (len(self) - 1) / rate_per_s * NANOSECONDS_PER_SECOND
        factor, first = wanted_ns / span_ns, self.arrived_ns[0]
        moments = [round((moment - first) * factor) for moment in self.arrived_ns]
        return replace(self, arrived_ns=tuple(moments))


@dataclass(frozen=True, slots=True)
class LogReplay:
    """An evaluator of chains for tuning c: the mean response of the sessions of a log.

    A session's time on a chain is a line in its tokens, through the times of two mean sessions.

    Attributes:
        log: The sessions, at the rate to plan for.
        prompt_s: Returns the seconds of a session with a mean prompt and one token on a chain.
        whole_s: Returns the seconds of a session of mean lengths.
        prompt_tokens: Mean length of a prompt.
        output_tokens: Mean length of an answer; above 1.
        most_sessions: Largest number of sessions of one chain at a time.
    """

    log: SessionLog
    prompt_s: Callable[[ComposedChain], float]
    whole_s: Callable[[ComposedChain], float]
    prompt_tokens: float
    output_tokens: float
    most_sessions: int

    def __call__(self, composition: Composition) -> float:
        """Returns the mean response in seconds; infinity if there is no chain."""
        chains = sorted(composition.chains, key=self.whole_s)
        if not chains:
            return math.inf
        lines = [self._line(chain) for chain in chains]
        prompts, outputs = self.log.prompt_tokens, self.log.output_tokens

        def duration(number: int, rank: int) -> Nanoseconds:
            each_prompt, each_output = lines[rank]
            return round(prompts[number] * each_prompt + outputs[number] * each_output)

        capacities = [min(chain.capacity, self.most_sessions) for chain in chains]
        responses = replayed(capacities, self.log.arrived_ns, duration)
        return sum(responses) / len(responses) / NANOSECONDS_PER_SECOND

    def _line(self, chain: ComposedChain) -> tuple[float, float]:
        """Returns the nanoseconds of a prompt token and of an output token on a chain."""
        prompt_s, whole_s = self.prompt_s(chain), self.whole_s(chain)
        output_s = max(0.0, whole_s - prompt_s) / (self.output_tokens - 1.0)
        prompt_s = max(0.0, prompt_s - output_s) / self.prompt_tokens
        return prompt_s * NANOSECONDS_PER_SECOND, output_s * NANOSECONDS_PER_SECOND
