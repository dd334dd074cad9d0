"""Estimate of the workers that suffice for a rate, from a prior and from history."""

from __future__ import annotations

from math import ceil, log

from catenary_scheduler.scaling.workers.attainment import OutcomeSums
from catenary_scheduler.scaling.workers.worker_statistics import ScalingPolicy, WorkerStatistics
from catenary_scheduler.scaling.workers.workers_line import (
    SessionLengths,
    WorkerCapability,
    WorkersLine,
    capability,
    prior_pairs,
    staffed,
)
from catenary_services.domain.ids import NANOSECONDS_PER_SECOND

_FAILURE_WEIGHT = 3.0
"""Weight of a number of workers that failed, in numbers of workers that sufficed."""


class SufficientWorkers:
    """Estimate of the workers that one model needs, and what it is learned from.

    Attributes:
        line: Line from which the workers for a rate are read.
        worker: Load that one worker sustains in theory; None while nothing is known about it.
    """

    def __init__(self, policy: ScalingPolicy) -> None:
        self._policy = policy
        self.line = WorkersLine()
        self.worker: WorkerCapability | None = None
        self._prior_of: tuple[object, ...] = ()
        self._busy = 0.0
        """Smoothed share of the slots that are in use."""

    def note(self, statistics: WorkerStatistics, lengths: SessionLengths) -> None:
        """Follows what workers can do, and renews the prior if that has changed.

        To be called about once a second.
        """
        share = statistics.sessions / statistics.slots if statistics.slots else 0.0
        self._busy += 0.1 * (share - self._busy)
        slots = statistics.slots // max(1, statistics.workers)
        rounded = [round(10 * log(max(1.0, each))) for each in lengths]
        made_of = (statistics.lines, statistics.objectives, statistics.service_ns, slots, *rounded)
        if statistics.workers and made_of != self._prior_of:
            self._prior_of = made_of
            self.worker = self._capability(statistics, lengths, slots)
            if self.worker is not None:
                self.line.set_prior(prior_pairs(self.worker, self._policy.headroom))

    def with_margin(self, rate: float) -> int:
        """Returns the number of workers for a rate that is larger by the policy's margin."""
        return self.line.needed(rate * (1.0 + self._policy.margin))

    def for_sessions(self, sessions: int) -> int:
        """Returns the number of workers that `sessions` sessions take.

        Returns 0 if one worker's capability is unknown.
        """
        return 0 if self.worker is None else ceil(sessions / self.worker.sessions)

    def is_plenty(self, rate: float, workers: int) -> bool:
        """Returns True if there are so many workers that a lack of workers cannot be the problem.

        An objective that nobody can meet, and best fit that leaves added workers idle, look like a
        lack of workers but are not.
        """
        if self.worker is None:
            return False
        load = rate / self.worker.rate_per_s
        enough = ceil(staffed(load, self.worker.sessions, self._policy.headroom))
        return workers > 2 * max(1, enough)

    def failed(self, rate: float, workers: int) -> None:
        """Learns that so few workers were not enough, because one more is wanted at once."""
        self.line.learn(rate, workers + 0.5, _FAILURE_WEIGHT)

    def lasted(self, statistics: WorkerStatistics, rate: float, done: OutcomeSums) -> None:
        """Learns from the outcomes of the sessions of a steady window that has just ended."""
        if done.ratio < self._policy.attainment:
            if not self.is_plenty(rate, statistics.workers):
                self.line.learn(rate, statistics.workers + 0.5)
            return
        used = self._used(statistics, done)
        if used > 0.0:
            sessions = self.worker.sessions if self.worker is not None else 1.0
            load = min(1.0, used) * statistics.workers
            enough = staffed(load, sessions, self._policy.headroom)
            self.line.learn(rate, min(enough, float(statistics.workers)))

    def _capability(
        self, statistics: WorkerStatistics, lengths: SessionLengths, slots: int
    ) -> WorkerCapability | None:
        theta = self._policy.theta
        if statistics.lines is not None:
            return capability(statistics.lines, statistics.objectives, lengths, slots, theta)
        if not statistics.service_ns or not slots:
            return None
        most = max(1.0, theta * slots)
        return WorkerCapability(most * NANOSECONDS_PER_SECOND / statistics.service_ns, most)

    def _used(self, statistics: WorkerStatistics, done: OutcomeSums) -> float:
        """Returns the share of the workers' capacity that was used.

        A worker's time per token grows with its load as T = c3 / (1 - load * s), where s is the
        work of a session (the steady state of `workers_line`). The observed time per token
        therefore determines the load, in units of the load at which T equals its limit.
        """
        slots = self._busy / self._policy.theta
        lines, objectives = statistics.lines, statistics.objectives
        if lines is None or objectives is None or not objectives.per_token_ns:
            return slots
        fixed = lines.decode_ns
        allowed = self._policy.theta * objectives.per_token_ns
        if not 0.0 < fixed < allowed or done.per_token_ns <= fixed:
            return slots
        return max(slots, (1.0 - fixed / done.per_token_ns) / (1.0 - fixed / allowed))
