"""How hops of batches really ran beside what was booked, told to whoever learns from it."""

from __future__ import annotations

from catenary_scheduler.agents.registry import AgentRegistry
from catenary_scheduler.dispatch.events import Event, StageReported
from catenary_scheduler.dispatch.pooled.booked_times import BookedTimes
from catenary_scheduler.feedback.impairment_detector import ImpairmentDetector
from catenary_scheduler.observed.slowdowns import Slowdowns
from catenary_scheduler.observed.timelines import Timelines
from catenary_scheduler.storage.clock import now_ns
from catenary_services.domain.ids import AgentId, Nanoseconds
from catenary_services.telemetry.metrics import Metrics


class HopReports:
    """Follows the reports of agents.

    Args:
        timelines: Knows what was booked.
        slowdowns: Learns how slow each agent is.
        times: Learns what is to be booked from now on.
        slow_and_silent: Sets agents aside that became slow.
        registry: The agents whose slowdown is shown.
    """

    observes = (StageReported,)

    def __init__(
        self,
        timelines: Timelines,
        slowdowns: Slowdowns,
        times: BookedTimes,
        slow_and_silent: ImpairmentDetector,
        registry: AgentRegistry,
    ) -> None:
        self._timelines = timelines
        self._slowdowns = slowdowns
        self._times = times
        self._slow_and_silent = slow_and_silent
        self._registry = registry

    def on_event(self, event: Event, now: Nanoseconds) -> None:
        """Notes how a hop really ran."""
        assert isinstance(event, StageReported)
        booked = self._timelines.reported(event)
        if booked is not None:
            real_ns = event.compute_end_ns - event.compute_start_ns
            self._slowdowns.reported(booked.agent, real_ns, booked.duration_ns, now)
            rows = self._timelines.rows_of(event.batch)
            self._times.reported(booked.agent, booked.partition, rows, real_ns, now)
            self._slow_and_silent.reported(booked.agent, booked.partition, rows, real_ns)

    def forget(self, agent: AgentId) -> None:
        """An agent is gone; whoever comes by its name may be another."""
        self._slow_and_silent.forget(agent)
        self._times.forget(agent)
        self._slowdowns.forget(agent)

    def tick(self, now: Nanoseconds) -> None:
        """Believes less of what was not reported for a while."""
        self._times.fade(now)

    def export(self, metrics: Metrics) -> None:
        """Shows how slow each agent is."""
        for agent, record in self._registry.items():
            ratio = self._slowdowns.ratio(agent, now_ns()) if record.session is not None else 0.0
            metrics.agent_slowdown.labels(agent).set(ratio)
