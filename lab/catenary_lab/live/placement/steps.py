"""A load in steps: what is asked of a live run of placement, and what comes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from catenary_lab.live.placement.load import Answered, Asked
from catenary_scheduler.scaling.workers.workers_line import WorkerCapability
from catenary_services.domain.latency import LatencyLines, TokenObjectives

_LEAST_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Drawn:
    """A lognormal distribution of lengths."""

    median: float
    sigma: float

    @property
    def mean(self) -> float:
        """Its mean, before long ones are cut."""
        return float(self.median * np.exp(self.sigma**2 / 2))


@dataclass(frozen=True, slots=True)
class Step:
    """A stretch of time with one rate of arrivals."""

    load: float
    """In workers' worth: 1 is what one worker sustains within the objectives."""
    seconds: float


@dataclass(frozen=True, slots=True)
class StepsRun:
    """What to serve under what load."""

    model: str
    most_agents: int
    prompt: Drawn
    answer: Drawn
    session_tokens: int
    max_batch: int
    per_token_factor: float
    """T_dec is so many steps of a lone session."""
    first_token_factor: float
    """T_pre is so many times as long as running a prompt as long as a session may be."""
    theta: float
    """Share of T_dec that a load of 1 uses."""
    steps: tuple[Step, ...]
    settle_s: float
    """Longest wait for the last agent to go, behind the last answer."""
    seed: int
    scheduler: dict[str, Any]
    """Settings beyond the usual."""


@dataclass(frozen=True, slots=True)
class AgentsAt:
    """How many agents there were at a moment."""

    at_s: float
    """From the first arrival, about."""
    ready: int
    """That take new sessions."""
    present: int
    """Those that drain included."""


@dataclass(frozen=True, slots=True)
class StepsMeasured:
    """What came of it."""

    lines: LatencyLines
    """At the start, of one agent alone."""
    lines_after: LatencyLines
    objectives: TokenObjectives
    worker: WorkerCapability
    """What one worker sustains: a load of 1."""
    requests: tuple[Answered, ...]
    agents: tuple[AgentsAt, ...]
    send_lag_p99_s: float
    wall_s: float


def drawn(run: StepsRun, rate_per_s: float) -> tuple[Asked, ...]:
    """Returns the requests of all steps; `rate_per_s` is that of a load of 1."""
    random = np.random.default_rng(run.seed)
    most = run.session_tokens // 2

    def tokens(lengths: Drawn) -> int:
        length = random.lognormal(np.log(lengths.median), lengths.sigma)
        return int(min(max(_LEAST_TOKENS, round(length)), most))

    requests: list[Asked] = []
    begin_s = 0.0
    for number, step in enumerate(run.steps):
        at_s = begin_s
        while step.load > 0:
            at_s += float(random.exponential(1.0 / (step.load * rate_per_s)))
            if at_s >= begin_s + step.seconds:
                break
            requests.append(Asked(at_s, number, tokens(run.prompt), tokens(run.answer)))
        begin_s += step.seconds
    return tuple(requests)


def changes(agents: Sequence[AgentsAt]) -> tuple[int, int]:
    """Returns how many agents came and how many went."""
    steps = [after.present - before.present for before, after in pairwise(agents)]
    return sum(max(0, step) for step in steps), sum(max(0, -step) for step in steps)


def objectives_for(run: StepsRun, lines: LatencyLines) -> TokenObjectives:
    """Returns what a run's sessions are held to, from what one agent measured of itself."""
    context = run.prompt.mean + run.answer.mean / 2
    lone_ns = max(lines.decode_lone_ns, lines.decode(1, context))
    # As the paper's Table 2: about what a prompt of a full context takes.
    longest_ns = lines.prefill(run.session_tokens)
    return TokenObjectives(
        round(run.first_token_factor * longest_ns), round(run.per_token_factor * lone_ns)
    )
