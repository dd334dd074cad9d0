"""Progress of fetching: the bytes of each version that are wanted and have come, and the rate."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from catenary_services.domain.ids import ModelKey

_RATE_NS = 5_000_000_000
_STEP_NS = 250_000_000
_IDLE_NS = 3_000_000_000
"""A version is fetched when all that was wanted has come, and nothing more was for so long."""


@dataclass(frozen=True, slots=True)
class FetchProgress:
    """The progress of fetching a version."""

    model: ModelKey
    wanted_bytes: int
    """Bytes that were wanted since it began."""
    fetched_bytes: int
    """Number of those that have come."""
    bytes_per_s: int
    """Mean of the last seconds."""


@dataclass(slots=True)
class _Count:
    began_ns: int
    wanted: int = 0
    fetched: int = 0
    came: deque[tuple[int, int]] = field(default_factory=deque)
    """Moments and the bytes that came in the quarter of a second since."""


class ProgressCounter:
    """Counts what is wanted and what comes, by version."""

    def __init__(self) -> None:
        self._counts: dict[ModelKey, _Count] = {}
        self.total_bytes = 0
        """Bytes of right chunks that came since the process began."""

    def wanted(self, model: ModelKey, nbytes: int, now_ns: int) -> None:
        """Adds bytes that are wanted from now on."""
        self._counts.setdefault(model, _Count(now_ns)).wanted += nbytes

    def came(self, model: ModelKey, nbytes: int, now_ns: int) -> None:
        """Adds wanted bytes that came, and were right."""
        self.total_bytes += nbytes
        count = self._counts.get(model)
        if count is None:
            return
        count.fetched += nbytes
        if count.came and now_ns - count.came[-1][0] < _STEP_NS:
            moment, before = count.came[-1]
            count.came[-1] = (moment, before + nbytes)
        else:
            count.came.append((now_ns, nbytes))

    def all(self, now_ns: int) -> list[FetchProgress]:
        """Returns the progress of every version that is being fetched, or was until moments ago."""
        for model, count in list(self._counts.items()):
            last_ns = count.came[-1][0] if count.came else count.began_ns
            if count.fetched >= count.wanted and now_ns - last_ns > _IDLE_NS:
                del self._counts[model]
        return [self._of(model, count, now_ns) for model, count in self._counts.items()]

    @staticmethod
    def _of(model: ModelKey, count: _Count, now_ns: int) -> FetchProgress:
        while count.came and now_ns - count.came[0][0] > _RATE_NS:
            count.came.popleft()
        spent_ns = max(_STEP_NS, min(_RATE_NS, now_ns - count.began_ns))
        rate = sum(nbytes for _, nbytes in count.came) * 1_000_000_000 // spent_ns
        return FetchProgress(model, count.wanted, count.fetched, rate)
