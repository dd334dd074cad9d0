"""How much slower agents compute than was booked for them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from catenary_services.domain.ids import NANOSECONDS_PER_SECOND, AgentId, Nanoseconds

_WINDOW_NS = 20 * NANOSECONDS_PER_SECOND
_MOST_REPORTS = 64
_FEWEST_REPORTS = 3
"""Of fewer, a single late batch would look like a slow agent."""


@dataclass(slots=True)
class _Window:
    reports: deque[tuple[Nanoseconds, Nanoseconds, Nanoseconds]] = field(default_factory=deque)
    """Moment, real and booked time."""
    real_ns: Nanoseconds = 0
    booked_ns: Nanoseconds = 0

    def drop_oldest(self) -> None:
        _, real_ns, booked_ns = self.reports.popleft()
        self.real_ns -= real_ns
        self.booked_ns -= booked_ns


class Slowdowns:
    """Real by booked compute time of each agent's last reports."""

    def __init__(self) -> None:
        self._windows: dict[AgentId, _Window] = {}

    def reported(
        self, agent: AgentId, real_ns: Nanoseconds, booked_ns: Nanoseconds, now: Nanoseconds
    ) -> None:
        """An agent took so long for what was booked, or predicted, to take so long."""
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
        """Returns the mean of real by booked time of late; 1 as booked, 0 if too little is known.

        Long batches count by their length, so that the noise of short ones does not.
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
        """An agent is gone; whoever comes by its name may be another."""
        self._windows.pop(agent, None)
