"""Counters of placements, and the share of time that prompts take."""

from __future__ import annotations

from catenary_services.domain.ids import NANOSECONDS_PER_SECOND, Nanoseconds

PLACED = "placed_requests"
"""Counter of the placed requests with objectives."""
FORCED = "forced_placements"
"""Counter of those for which no worker met all constraints in time (R14)."""
INADMISSIBLE = "inadmissible_requests"
"""Counter of requests that not even an empty worker could serve as they asked (R3)."""
RERUN = "rerun_tokens"
"""Counter of answer tokens that were run again as part of a prompt, because a session was lost."""
PLACEMENT_COUNTERS = (PLACED, FORCED, INADMISSIBLE, RERUN)

_MEMORY_NS = 10 * NANOSECONDS_PER_SECOND
"""A placement longer ago than this does not count any more."""


class PrefillShare:
    """The share of their time in which workers run prompts, over the last seconds."""

    def __init__(self) -> None:
        self._prompts_ns = 0.0
        self._seen: Nanoseconds = 0

    def took(self, prompt_ns: float, now: Nanoseconds) -> None:
        """Adds the duration of a prompt that was placed."""
        self._prompts_ns = self._prompts_ns * self._kept(now) + prompt_ns
        self._seen = now

    def of_each(self, workers: int, now: Nanoseconds) -> float:
        """Returns the share of each worker, given their number."""
        return min(0.5, self._kept(now) * self._prompts_ns / (_MEMORY_NS * max(1, workers)))

    def _kept(self, now: Nanoseconds) -> float:
        # Intervals far below the memory make this a sum that decays with it.
        return max(0.0, 1.0 - (now - self._seen) / _MEMORY_NS)
