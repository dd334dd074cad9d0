"""Turns on the device of an agent, which batches and steps of language models take one by one.

Both have a thread of their own, and both may always have something ready. Side by side each would
take as long as the other lets it, which nobody can promise; in turns each takes its own time, and
waits for one piece of work of the other at most. The scheduler books by this rule
(`catenary_scheduler.book.steps`).
"""

from __future__ import annotations

import threading
from collections import deque
from types import TracebackType


class DeviceTurns:
    """A lock that is handed to those who wait in the order in which they came.

    With an ordinary lock a thread that computes one step after another takes it again before the
    thread that waits has woken up.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._is_taken = False
        self._waiting: deque[threading.Event] = deque()

    @property
    def waiting(self) -> int:
        """The number of threads that wait for their turn."""
        return len(self._waiting)

    def try_take(self) -> bool:
        """Takes the device if nobody has it, and returns whether it did; never waits."""
        with self._guard:
            is_free = not self._is_taken
            self._is_taken = True
            return is_free

    def give_back(self) -> None:
        """Ends the turn of who has the device."""
        with self._guard:
            if self._waiting:
                self._waiting.popleft().set()  # the device stays taken, by the next one
            else:
                self._is_taken = False

    def __enter__(self) -> None:
        with self._guard:
            if not self._is_taken:
                self._is_taken = True
                return
            turn = threading.Event()
            self._waiting.append(turn)
        turn.wait()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.give_back()
