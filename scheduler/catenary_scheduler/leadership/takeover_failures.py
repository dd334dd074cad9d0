"""Counts failures of a process to lead a group, and sets the pause before the next attempt."""

from __future__ import annotations

from typing import Final

_FIRST_PAUSE_S: Final = 0.2
_LONGEST_PAUSE_S: Final = 5.0
_SETTLED_S: Final = 30.0
"""A term that lasts this long has begun well, so earlier failures are forgotten."""
_LONGEST_TEXT: Final = 300


class TakeoverFailures:
    """Failures in a row of one process to lead one group, without I/O; moments are passed in.

    Attributes:
        failures: Number of failures; 0 once a term has lasted `_SETTLED_S` seconds.
        problem: The last failure, in one line for people; empty without one.
    """

    def __init__(self) -> None:
        self.failures = 0
        self.problem = ""
        self._began_s: float | None = None
        self._other_since_s: float | None = None

    def began(self, now_s: float) -> None:
        """Notes that this process begins to lead."""
        self._began_s = now_s
        self._other_since_s = None

    def look(self, now_s: float) -> None:
        """Forgets earlier failures once the present term has lasted `_SETTLED_S` seconds."""
        if self._began_s is not None and now_s - self._began_s >= _SETTLED_S:
            self.failures, self.problem = 0, ""

    def failed(self, error: BaseException, now_s: float) -> float:
        """Counts a failure, and returns the seconds for which to leave the lease to others."""
        self.look(now_s)
        self._began_s = self._other_since_s = None
        self.failures += 1
        first_line = (str(error).splitlines() or [""])[0][:_LONGEST_TEXT]
        self.problem = f"{type(error).__name__}: {first_line}"
        doubled = _FIRST_PAUSE_S * 2.0 ** min(self.failures - 1, 10)
        return min(_LONGEST_PAUSE_S, doubled)

    def ended(self, now_s: float) -> None:
        """Notes that a term ended without failure: another process leads, or is to lead."""
        self.look(now_s)
        self._began_s = None

    def another_leads(self, now_s: float) -> None:
        """Notes that another process holds the lease; failures are forgotten if it keeps it."""
        if self._other_since_s is None:
            self._other_since_s = now_s
        elif now_s - self._other_since_s >= _SETTLED_S:
            self.failures, self.problem = 0, ""

    def in_words(self) -> str:
        """Returns the failures in one sentence; empty if none, or while another process leads."""
        if not self.failures or self._other_since_s is not None:
            return ""
        times = "once" if self.failures == 1 else f"{self.failures} times in a row"
        return f"leading failed {times}: {self.problem}"
