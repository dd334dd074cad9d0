"""Says when measured times have moved so far from those of the plan that a new plan is due.

Times are compared as factors on what a plan assumes without measurements: of a model on a group of
agents, or of what a link carries. Three rules keep noise from reconfiguring the cluster: a factor
must have moved by more than a fixed share, for some time, and plans are some time apart. A plan of
pools made for this reason must also be worth its switch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from catenary_scheduler.scaling import ReplanPolicy
from catenary_services.domain.ids import NANOSECONDS_PER_SECOND, ModelKey, Nanoseconds

Factors = Mapping[tuple[ModelKey | str, str], float]
"""Factors by which measurements correct the times that a plan assumes: of a model on a group of
agents, of transfers by such a group, or of frames and prompts over a link."""

_NOTABLE = 0.15
_LOOKS_NS = NANOSECONDS_PER_SECOND


class ChangedTimes:
    """A follower of the factors by which measurements correct the times of a plan.

    Args:
        policy: How long a change must last, and how far plans are apart.
    """

    def __init__(self, policy: ReplanPolicy) -> None:
        self._policy = policy
        self._planned: Factors = {}
        self._planned_ns: Nanoseconds | None = None
        self._moved_ns: Nanoseconds | None = None
        """Moment since which a factor is too far from the planned one; None while none is."""
        self._looked_ns: Nanoseconds = 0

    def planned(self, factors: Factors, now: Nanoseconds) -> None:
        """Records that a plan was made with these factors."""
        self._planned = factors
        self._planned_ns = now
        self._moved_ns = None

    def is_time(self, now: Nanoseconds) -> bool:
        """Returns True if it is time for another look, which is about once a second."""
        if now - self._looked_ns < _LOOKS_NS:
            return False
        self._looked_ns = now
        return True

    def decide(self, present: Factors, now: Nanoseconds) -> str:
        """Returns in words why a new plan is due now; empty if none is due."""
        if self._planned_ns is None:
            self.planned({}, now)
        moved = {
            place: factor / self._planned.get(place, 1.0)
            for place, factor in present.items()
            if abs(math.log(factor / self._planned.get(place, 1.0))) > math.log1p(_NOTABLE)
        }
        if not moved:
            self._moved_ns = None
            return ""
        if self._moved_ns is None:
            self._moved_ns = now
        assert self._planned_ns is not None
        is_lasting = now - self._moved_ns >= self._policy.lasting_ns
        if not is_lasting or now - self._planned_ns < self._policy.interval_ns:
            return ""
        (model, group), ratio = max(moved.items(), key=lambda each: abs(math.log(each[1])))
        return f"{model} takes {ratio:.2f} times as long on {group} as it was planned for"
