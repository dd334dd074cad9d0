"""Waiting room for requests whose model is not ready, bounded in time and in number."""

from __future__ import annotations

from collections.abc import Callable, KeysView
from dataclasses import dataclass

from catenary_scheduler.dispatch.events import RequestArrived, SessionRequested
from catenary_services.domain.ids import ModelKey, Nanoseconds, RequestId
from catenary_services.errors import Overloaded

_BEFORE_DEADLINE_NS = 100_000_000
"""A request is refused this long before its deadline, so that it learns the reason. At the deadline
it would learn only that it was too late."""

Arrival = RequestArrived | SessionRequested


@dataclass(frozen=True, slots=True)
class _Waiting:
    event: Arrival
    until_ns: Nanoseconds


class NotReadyQueue:
    """Holds arrivals in order until their model is ready, at most `capacity` of them."""

    def __init__(self, capacity: int, longest_ns: Nanoseconds) -> None:
        self._capacity = capacity
        self._longest_ns = longest_ns
        self._waiting: dict[RequestId, _Waiting] = {}
        self.requests: KeysView[RequestId] = self._waiting.keys()
        """The requests that wait, at every moment."""

    def add(self, event: Arrival, now: Nanoseconds) -> None:
        """Lets a request wait.

        Raises:
            Overloaded: The queue holds `capacity` requests already.
        """
        if len(self._waiting) >= self._capacity:
            raise Overloaded(f"{self._capacity} requests wait for a model to be ready")
        until = min(event.deadline_ns - _BEFORE_DEADLINE_NS, now + self._longest_ns)
        self._waiting[event.request] = _Waiting(event, until)

    def remove(self, request: RequestId) -> None:
        """Forgets a request that waits here."""
        del self._waiting[request]

    def release(self, is_ready: Callable[[ModelKey], bool]) -> list[Arrival]:
        """Removes and returns, in order, the requests whose model is ready now."""
        ready = [entry.event for entry in self._waiting.values() if is_ready(entry.event.model)]
        for event in ready:
            del self._waiting[event.request]
        return ready

    def expire(self, now: Nanoseconds) -> list[Arrival]:
        """Removes and returns the requests that have waited as long as they may."""
        late = [entry.event for entry in self._waiting.values() if entry.until_ns <= now]
        for event in late:
            del self._waiting[event.request]
        return late

    def count(self, model: ModelKey) -> int:
        """Returns how many requests wait for one model."""
        return sum(entry.event.model == model for entry in self._waiting.values())
