"""Makes a standby leave a free lease to the last leader for a while after an outage of Redis.

The last leader has plan, queues and book in memory and wants its lease back. A quicker standby
would begin with the state that Redis still has, which may be none. No I/O is done; moments are
passed in.
"""

from __future__ import annotations


class StaleLeaseDetector:
    """Detects a lease that lasts without being renewed, since the clock of Redis was set back."""

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._ends_s = 0.0
        self._since_s: float | None = None

    def saw(self, left_s: float, now_s: float) -> bool:
        """Notes how many seconds the lease of another process has left; True if it is stale.

        A lease is stale if it has more than twice its granted time left, and nobody has renewed
        it for three times the granted time. A living leader renews it a dozen times meanwhile.
        """
        ends_s = now_s + left_s
        is_long = left_s > 2 * self._ttl_s
        if not is_long or self._since_s is None or abs(ends_s - self._ends_s) > self._ttl_s / 4:
            self._since_s = now_s if is_long else None
            self._ends_s = ends_s
            return False
        return now_s - self._since_s >= 3 * self._ttl_s


class TakeoverBackoff:
    """Knowledge of one standby about an outage of Redis.

    Invariant: the grace time runs from the first contact after the outage, not from its beginning.
    A Redis that answers but refuses writes (full, a replica) is not back.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._backs_off = False
        self._since_s: float | None = None

    @property
    def is_waiting(self) -> bool:
        """True from an outage until somebody holds the lease again."""
        return self._backs_off

    def redis_lost(self) -> None:
        """Notes that Redis did not answer, or refused writes."""
        self._backs_off = True
        self._since_s = None

    def redis_back(self, now_s: float) -> None:
        """Notes that Redis answers and takes writes, and that nobody holds the lease."""
        if self._backs_off and self._since_s is None:
            self._since_s = now_s

    def redis_forgot(self, now_s: float) -> None:
        """Notes that Redis lost its data: it knows only epochs below one that it told before."""
        if not self._backs_off:
            self._backs_off, self._since_s = True, now_s

    def is_settled(self) -> None:
        """Notes that some process holds the lease, so that the outage is over."""
        self._backs_off = False
        self._since_s = None

    def left_s(self, now_s: float) -> float:
        """Returns for how many seconds to leave the lease alone; 0 if there is no need."""
        if not self._backs_off:
            return 0.0
        if self._since_s is None:
            return self._grace_s
        return max(0.0, self._since_s + self._grace_s - now_s)

    def has_waited(self, now_s: float) -> bool:
        """True if the grace time is over and nobody has taken the lease."""
        return self._backs_off and self.left_s(now_s) <= 0
