"""Signs that the present workers do not suffice, whatever the line says."""

from __future__ import annotations

from collections import deque

from catenary_scheduler.scaling.workers.attainment import OutcomeSums, RecentOutcomes
from catenary_scheduler.scaling.workers.worker_statistics import ScalingPolicy, WorkerStatistics
from catenary_services.domain.ids import Nanoseconds


class ScalingSafety:
    """Monitor of attainment, forced placements and the queue of one model.

    Attributes:
        recent: Outcomes of recently finished sessions.
        trusted: The outcomes of those that arrived since the number of workers last changed. Only
            these say anything about the present workers.
        ready_ns: The moment at which the number of workers last changed.
    """

    def __init__(self, policy: ScalingPolicy) -> None:
        self._policy = policy
        self.recent = RecentOutcomes(policy.window_ns)
        self.trusted = RecentOutcomes(policy.window_ns)
        self.ready_ns: Nanoseconds = 0
        self._workers = 0
        self._queue: deque[tuple[Nanoseconds, int]] = deque()
        """Recent queue lengths as (moment, sessions), since the queue was last empty."""
        self._forced: int | None = None

    def finished(self, outcome: OutcomeSums, arrived_ns: Nanoseconds, now: Nanoseconds) -> None:
        """Adds the outcome of a session that has all its tokens."""
        self.recent.finished(outcome, now)
        if arrived_ns >= self.ready_ns:
            self.trusted.finished(outcome, now)

    def noted(self, workers: int, now: Nanoseconds) -> bool:
        """Records the number of workers. Returns True if it has changed."""
        if workers == self._workers:
            return False
        # The first workers may have been there for any time before, so `ready_ns` stays as it is.
        self.ready_ns = now if self._workers else self.ready_ns
        self._workers = workers
        self.trusted.clear()
        return True

    def problem(self, statistics: WorkerStatistics, now: Nanoseconds, *, has_plenty: bool) -> str:
        """Returns in words why the present workers do not suffice; empty if they seem to.

        Args:
            statistics: Present statistics of the model's workers.
            now: The present moment.
            has_plenty: Whether there are so many workers that more would not help missed
                objectives.
        """
        forced = 0 if self._forced is None else statistics.forced - self._forced
        self._forced = statistics.forced
        lasting = self._is_queue_lasting(statistics.queued, now)
        if forced > 0 and not has_plenty:
            return f"{forced} session(s) placed against their objectives"
        if lasting:
            return f"{statistics.queued} session(s) wait for a place"
        done = self.trusted.total(now)
        enough = done.finished >= self._policy.least_finished
        if enough and done.ratio < self._policy.attainment and not has_plenty:
            return f"{done.ratio:.0%} of the sessions met their objectives"
        return ""

    def _is_queue_lasting(self, queued: int, now: Nanoseconds) -> bool:
        """Returns True if sessions have waited for long and do not become fewer.

        A backlog that shrinks may take its time.
        """
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
