"""A leader that fails: how long until the next attempt, and what is said of it meanwhile."""

from __future__ import annotations

from typing import Final

_FIRST_PAUSE_S: Final = 0.2
_LONGEST_PAUSE_S: Final = 5.0
_SETTLED_S: Final = 30.0
"""A term that lasted so long owes its end to something else than its beginning."""
_LONGEST_TEXT: Final = 300


class TakeoverFailures:
    """Failures in a row of one process to lead one group. Pure; moments are given.

    Attributes:
        failures: How many; 0 once a term has lasted for a while.
        problem: The last one, in one line for people; empty without any.
    """

    def __init__(self) -> None:
        self.failures = 0
        self.problem = ""
        self._began_s: float | None = None
        self._other_since_s: float | None = None

    def began(self, now_s: float) -> None:
        """A term begins to lead."""
        self._began_s = now_s
        self._other_since_s = None

    def look(self, now_s: float) -> None:
        """Forgets earlier failures once a term has lasted."""
        if self._began_s is not None and now_s - self._began_s >= _SETTLED_S:
            self.failures, self.problem = 0, ""

    def failed(self, error: BaseException, now_s: float) -> float:
        """Counts a failure, and returns for how many seconds to leave the lease to others."""
        self.look(now_s)
        self._began_s = self._other_since_s = None
        self.failures += 1
        first_line = (str(error).splitlines() or [""])[0][:_LONGEST_TEXT]
        self.problem = f"{type(error).__name__}: {first_line}"
        doubled = _FIRST_PAUSE_S * 2.0 ** min(self.failures - 1, 10)
        return min(_LONGEST_PAUSE_S, doubled)

    def ended(self, now_s: float) -> None:
        """A term ended as terms do: somebody else leads, or is to."""
        self.look(now_s)
        self._began_s = None

    def another_leads(self, now_s: float) -> None:
        """Another process holds the lease; if it keeps it, all is well."""
        if self._other_since_s is None:
            self._other_since_s = now_s
        elif now_s - self._other_since_s >= _SETTLED_S:
            self.failures, self.problem = 0, ""

    def in_words(self) -> str:
        """Returns one sentence; empty without trouble, and while another process leads."""
        if not self.failures or self._other_since_s is not None:
            return ""
        times = "once" if self.failures == 1 else f"{self.failures} times in a row"
        return f"leading failed {times}: {self.problem}"
