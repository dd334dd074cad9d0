"""How long a standby leaves a free lease to whoever led before Redis was away or forgot.

That leader has plan, queues and book in memory and will want its lease back; a standby that was
quicker would begin with what Redis still knows, which may be nothing. Pure; moments are given.
"""

from __future__ import annotations


class StaleLeaseDetector:
    """Tells a lease that is renewed from one that only lasts, since Redis' clock was set back."""

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._ends_s = 0.0
        self._since_s: float | None = None

    def saw(self, left_s: float, now_s: float) -> bool:
        """Takes a look at how long the lease of another lasts; True if it is frozen.

        That is: it lasts for more than twice what it is granted for, and nobody renewed it for
        three times that. A leader that lives renews it a dozen times meanwhile.
        """
        ends_s = now_s + left_s
        is_long = left_s > 2 * self._ttl_s
        if not is_long or self._since_s is None or abs(ends_s - self._ends_s) > self._ttl_s / 4:
            self._since_s = now_s if is_long else None
            self._ends_s = ends_s
            return False
        return now_s - self._since_s >= 3 * self._ttl_s


class TakeoverBackoff:
    """What one standby has seen of an outage.

    Invariant: the time runs from the first contact after the outage, not from its beginning.
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
        """Redis did not answer."""
        self._backs_off = True
        self._since_s = None

    def redis_back(self, now_s: float) -> None:
        """It answers, and nobody holds the lease."""
        if self._backs_off and self._since_s is None:
            self._since_s = now_s

    def redis_forgot(self, now_s: float) -> None:
        """It knows of no epoch as high as one that it told before."""
        if not self._backs_off:
            self._backs_off, self._since_s = True, now_s

    def is_settled(self) -> None:
        """Somebody holds the lease."""
        self._backs_off = False
        self._since_s = None

    def left_s(self, now_s: float) -> float:
        """Returns how much longer to leave the lease alone; 0: not at all."""
        if not self._backs_off:
            return 0.0
        if self._since_s is None:
            return self._grace_s
        return max(0.0, self._since_s + self._grace_s - now_s)

    def has_waited(self, now_s: float) -> bool:
        """True if nobody came back in all that time."""
        return self._backs_off and self.left_s(now_s) <= 0
