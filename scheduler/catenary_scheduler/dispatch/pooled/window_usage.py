"""Usage of dispatch windows: which models have use for one.

A window pays if several batches go by it. So a model gets one once its requests come one soon
after the other, and all from one gateway. After one that was hardly used there is a pause, which
becomes longer each time, until one is used again. Windows themselves are all of one length: the
answer to the request that it came with takes some of it, and a shorter one would be over by then.
"""

from __future__ import annotations

from catenary_services.domain.ids import GatewayId, ModelKey, Nanoseconds

_STREAK = 3
"""Requests of one gateway that follow each other before the first window."""
_FIRST_PAUSE_WINDOWS = 1
"""The first pause after a window without use lasts as long as this many windows. It is short: a
process that was not given the CPU for a moment looks the same."""
_CONTENDED_WINDOWS = 10
"""The pause after others wanted the time of a window."""
_LONGEST_PAUSE_WINDOWS = 160
_QUIET_WINDOWS = 5
"""A model is quiet without a request for as long as this many windows."""


class _ModelUsage:
    """The latest requests of a model, and how its windows were used."""

    __slots__ = ("gateway", "last_ns", "pause_ns", "paused_until_ns", "streak")

    def __init__(self, gateway: GatewayId, pause_ns: Nanoseconds) -> None:
        self.gateway = gateway
        self.last_ns: Nanoseconds = 0
        self.pause_ns = pause_ns
        """The pause after the next window that is not used."""
        self.paused_until_ns: Nanoseconds = 0
        self.streak = 0
        """Number of requests of this gateway in a row, none long after the one before it."""


class WindowUsage:
    """The usage of windows by every model."""

    def __init__(self, length_ns: Nanoseconds) -> None:
        """Counts in windows of `length_ns`."""
        self._length_ns = length_ns
        self._models: dict[ModelKey, _ModelUsage] = {}

    def arrived(self, model: ModelKey, gateway: GatewayId, now: Nanoseconds) -> None:
        """Notes a request that a gateway asks the scheduler for, or sent by a window."""
        usage = self._models.get(model)
        if usage is None:
            pause = _FIRST_PAUSE_WINDOWS * self._length_ns
            usage = self._models[model] = _ModelUsage(gateway, pause)
        if usage.gateway != gateway or now - usage.last_ns > self._length_ns:
            usage.gateway = gateway
            usage.streak = 0
        usage.streak += 1
        usage.last_ns = now

    def is_wanted(self, model: ModelKey, gateway: GatewayId, now: Nanoseconds) -> bool:
        """Returns True if a window for a model would pay for a gateway."""
        usage = self._models.get(model)
        if usage is None or usage.gateway != gateway or now < usage.paused_until_ns:
            return False
        return usage.streak >= _STREAK

    def is_quiet(self, model: ModelKey, now: Nanoseconds) -> bool:
        """Returns True if a model has had no request for a while."""
        usage = self._models.get(model)
        return usage is None or now - usage.last_ns > _QUIET_WINDOWS * self._length_ns

    def used(self, model: ModelKey) -> None:
        """Notes that a window was used: the next pause is a short one again."""
        usage = self._models.get(model)
        if usage is not None:
            usage.pause_ns = _FIRST_PAUSE_WINDOWS * self._length_ns

    def unused(self, model: ModelKey, now: Nanoseconds) -> None:
        """Notes that little of a window was used: the next one comes later."""
        usage = self._models.get(model)
        if usage is not None:
            usage.paused_until_ns = now + usage.pause_ns
            usage.pause_ns = min(_LONGEST_PAUSE_WINDOWS * self._length_ns, 2 * usage.pause_ns)

    def contended(self, model: ModelKey, now: Nanoseconds) -> None:
        """Notes that others wanted the time of a window: the model gets none for a while."""
        usage = self._models.get(model)
        if usage is not None:
            usage.paused_until_ns = now + _CONTENDED_WINDOWS * self._length_ns
