"""The scheduler's clock, and moments of an earlier scheduler's clock on it."""

from __future__ import annotations

import time

from catenary_scheduler.storage.store import ClockAnchor
from catenary_services.domain.ids import Nanoseconds

now_ns = time.monotonic_ns
"""The one clock of a scheduler, in nanoseconds. Its readings leave the process only as offsets."""


def translation_ns(theirs: ClockAnchor, ours: ClockAnchor) -> Nanoseconds:
    """Returns what to add to a moment on an earlier scheduler's clock to get it on ours.

    Both clocks were read against Redis' TIME. If that was set forward between the two readings,
    restored reservations look older by as much and expire; agents report what they still hold. If
    it was set back, no time seems to have passed, and the reservations end too late by the time
    that there was no leader.
    """
    elapsed_ns = max(0, ours.redis_us - theirs.redis_us) * 1_000
    return ours.scheduler_ns - (theirs.scheduler_ns + elapsed_ns)
