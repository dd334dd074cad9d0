"""Learns how much of a worker may be used from the outcome of sessions.

The paper fixes theta by hand; a value that suits one model fails another. Here sessions that end
say whether they met their objectives, and theta follows, in small steps, within bounds, and not
again before enough sessions have ended since:

* If too many missed them and few were placed by force, estimates are too good, so less may be used.
* If too many missed them and many were placed by force, the cluster is full, and holding sessions
  back only makes more of them wait until they must be forced: more may be used.
* If attainment is safely above its target, theta returns towards the value that suits exact
  estimates.

The same figures tell whether sessions may be packed onto few workers.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AdaptationConfig:
    """Parameters of the adaptation of theta.

    Attributes:
        target: Share of sessions that should meet their objectives.
        theta: Initial value, and the one it returns to while all is well.
        least_theta: Lower bound of theta.
        step: Size of one change of theta.
        window: Number of the latest sessions that count.
        interval: Number of sessions that end between two changes.
        forced_share: The cluster counts as full from this share of forced placements on.
    """

    target: float = 0.99
    theta: float = 1.0
    least_theta: float = 0.6
    step: float = 0.05
    window: int = 400
    interval: int = 100
    forced_share: float = 0.02


class Adaptation:
    """Attainment of one model's sessions, and the theta that follows from it.

    Attributes:
        theta: Share of b and d that may be used.
    """

    def __init__(self, config: AdaptationConfig | None = None) -> None:
        self.config = config or AdaptationConfig()
        self.theta = self.config.theta
        self._ended: deque[tuple[bool, bool]] = deque()
        """Sessions of the window: whether each met its objectives, and whether it was forced."""
        self._attained = 0
        self._forced = 0
        self._since_change = 0

    @property
    def samples(self) -> int:
        """Number of sessions in the window."""
        return len(self._ended)

    @property
    def attainment(self) -> float:
        """Share of these sessions that met their objectives; 1 if there are none."""
        return self._attained / len(self._ended) if self._ended else 1.0

    @property
    def is_safe(self) -> bool:
        """True if attainment exceeds its target by half the distance to 1, on enough sessions."""
        config = self.config
        enough = len(self._ended) >= config.window // 2
        return enough and self.attainment >= (1.0 + config.target) / 2

    def ended(self, *, attained: bool, forced: bool) -> None:
        """Counts a session with objectives that has ended."""
        self._ended.append((attained, forced))
        self._attained += attained
        self._forced += forced
        if len(self._ended) > self.config.window:
            before, was_forced = self._ended.popleft()
            self._attained -= before
            self._forced -= was_forced
        self._since_change += 1
        if self._since_change >= self.config.interval:
            self._change()

    def _change(self) -> None:
        config = self.config
        theta = self.theta
        if self.attainment < config.target:
            is_full = self._forced > config.forced_share * len(self._ended)
            theta += config.step if is_full else -config.step
        elif self.is_safe:
            theta += config.step
        theta = min(config.theta, max(config.least_theta, theta))
        if theta != self.theta:
            self.theta = theta
            self._since_change = 0
