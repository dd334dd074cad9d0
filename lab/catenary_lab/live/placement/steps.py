"""A load in steps on real processes: its requests and objectives, and what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from catenary_lab.live.placement.load import Answered, Asked
from catenary_lab.scenarios.placement.live_schema import LiveSteps
from catenary_lab.scenarios.placement.schema_parts import DrawnLengths
from catenary_scheduler.scaling.workers.workers_line import WorkerCapability
from catenary_services.domain.latency import LatencyLines, TokenObjectives

_LEAST_TOKENS = 4


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
    """The lines, objectives and load that a run began with, and the outcomes of its requests."""

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


def drawn(run: LiveSteps, rate_per_s: float) -> tuple[Asked, ...]:
    """Returns the requests of all steps; `rate_per_s` is the arrival rate of a load of 1."""
    random = np.random.default_rng(run.seed)
    most = run.session_tokens // 2

    def tokens(lengths: DrawnLengths) -> int:
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


def objectives_for(run: LiveSteps, lines: LatencyLines) -> TokenObjectives:
    """Returns the objectives of a run's sessions, from what one agent measured of itself."""
    context = run.prompt.mean + run.answer.mean / 2
    lone_ns = max(lines.decode_lone_ns, lines.decode(1, context))
    # As in the paper's Table 2: about the time of a prompt of a full context.
    longest_ns = lines.prefill(run.session_tokens)
    return TokenObjectives(
        round(run.first_token_factor * longest_ns), round(run.per_token_factor * lone_ns)
    )
