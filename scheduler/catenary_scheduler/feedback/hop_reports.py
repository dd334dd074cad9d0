"""Compares how hops of batches ran with what was booked, and tells all that learn from it."""

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
    """Passes agents' reports of hops on to all that learn from them.

    Args:
        timelines: Returns what was booked for a hop.
        slowdowns: Learns how slow each agent is.
        times: Learns the durations to be booked from now on.
        impairment_detector: Impairs agents that became slow.
        registry: The agents whose slowdown is shown.
    """

    observes = (StageReported,)

    def __init__(
        self,
        timelines: Timelines,
        slowdowns: Slowdowns,
        times: BookedTimes,
        impairment_detector: ImpairmentDetector,
        registry: AgentRegistry,
    ) -> None:
        self._timelines = timelines
        self._slowdowns = slowdowns
        self._times = times
        self._impairment_detector = impairment_detector
        self._registry = registry

    def on_event(self, event: Event, now: Nanoseconds) -> None:
        """Compares the reported duration of a hop with the booked one."""
        assert isinstance(event, StageReported)
        booked = self._timelines.reported(event)
        if booked is not None:
            real_ns = event.compute_end_ns - event.compute_start_ns
            self._slowdowns.reported(booked.agent, real_ns, booked.duration_ns, now)
            rows = self._timelines.rows_of(event.batch)
            self._times.reported(booked.agent, booked.partition, rows, real_ns, now)
            self._impairment_detector.reported(booked.agent, booked.partition, rows, real_ns)

    def forget(self, agent: AgentId) -> None:
        """Forgets an agent that is gone: the next one of its name may be another machine."""
        self._impairment_detector.forget(agent)
        self._times.forget(agent)
        self._slowdowns.forget(agent)

    def tick(self, now: Nanoseconds) -> None:
        """Trusts durations less that were not reported for a while."""
        self._times.fade(now)

    def export(self, metrics: Metrics) -> None:
        """Sets the gauge of every agent's slowdown; 0 for an agent that is not connected."""
        for agent, record in self._registry.items():
            ratio = self._slowdowns.ratio(agent, now_ns()) if record.session is not None else 0.0
            metrics.agent_slowdown.labels(agent).set(ratio)
