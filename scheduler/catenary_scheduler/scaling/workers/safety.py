"""Signs that the workers there are do not suffice, whatever a line says."""

from __future__ import annotations

from collections import deque

from catenary_scheduler.scaling.workers.attainment import Outcomes, RecentOutcomes
from catenary_scheduler.scaling.workers.worker_facts import ScalingPolicy, WorkerFacts
from catenary_services.domain.ids import Nanoseconds


class Safety:
    """Attainment, forced placements and the queue of one model.

    Attributes:
        recent: Outcomes of the sessions finished lately.
        trusted: Of those that arrived since the number of workers changed last: only these tell
            anything of the workers there are.
        ready_ns: When that number changed last.
    """

    def __init__(self, policy: ScalingPolicy) -> None:
        self._policy = policy
        self.recent = RecentOutcomes(policy.window_ns)
        self.trusted = RecentOutcomes(policy.window_ns)
        self.ready_ns: Nanoseconds = 0
        self._workers = 0
        self._queue: deque[tuple[Nanoseconds, int]] = deque()
        """Its length lately, since it was empty last."""
        self._forced: int | None = None

    def finished(self, outcome: Outcomes, arrived_ns: Nanoseconds, now: Nanoseconds) -> None:
        """A session has all its tokens."""
        self.recent.finished(outcome, now)
        if arrived_ns >= self.ready_ns:
            self.trusted.finished(outcome, now)

    def noted(self, workers: int, now: Nanoseconds) -> bool:
        """Follows the number of workers; True if it changed."""
        if workers == self._workers:
            return False
        # Nobody knows since when the first ones have been there.
        self.ready_ns = now if self._workers else self.ready_ns
        self._workers = workers
        self.trusted.clear()
        return True

    def problem(self, facts: WorkerFacts, now: Nanoseconds, *, has_plenty: bool) -> str:
        """Returns, in words, why the workers there are do not suffice; empty if they seem to.

        Args:
            facts: Of the workers.
            now: The moment.
            has_plenty: There are so many that missed objectives cannot be for want of them.
        """
        forced = 0 if self._forced is None else facts.forced - self._forced
        self._forced = facts.forced
        lasting = self._is_queue_lasting(facts.queued, now)
        if forced > 0 and not has_plenty:
            return f"{forced} session(s) placed against their objectives"
        if lasting:
            return f"{facts.queued} session(s) wait for a place"
        done = self.trusted.total(now)
        enough = done.finished >= self._policy.least_finished
        if enough and done.ratio < self._policy.attainment and not has_plenty:
            return f"{done.ratio:.0%} of the sessions met their objectives"
        return ""

    def _is_queue_lasting(self, queued: int, now: Nanoseconds) -> bool:
        """True if sessions wait for long and do not become fewer: a backlog may take its time."""
        queue = self._queue
        if not queued:
            queue.clear()
            return False
        queue.append((now, queued))
        lasting = now - queue[0][0] >= self._policy.queue_ns
        before = queue[0][1]
        while now - queue[0][0] > 2 * self._policy.queue_ns:
            queue.popleft()
        return lasting and queued >= before
