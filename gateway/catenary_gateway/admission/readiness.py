"""The readiness of a gateway to take work, as probes report it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from catenary_gateway.catalog import Catalog


class Readiness:
    """The readiness of a gateway, which has a leader and ready models and does not drain.

    The loss of a scheduler counts only after a grace period: another takes over within it, and
    probes that flap would make the loss worse.
    """

    def __init__(self, catalog: Catalog, grace_s: float) -> None:
        self._catalog = catalog
        self._grace_s = grace_s
        self._connected = False
        self._draining = False
        self._told = False
        self._timer: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()
        self.watch: Callable[[bool], None] = lambda _: None
        """Called with the new state at every change."""
        self.reconnected: Callable[[], None] = lambda: None
        """Called when a scheduler leads this gateway again."""

    @property
    def ready(self) -> bool:
        """True if requests to every model are taken."""
        return self._connected and not self._draining and self._catalog.all_ready

    @property
    def why_not(self) -> str:
        """The reason why the gateway is not ready; empty if it is."""
        if self.ready:
            return ""
        if self._draining:
            return "draining"
        if not self._connected:
            return "no scheduler leads this gateway"
        waiting = [model for model in self._catalog.models() if not model.ready]
        if not waiting:
            return "the scheduler has not said what is served"
        return "; ".join(f"model {model.key}: {model.not_ready_reason}" for model in waiting)

    def connected(self) -> None:
        """Notes that a scheduler leads this gateway."""
        self._stop_timer()
        self._connected = True
        self.reconnected()
        self.refresh()

    def disconnected(self) -> None:
        """Notes that no scheduler leads this gateway, which counts after the grace period."""
        self._stop_timer()
        self._timer = asyncio.get_running_loop().call_later(self._grace_s, self._give_up)

    def drain(self) -> None:
        """Ends the readiness for good."""
        self._stop_timer()
        self._draining = True
        self.refresh()

    def refresh(self) -> None:
        """Calls `watch` if the readiness has changed, for instance by a new model table."""
        if self.ready != self._told:
            self._told = self.ready
            self.watch(self._told)
            self._changed.set()
            self._changed = asyncio.Event()

    async def wait(self) -> None:
        """Waits until the gateway is ready."""
        while not self.ready:
            await self._changed.wait()

    def _give_up(self) -> None:
        self._timer = None
        self._connected = False
        self.refresh()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
