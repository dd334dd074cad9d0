"""The scheduler's clock, and moments of a predecessor's clock on it."""

from __future__ import annotations

import time

from scheduler.state.store import ClockAnchor
from services.domain.ids import Nanoseconds

now_ns = time.monotonic_ns
"""The one clock of a scheduler. Nothing of it ever leaves the process but as an offset."""


def translation_ns(theirs: ClockAnchor, ours: ClockAnchor) -> Nanoseconds:
    """Returns what to add to a moment on a predecessor's clock to get it on ours.

    Both clocks were read against Redis' TIME. Steps of Redis' wall clock between the two readings
    shift the result; restored reservations are late or early by as much and soon corrected by the
    agents' reports.
    """
    elapsed_ns = (ours.redis_us - theirs.redis_us) * 1_000
    return ours.scheduler_ns - (theirs.scheduler_ns + elapsed_ns)
