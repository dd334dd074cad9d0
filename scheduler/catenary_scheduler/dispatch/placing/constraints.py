"""Decides when a worker may take a session, to the letter (Aladdin, 4.1: b-e, Algorithm 1).

Readings R1-R9 are those of the specification. What the paper leaves open is decided thus: lengths
in b are final ones (R1); a lone session is exempt from b, its step only has to keep T_dec (R2); a
request that an empty worker could not take fits nowhere (R3); c-e bind on workers that gain a
request only (R4); prompts that wait on a worker count in c, d and the norm (R7); ties go to the
lower index (R9). The dispatcher decides by running sums instead (`worker`); a test compares.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from catenary_scheduler.dispatch.placing.jobs import Job, WorkerLimits
from catenary_services.domain.latency import LatencyLines


@dataclass(frozen=True, slots=True)
class WorkerConstraint:
    """One constraint on one worker.

    Attributes:
        ok: True if it holds.
        used: Left side: tokens (b), nanoseconds (c, d) or units of the cache (e).
        allowed: Right side, in the same unit; None: there is no bound.
    """

    ok: bool
    used: float | None
    allowed: float | None


@dataclass(frozen=True, slots=True)
class ConstraintCheck:
    """The constraints on a worker with one more job.

    Attributes:
        norm: The capacity_norm of the worker as it is, *without* the job.
        context: Constraint b, weighted context tokens.
        prompts: Constraint c, time of the prompts that are to be run.
        slack: Constraint d, the same time against what the others have saved.
        cache: Constraint e, the peak of the cache.
    """

    norm: float
    context: WorkerConstraint
    prompts: WorkerConstraint
    slack: WorkerConstraint
    cache: WorkerConstraint

    @property
    def ok(self) -> bool:
        return self.context.ok and self.prompts.ok and self.slack.ok and self.cache.ok


@dataclass(frozen=True, slots=True)
class PaperReadings:
    """Choices where the specification offers two readings.

    Attributes:
        scaled_norm: The norm adds up milliseconds of a step instead of tokens to sessions (R8).
        strict_slack: A session's first token saves nothing, because ATGT divides by the number of
            tokens less one (R5); this is what live dispatchers use.
    """

    scaled_norm: bool = False
    strict_slack: bool = False


LITERAL = PaperReadings()


def examine(
    lines: LatencyLines,
    limits: WorkerLimits,
    jobs: Sequence[Job],
    added: Job,
    readings: PaperReadings = LITERAL,
) -> ConstraintCheck:
    """Returns the constraints on a worker with `jobs` if it gets one more.

    Args:
        lines: Latency lines of the worker.
        limits: Objectives, capacity, gamma and theta.
        jobs: All its jobs, including those whose prompt has not run.
        added: The job to be placed.
        readings: Choices between readings.
    """
    together = [*jobs, added]
    prompts = 0.0
    if not limits.split_decode:
        prompts = lines.prefill(sum(job.prompt_tokens for job in together if job.is_new))
    return ConstraintCheck(
        capacity_norm(lines, limits, jobs, readings),
        _context(lines, limits, together),
        _within(prompts, limits.first_token_ns or None),
        _within(prompts, None if limits.split_decode else saved(limits, jobs, readings)),
        _within(
            kv_peak(lines, together),
            None if math.isinf(limits.cache_capacity) else limits.cache_capacity,
        ),
    )


def place(
    lines: LatencyLines,
    limits: WorkerLimits,
    workers: Sequence[Sequence[Job]],
    job: Job,
    readings: PaperReadings = LITERAL,
) -> int | Literal["new"] | None:
    """Returns the worker a job goes to (Algorithm 1).

    Args:
        lines: Latency lines of every worker; the workers are alike.
        limits: Objectives, capacity, gamma and theta.
        workers: The jobs of each worker.
        job: The job to be placed.
        readings: Choices between readings.

    Returns:
        The index of the fullest worker where all constraints hold; "new" if only a worker of its
            own would do; None if not even that: the request is inadmissible (R3).
    """
    norms = [capacity_norm(lines, limits, jobs, readings) for jobs in workers]
    for index in sorted(range(len(workers)), key=lambda at: (-norms[at], at)):
        if examine(lines, limits, workers[index], job, readings).ok:
            return index
    return "new" if examine(lines, limits, (), job, readings).ok else None


def capacity_norm(
    lines: LatencyLines,
    limits: WorkerLimits,
    jobs: Sequence[Job],
    readings: PaperReadings = LITERAL,
) -> float:
    """Returns the load of a worker: the L2 norm of batch size and weighted context."""
    context = weighted_context(limits.gamma, jobs)
    if readings.scaled_norm:
        return math.hypot(
            lines.decode_session_ns * len(jobs), lines.decode_context_token_ns * context
        )
    return math.hypot(len(jobs), context)


def weighted_context(gamma: float, jobs: Iterable[Job]) -> float:
    """Returns the context tokens that count in b: prompts and gamma of the answers."""
    return sum(job.prompt_tokens + gamma * job.final_tokens for job in jobs)


def context_limit(lines: LatencyLines, per_token_ns: float, sessions: int) -> float:
    """Returns l_d(b): the most context of `sessions` in a step of `per_token_ns` (eq. 4)."""
    spare = per_token_ns - lines.decode_ns - lines.decode_session_ns * sessions
    if lines.decode_context_token_ns > 0:
        return spare / lines.decode_context_token_ns
    return math.inf if spare >= 0 else -math.inf


def saved(
    limits: WorkerLimits, jobs: Iterable[Job], readings: PaperReadings = LITERAL
) -> float | None:
    """Returns theta of the least time an ongoing job has saved (d); None if nothing binds.

    Jobs that are late already have saved less than nothing: no other job joins them (R6).
    """
    if not limits.per_token_ns:
        return None
    first = 1 if readings.strict_slack else 0
    least = min(
        (
            limits.per_token_ns * (job.generated_tokens - first) - job.decode_ns
            for job in jobs
            if not job.is_new
        ),
        default=None,
    )
    return None if least is None else limits.theta * least


def kv_peak(lines: LatencyLines, jobs: Iterable[Job]) -> float:
    """Returns the most cache the jobs will take at once, in units of the capacity (e).

    Each job takes a token more per step until it ends, so their sum can only peak in a step after
    which one of them ends: these steps are examined from the last to the first, in O(n log n).
    """
    ramps = sorted((_ramp(job) for job in jobs), reverse=True)
    peak = 0.0
    tokens = 0
    for alive, (steps, now) in enumerate(ramps, start=1):
        tokens += now
        here = lines.cache_token * (tokens + alive * steps) + lines.cache_session * alive
        peak = max(peak, here)
    return peak


def _ramp(job: Job) -> tuple[int, int]:
    """Returns the steps a job still takes, and its tokens before the first of them."""
    steps = math.ceil(job.final_tokens) - job.generated_tokens
    return steps, job.prompt_tokens + job.generated_tokens


def _context(lines: LatencyLines, limits: WorkerLimits, jobs: Sequence[Job]) -> WorkerConstraint:
    used = weighted_context(limits.gamma, jobs)
    if not limits.per_token_ns:
        return WorkerConstraint(True, used, None)
    if len(jobs) == 1:
        return WorkerConstraint(lines.decode(1, used) <= limits.per_token_ns, used, None)
    allowed = context_limit(lines, limits.per_token_ns, len(jobs))
    if math.isinf(allowed):
        return WorkerConstraint(allowed > 0, used, None)
    return _within(used, limits.theta * allowed)


def _within(used: float, allowed: float | None) -> WorkerConstraint:
    return WorkerConstraint(allowed is None or used <= allowed, used, allowed)
