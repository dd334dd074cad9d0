"""A load in steps: the settings of a live run of placement, and its figures."""

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
    """A lognormal distribution of lengths, in tokens."""

    median: float
    sigma: float

    @property
    def mean(self) -> float:
        """Mean of the distribution, before long lengths are cut."""
        return float(self.median * np.exp(self.sigma**2 / 2))


@dataclass(frozen=True, slots=True)
class Step:
    """A stretch of time with one rate of arrivals."""

    load: float
    """Load in workers: 1 is what one worker sustains within the objectives."""
    seconds: float


@dataclass(frozen=True, slots=True)
class StepsRun:
    """The settings of a run."""

    model: str
    most_agents: int
    prompt: Drawn
    answer: Drawn
    session_tokens: int
    max_batch: int
    per_token_factor: float
    """Objective T_dec as a multiple of a lone session's decode step."""
    first_token_factor: float
    """Objective T_pre as a multiple of the time of the longest prompt that a session may have."""
    theta: float
    """Share of T_dec that a load of 1 uses."""
    steps: tuple[Step, ...]
    settle_s: float
    """Longest wait, after the last answer, for all agents but one to go, in seconds."""
    seed: int
    scheduler: dict[str, Any]
    """Settings of the scheduler beyond the usual ones."""


@dataclass(frozen=True, slots=True)
class AgentsAt:
    """The number of agents at one time."""

    at_s: float
    """Time in seconds, from about the first arrival."""
    ready: int
    """Number of agents that take new sessions."""
    present: int
    """Number of all agents, with those that drain."""


@dataclass(frozen=True, slots=True)
class StepsMeasured:
    """The figures of a run."""

    lines: LatencyLines
    """Latency lines at the start, of one agent alone."""
    lines_after: LatencyLines
    objectives: TokenObjectives
    worker: WorkerCapability
    """Load that one worker sustains, which is a load of 1."""
    requests: tuple[Answered, ...]
    agents: tuple[AgentsAt, ...]
    send_lag_p99_s: float
    wall_s: float


def drawn(run: StepsRun, rate_per_s: float) -> tuple[Asked, ...]:
    """Returns the requests of all steps; `rate_per_s` is the arrival rate of a load of 1."""
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
    """Returns the objectives of a run's sessions, from what one agent measured of itself."""
    context = run.prompt.mean + run.answer.mean / 2
    lone_ns = max(lines.decode_lone_ns, lines.decode(1, context))
    # As in the paper's Table 2: about the time of a prompt of a full context.
    longest_ns = lines.prefill(run.session_tokens)
    return TokenObjectives(
        round(run.first_token_factor * longest_ns), round(run.per_token_factor * lone_ns)
    )
