"""Drives the dispatcher: feeds it events and wake-ups, and carries out its commands at once.

Everything here is synchronous. A request that arrives in a packed message is decided on, and its
dispatch is queued for sending, before the next message is read. There are no tasks and no queues.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Protocol

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

_SHORTEST_SLEEP_NS = 1_000_000
"""Shortest sleep in nanoseconds, and the resolution of the event loop's timers. A shorter sleep
ends at once, so that the loop would turn again and again until the moment has come."""
_DECISION_WEIGHT = 1 / 64
"""Weight of the latest decision in the mean time of decisions."""
_EARLY_NS = _SHORTEST_SLEEP_NS // 2
"""A moment that is at most this far away when a sleep ends has come."""

_log = get_logger(__name__)
Route = Callable[[Command, Nanoseconds], None]
Handler = Callable[[Event, Nanoseconds], None]


class EventObserver(Protocol):
    """A part that follows events beside the dispatcher."""

    @property
    def observes(self) -> tuple[type[Event], ...]:
        """The kinds of events that the observer is told of."""
        ...

    def on_event(self, event: Event, now: Nanoseconds) -> None:
        """Handles an event of one of the observed kinds."""
        ...


class DispatchLoop:
    """Runs one dispatcher on one event loop, and tells observers of its events."""

    def __init__(self, dispatcher: Dispatcher, route: Route, metrics: Metrics) -> None:
        self._dispatcher = dispatcher
        self._route = route
        self._before: dict[type[Event], tuple[Handler, ...]] = {}
        self._after: dict[type[Event], tuple[Handler, ...]] = {}
        self._fed: Callable[[], object] = lambda: None
        self._observe_seconds = metrics.dispatch_seconds.observe
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ns: Nanoseconds = 0
        self._now: Nanoseconds = 0
        """The latest moment the dispatcher was told of; a later event never tells it an earlier
        one."""
        self._closed = False
        self.decision_ns = 0.0
        """Mean time that a decision on a request took of late; 0 before the first."""

    def observe(
        self,
        *,
        before: Iterable[EventObserver] = (),
        after: Iterable[EventObserver] = (),
        fed: Callable[[], object] = lambda: None,
    ) -> None:
        """Replaces the observers; each list is called in its order.

        Args:
            before: Observers that are told before the dispatcher decides.
            after: Observers that are told once the dispatcher's commands are carried out.
            fed: Called after every event, and after every wake-up of the loop itself.
        """
        self._before = _by_kind(before)
        self._after = _by_kind(after)
        self._fed = fed

    def feed(self, event: Event, now: Nanoseconds) -> None:
        """Gives one event to observers and dispatcher, and carries out the dispatcher's commands.

        Args:
            event: The event.
            now: The time at which it is handled.
        """
        kind = type(event)
        for on_event in self._before.get(kind, ()):
            on_event(event, now)
        self._dispatch(event, now)
        for on_event in self._after.get(kind, ()):
            on_event(event, now)
        self._fed()
        self._rearm(self._dispatcher.next_wakeup())

    def close(self) -> None:
        """Stops the timer; the dispatcher is given no later event."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()

    def _dispatch(self, event: Event, now: Nanoseconds) -> None:
        if self._closed:
            return
        self._now = now = max(now, self._now)
        began = now_ns()
        try:
            commands = self._dispatcher.handle(event, now)
        except Exception:
            # A bug, but in the handling of a single event: all other requests must go on.
            _log.error("dispatcher_failed", event_kind=type(event).__name__, exc_info=True)
            self._refuse(event, now)
            return
        taken_ns = now_ns() - began
        self._observe_seconds(taken_ns / NANOSECONDS_PER_SECOND)
        if isinstance(event, RequestArrived | SessionRequested):
            known_ns = self.decision_ns or taken_ns
            self.decision_ns = known_ns + _DECISION_WEIGHT * (taken_ns - known_ns)
        for command in commands:
            try:
                self._route(command, now)
            except Exception:
                # A command that fails for one peer must not keep the others from theirs.
                kind, cause = type(command).__name__, getattr(command, "cause", 0)
                _log.error("command_failed", kind=kind, cause=cause, exc_info=True)

    def _refuse(self, event: Event, now: Nanoseconds) -> None:
        if isinstance(event, RequestArrived | SessionRequested):
            text = "the scheduler could not handle this request"
            self._route(rejection(event.request, InternalError.reason, text), now)

    def _rearm(self, wakeup: Nanoseconds | None) -> None:
        """Sets the timer to the moment at which the dispatcher is to be woken; None: at none."""
        if wakeup is None or self._closed:
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
        if wakeup is not None and wakeup <= now + _EARLY_NS:
            self._dispatch(Tick(), max(now, wakeup))
            self._fed()  # batches that waited for rows are reserved here
            wakeup = self._dispatcher.next_wakeup()
        self._rearm(wakeup)


def _by_kind(observers: Iterable[EventObserver]) -> dict[type[Event], tuple[Handler, ...]]:
    """Returns the handlers of each kind of event, so that an event costs one look-up."""
    found: dict[type[Event], list[Handler]] = {}
    for observer in observers:
        for kind in observer.observes:
            found.setdefault(kind, []).append(observer.on_event)
    return {kind: tuple(handlers) for kind, handlers in found.items()}
