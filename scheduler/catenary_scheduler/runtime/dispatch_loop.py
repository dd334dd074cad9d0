"""Drives the dispatcher: feeds it events and its own wake-ups, hands its commands on at once.

Everything here is synchronous: a request that arrives in a packed message is decided, and its
dispatch queued on the way out, before the next message is looked at. No tasks, no queues.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from catenary_scheduler.dispatch.events import (
    Command,
    Dispatcher,
    Event,
    RequestArrived,
    SessionRequested,
    Tick,
)
from catenary_scheduler.storage.clock import now_ns
from catenary_scheduler.wire.messages import rejection
from catenary_services.domain.ids import NANOSECONDS_PER_SECOND, Nanoseconds
from catenary_services.errors import InternalError
from catenary_services.log import get_logger
from catenary_services.telemetry.metrics import Metrics

_SHORTEST_SLEEP_NS = 100_000
"""A dispatcher that asks to be woken in the past must not keep the loop from its sockets."""

_log = get_logger(__name__)
Route = Callable[[Command, Nanoseconds], None]


class DispatchLoop:
    """One dispatcher on one event loop."""

    def __init__(self, dispatcher: Dispatcher, route: Route, metrics: Metrics) -> None:
        self._dispatcher = dispatcher
        self._route = route
        self._observe = metrics.dispatch_seconds.observe
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ns: Nanoseconds = 0
        self._rearming = False
        self._closed = False

    def feed(self, event: Event, now: Nanoseconds, route: Route | None = None) -> None:
        """Gives one event to the dispatcher and carries out what it asks for.

        Args:
            event: What happened.
            now: The moment it is handled.
            route: Where commands go instead of the usual way, if anywhere else.
        """
        if self._closed:
            return
        try:
            commands = self._dispatcher.handle(event, now)
        except Exception:
            # A bug, but one of a single event: the others of this session must not suffer.
            _log.error("dispatcher_failed", event_kind=type(event).__name__, exc_info=True)
            self._refuse(event, now)
            return
        self._observe((now_ns() - now) / NANOSECONDS_PER_SECOND)
        carry_out = route or self._route
        for command in commands:
            try:
                carry_out(command, now)
            except Exception:
                # What one peer is not told must not keep others from being told theirs.
                _log.error("command_failed", kind=type(command).__name__, exc_info=True)
        if not self._rearming:  # once for all the events of a packed message
            self._rearming = True
            self._loop.call_soon(self._rearm)

    def close(self) -> None:
        """Stops the timer; later events are ignored."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()

    def _refuse(self, event: Event, now: Nanoseconds) -> None:
        if isinstance(event, RequestArrived | SessionRequested):
            text = "the scheduler could not handle this request"
            self._route(rejection(event.request, InternalError.reason, text), now)

    def _rearm(self) -> None:
        self._rearming = False
        wakeup = None if self._closed else self._dispatcher.next_wakeup()
        if wakeup is None:
            return
        if self._timer is not None:
            if self._timer_ns <= wakeup:
                return  # too early does no harm: `_wake` sleeps on
            self._timer.cancel()
        self._timer_ns = wakeup
        delay_ns = max(_SHORTEST_SLEEP_NS, wakeup - now_ns())
        self._timer = self._loop.call_later(delay_ns / NANOSECONDS_PER_SECOND, self._wake)

    def _wake(self) -> None:
        self._timer = None
        now, wakeup = now_ns(), self._dispatcher.next_wakeup()
        if wakeup is not None and wakeup <= now:
            self.feed(Tick(), now)
        else:
            self._rearm()
