"""Usage of dispatch windows: which models have use for one, and for how long.

A window pays if several batches go by it. So a model gets one once its requests come one soon
after the other, and all from one gateway. The first is as long as any: the answer to the request
that it came with takes some of it. Windows become shorter, and pause, when one was not used, and
longer again while they are.
"""

from __future__ import annotations

from catenary_services.domain.ids import GatewayId, ModelKey, Nanoseconds

_STREAK = 3
"""Requests of one gateway that follow each other before the first window."""
_LEAST_SHARE = 4
"""The shortest window is one part in so many of the longest."""
_PAUSE_WINDOWS = 10
"""A pause lasts as long as this many of the longest windows."""
_QUIET_WINDOWS = 5
"""A model is quiet without a request for as long as this many of the longest windows."""


class _ModelUsage:
    """The latest requests of a model, and how its windows were used."""

    __slots__ = ("gateway", "last_ns", "length_ns", "paused_until_ns", "streak")

    def __init__(self, gateway: GatewayId, length_ns: Nanoseconds) -> None:
        self.gateway = gateway
        self.last_ns: Nanoseconds = 0
        self.length_ns = length_ns
        self.paused_until_ns: Nanoseconds = 0
        self.streak = 0
        """Number of requests of this gateway in a row, none long after the one before it."""


class WindowUsage:
    """The usage of windows by every model."""

    def __init__(self, longest_ns: Nanoseconds) -> None:
        self._longest_ns = longest_ns
        self._models: dict[ModelKey, _ModelUsage] = {}

    def arrived(self, model: ModelKey, gateway: GatewayId, now: Nanoseconds) -> None:
        """Notes a request that a gateway asks the scheduler for, or sent by a window."""
        usage = self._models.get(model)
        if usage is None:
            usage = self._models[model] = _ModelUsage(gateway, self._longest_ns)
        if usage.gateway != gateway or now - usage.last_ns > self._longest_ns:
            usage.gateway = gateway
            usage.streak = 0
        usage.streak += 1
        usage.last_ns = now

    def length_ns(self, model: ModelKey, gateway: GatewayId, now: Nanoseconds) -> Nanoseconds:
        """Returns how long a window would pay for a gateway; 0: none would."""
        usage = self._models.get(model)
        if usage is None or usage.gateway != gateway or now < usage.paused_until_ns:
            return 0
        return usage.length_ns if usage.streak >= _STREAK else 0

    def is_quiet(self, model: ModelKey, now: Nanoseconds) -> bool:
        """Returns True if a model has had no request for a while."""
        usage = self._models.get(model)
        return usage is None or now - usage.last_ns > _QUIET_WINDOWS * self._longest_ns

    def used(self, model: ModelKey) -> None:
        """Notes that a window was used well: the next one is longer."""
        usage = self._models.get(model)
        if usage is not None:
            usage.length_ns = min(self._longest_ns, 2 * usage.length_ns)

    def unused(self, model: ModelKey, now: Nanoseconds) -> None:
        """Notes that little of a window was used: the next one comes later, and is shorter."""
        usage = self._models.get(model)
        if usage is not None:
            usage.length_ns = max(self._longest_ns // _LEAST_SHARE, usage.length_ns // 2)
            self.contended(model, now)

    def contended(self, model: ModelKey, now: Nanoseconds) -> None:
        """Notes that others wanted the time of a window: the model gets none for a while."""
        usage = self._models.get(model)
        if usage is not None:
            usage.paused_until_ns = now + _PAUSE_WINDOWS * self._longest_ns
