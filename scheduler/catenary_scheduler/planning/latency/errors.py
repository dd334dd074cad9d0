"""How far off predictions were lately."""

from __future__ import annotations

from collections import deque

_WINDOW = 200


class ErrorWindow:
    """|measured / predicted - 1| of the latest observations."""

    def __init__(self, size: int = _WINDOW) -> None:
        """Remembers so many observations."""
        self._errors: deque[float] = deque(maxlen=size)

    def __len__(self) -> int:
        return len(self._errors)

    def add(self, measured: float, predicted: float) -> None:
        """Notes an observation; one that was predicted to take no time at all tells nothing."""
        if predicted > 0.0:
            self._errors.append(abs(measured / predicted - 1.0))

    @property
    def mean(self) -> float:
        """The mean error, as a ratio; -1 if there were no observations."""
        return sum(self._errors) / len(self._errors) if self._errors else -1.0

    @property
    def maximum(self) -> float:
        """The largest error, as a ratio; -1 if there were no observations."""
        return max(self._errors, default=-1.0)
