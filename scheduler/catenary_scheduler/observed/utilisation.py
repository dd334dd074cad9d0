"""The share of the last seconds in which each device, or each link, was busy."""

from __future__ import annotations

from collections import deque

from catenary_services.domain.ids import NANOSECONDS_PER_SECOND, Nanoseconds

_WINDOW = 5


class Utilisation:
    """Busy time by agent, or by link, over the last few rounds of periodic tasks."""

    def __init__(self) -> None:
        self._current: dict[str, Nanoseconds] = {}
        self._rounds: deque[tuple[float, dict[str, Nanoseconds]]] = deque(maxlen=_WINDOW)
        self._began_s: float | None = None

    def add(self, name: str, duration_ns: Nanoseconds) -> None:
        """Adds busy time of a device or a link."""
        self._current[name] = self._current.get(name, 0) + duration_ns

    def tick(self, now: Nanoseconds) -> None:
        """Ends a round; called about every second."""
        self.next_round(now / NANOSECONDS_PER_SECOND)

    def next_round(self, now_s: float) -> None:
        """Ends a round at a moment in seconds on the monotonic clock."""
        if self._began_s is not None:
            self._rounds.append((now_s - self._began_s, self._current))
        self._current, self._began_s = {}, now_s

    def ratio(self, name: str) -> float:
        """Returns the share of the last rounds in which a device or link was busy, 0 to 1."""
        seconds = sum(length for length, _ in self._rounds)
        busy_ns = sum(busy.get(name, 0) for _, busy in self._rounds)
        return min(1.0, busy_ns / NANOSECONDS_PER_SECOND / seconds) if seconds > 0 else 0.0
