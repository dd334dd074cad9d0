"""Ratios of real to booked compute time, by agent."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from catenary_services.domain.ids import NANOSECONDS_PER_SECOND, AgentId, Nanoseconds

_WINDOW_NS = 20 * NANOSECONDS_PER_SECOND
_MOST_REPORTS = 64
_FEWEST_REPORTS = 3
"""No ratio is given for fewer reports: a single late batch would look like a slow agent."""


@dataclass(slots=True)
class _Window:
    reports: deque[tuple[Nanoseconds, Nanoseconds, Nanoseconds]] = field(default_factory=deque)
    """Moment of the report, real and booked time of each, in nanoseconds."""
    real_ns: Nanoseconds = 0
    booked_ns: Nanoseconds = 0

    def drop_oldest(self) -> None:
        _, real_ns, booked_ns = self.reports.popleft()
        self.real_ns -= real_ns
        self.booked_ns -= booked_ns


class Slowdowns:
    """The ratio of real to booked compute time over each agent's latest reports."""

    def __init__(self) -> None:
        self._windows: dict[AgentId, _Window] = {}

    def reported(
        self, agent: AgentId, real_ns: Nanoseconds, booked_ns: Nanoseconds, now: Nanoseconds
    ) -> None:
        """Adds a report: `real_ns` of computing, for which `booked_ns` were booked or predicted."""
        if booked_ns <= 0 or real_ns < 0:
            return
        window = self._windows.get(agent)
        if window is None:
            window = self._windows[agent] = _Window()
        window.reports.append((now, real_ns, booked_ns))
        window.real_ns += real_ns
        window.booked_ns += booked_ns
        if len(window.reports) > _MOST_REPORTS:
            window.drop_oldest()

    def ratio(self, agent: AgentId, now: Nanoseconds) -> float:
        """Returns the recent ratio of real to booked time.

        1 is as booked, 0 if too little is known.

        Batches count by their length, so that the noise of short ones does not dominate.
        """
        window = self._windows.get(agent)
        if window is None:
            return 0.0
        while window.reports and window.reports[0][0] < now - _WINDOW_NS:
            window.drop_oldest()
        if len(window.reports) < _FEWEST_REPORTS:
            return 0.0
        return window.real_ns / window.booked_ns

    def forget(self, agent: AgentId) -> None:
        """Drops the reports of an agent that is gone; another agent may come under its name."""
        self._windows.pop(agent, None)
