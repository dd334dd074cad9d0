"""Dispatchers in virtual time, and the real times of their work: CPU time of the thread."""

from __future__ import annotations

import heapq
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

from catenary_scheduler.dispatch import ChainedDispatcher, PooledDispatcher
from catenary_scheduler.dispatch.events import AgentJoined, Command, Event, PlanActivated
from catenary_services.domain.plan import Agent, Plan

DispatcherT = TypeVar("DispatcherT", ChainedDispatcher, PooledDispatcher)
_CHANGES_TAKEN = 100
"""Number of events after which changes are taken from the dispatcher, as its storage would."""


class Trial(Generic[DispatcherT]):
    """A dispatcher that serves a plan, and the events that are due."""

    def __init__(self, dispatcher: DispatcherT, agents: Sequence[Agent], plan: Plan) -> None:
        self.random = random.Random(7)
        self.dispatcher = dispatcher
        for agent in agents:
            dispatcher.handle(AgentJoined(agent), 0)
        dispatcher.handle(PlanActivated(plan), 0)
        self._events: list[tuple[int, int, Event]] = []
        self._count = 0

    def later(self, moment: int, event: Event) -> None:
        """Schedules an event for a moment of virtual time."""
        self._count += 1
        heapq.heappush(self._events, (moment, self._count, event))

    def handled(self) -> Iterator[tuple[Event, int, list[Command], float]]:
        """Yields events as they are handled: event, moment, commands, and microseconds it took."""
        clock, count = time.thread_time_ns, 0
        while self._events:
            now, _, event = heapq.heappop(self._events)
            before = clock()
            commands = self.dispatcher.handle(event, now)
            took = (clock() - before) / 1000
            self.dispatcher.next_wakeup()
            yield event, now, commands, took
            count += 1
            if count % _CHANGES_TAKEN == 0:
                self.dispatcher.take_changes()


def decision_us(dispatcher: ChainedDispatcher | PooledDispatcher) -> tuple[float, float]:
    """Returns p50 and p99 of a dispatcher's decisions, less the time to read the clock."""
    clock = time.thread_time_ns
    overhead = statistics.median(-clock() + clock() for _ in range(2000))
    times = [(taken - overhead) / 1000 for taken in dispatcher.take_decision_times()]
    return statistics.median(times), statistics.quantiles(times, n=100)[98]
