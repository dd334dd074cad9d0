"""How many workers suffice for a rate: the line, its prior, and what history teaches it."""

from __future__ import annotations

from math import ceil, log

from catenary_scheduler.scaling.workers.attainment import Outcomes
from catenary_scheduler.scaling.workers.worker_facts import ScalingPolicy, WorkerFacts
from catenary_scheduler.scaling.workers.workers_line import (
    Capability,
    Lengths,
    WorkersLine,
    capability,
    prior_pairs,
    staffed,
)
from catenary_services.domain.ids import NANOSECONDS_PER_SECOND

_FAILURE_WEIGHT = 3.0
"""A number of workers that failed teaches as much as so many that sufficed."""


class Sufficiency:
    """The workers line of one model.

    Attributes:
        line: Workers by rate.
        worker: What one worker sustains in theory; None while nothing is known of it.
    """

    def __init__(self, policy: ScalingPolicy) -> None:
        self._policy = policy
        self.line = WorkersLine()
        self.worker: Capability | None = None
        self._prior_of: tuple[object, ...] = ()
        self._busy = 0.0
        """Share of the slots in use, smoothed."""

    def note(self, facts: WorkerFacts, lengths: Lengths) -> None:
        """Follows what workers are good for; about once a second."""
        share = facts.sessions / facts.slots if facts.slots else 0.0
        self._busy += 0.1 * (share - self._busy)
        slots = facts.slots // max(1, facts.workers)
        rounded = [round(10 * log(max(1.0, each))) for each in lengths]
        made_of = (facts.lines, facts.objectives, facts.service_ns, slots, *rounded)
        if facts.workers and made_of != self._prior_of:
            self._prior_of = made_of
            self.worker = self._capability(facts, lengths, slots)
            if self.worker is not None:
                self.line.set_prior(prior_pairs(self.worker, self._policy.headroom))

    def with_margin(self, rate: float) -> int:
        """Returns the workers that are enough for a little more than a rate."""
        return self.line.needed(rate * (1.0 + self._policy.margin))

    def for_sessions(self, sessions: int) -> int:
        """Returns the workers that so many sessions take."""
        return 0 if self.worker is None else ceil(sessions / self.worker.sessions)

    def is_plenty(self, rate: float, workers: int) -> bool:
        """True if there are so many workers that more of them cannot be what is missing.

        An objective nobody can meet, and best fit that leaves added workers idle, look like a lack
        of workers; they are none.
        """
        if self.worker is None:
            return False
        load = rate / self.worker.rate_per_s
        enough = ceil(staffed(load, self.worker.sessions, self._policy.headroom))
        return workers > 2 * max(1, enough)

    def failed(self, rate: float, workers: int) -> None:
        """So few were not enough, and one more is wanted at once."""
        self.line.learn(rate, workers + 0.5, _FAILURE_WEIGHT)

    def lasted(self, facts: WorkerFacts, rate: float, done: Outcomes) -> None:
        """A steady while is over, and this became of its sessions."""
        if done.ratio < self._policy.attainment:
            if not self.is_plenty(rate, facts.workers):
                self.line.learn(rate, facts.workers + 0.5)
            return
        used = self._used(facts, done)
        if used > 0.0:
            sessions = self.worker.sessions if self.worker is not None else 1.0
            load = min(1.0, used) * facts.workers
            enough = staffed(load, sessions, self._policy.headroom)
            self.line.learn(rate, min(enough, float(facts.workers)))

    def _capability(self, facts: WorkerFacts, lengths: Lengths, slots: int) -> Capability | None:
        theta = self._policy.theta
        if facts.lines is not None:
            return capability(facts.lines, facts.objectives, lengths, slots, theta)
        if not facts.service_ns or not slots:
            return None
        most = max(1.0, theta * slots)
        return Capability(most * NANOSECONDS_PER_SECOND / facts.service_ns, most)

    def _used(self, facts: WorkerFacts, done: Outcomes) -> float:
        """Returns the share that was used of what the workers can take.

        A worker's time per token grows with its load as T = c3 / (1 - load * s), s the work of a
        session (the steady state of `workers_line`). So the time per token that was seen tells what
        load it was, in units of the load at which it would be all it may be.
        """
        slots = self._busy / self._policy.theta
        lines, objectives = facts.lines, facts.objectives
        if lines is None or objectives is None or not objectives.per_token_ns:
            return slots
        fixed = lines.decode_ns
        allowed = self._policy.theta * objectives.per_token_ns
        if not 0.0 < fixed < allowed or done.per_token_ns <= fixed:
            return slots
        return max(slots, (1.0 - fixed / done.per_token_ns) / (1.0 - fixed / allowed))
