"""Errors of recent predictions, relative to what was predicted."""

from __future__ import annotations

from collections import deque

_WINDOW = 200


class ErrorWindow:
    """Recent values of |measured / predicted - 1|."""

    def __init__(self, size: int = _WINDOW) -> None:
        """Keeps the errors of the latest `size` observations."""
        self._errors: deque[float] = deque(maxlen=size)

    def __len__(self) -> int:
        return len(self._errors)

    def add(self, measured: float, predicted: float) -> None:
        """Adds the error of an observation. One that was predicted to take no time is ignored."""
        if predicted > 0.0:
            self._errors.append(abs(measured / predicted - 1.0))

    @property
    def mean(self) -> float:
        """Mean error as a ratio; -1 if there were no observations."""
        return sum(self._errors) / len(self._errors) if self._errors else -1.0

    @property
    def maximum(self) -> float:
        """Largest error as a ratio; -1 if there were no observations."""
        return max(self._errors, default=-1.0)
