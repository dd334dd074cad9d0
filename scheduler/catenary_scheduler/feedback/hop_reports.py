"""Compares how hops of batches ran with what was booked, and tells all that learn from it.

Durations to be booked are learned at once, because the next dispatch rests on them. Everything else
only feeds judgements that take seconds, so it learns several times a second, from a record of the
hops that were computed since.
"""

from __future__ import annotations

from dataclasses import dataclass

from catenary_scheduler.agents.registry import AgentRegistry
from catenary_scheduler.dispatch.events import Event, PlannedHop, StageReported
from catenary_scheduler.dispatch.pooled.booked_times import BookedTimes
from catenary_scheduler.feedback.impairment_detector import ImpairmentDetector
from catenary_scheduler.observed.profiles import MeasuredProfiles
from catenary_scheduler.observed.slowdowns import Slowdowns
from catenary_scheduler.observed.timelines import Timelines
from catenary_scheduler.observed.utilisation import Utilisation
from catenary_scheduler.storage.clock import now_ns
from catenary_services.domain.ids import AgentId, Nanoseconds
from catenary_services.telemetry.metrics import Metrics

_MOST_PENDING = 1_000
"""The learners do not wait for the next tick if this many hops were computed."""


@dataclass(slots=True)
class _ComputedHop:
    booked: PlannedHop
    size: int
    """Size of the batch, in rows or units."""
    real_ns: Nanoseconds
    reported_ns: Nanoseconds


@dataclass(frozen=True, slots=True)
class HopStatistics:
    """The statistics that follow the hops of batches."""

    slowdowns: Slowdowns
    """Learns how slow each agent is."""
    utilisation: Utilisation
    """Learns how busy each agent is."""
    times: BookedTimes
    """Learns the durations to be booked from now on."""
    profiles: MeasuredProfiles
    """Learns the times that plans are made with."""


class HopReports:
    """Passes agents' reports of hops on to all that learn from them.

    Args:
        timelines: Returns what was booked for a hop.
        learners: What learns from the hops.
        impairment_detector: Impairs agents that became slow.
        registry: The agents whose slowdown is shown.
    """

    observes = (StageReported,)

    def __init__(
        self,
        timelines: Timelines,
        learners: HopStatistics,
        impairment_detector: ImpairmentDetector,
        registry: AgentRegistry,
    ) -> None:
        self._timelines = timelines
        self._slowdowns = learners.slowdowns
        self._utilisation = learners.utilisation
        self._times = learners.times
        self._profiles = learners.profiles
        self._impairment_detector = impairment_detector
        self._registry = registry
        self._computed: list[_ComputedHop] = []
        """The hops reported since the last tick, in the order of their reports."""

    def on_event(self, event: Event, now: Nanoseconds) -> None:
        """Compares the reported duration of a hop with the booked one."""
        assert isinstance(event, StageReported)
        computed = self._timelines.reported(event)
        if computed is None:
            return
        booked, size = computed
        real_ns = event.compute_end_ns - event.compute_start_ns
        self._times.reported(booked.agent, booked.partition, size, real_ns, now)
        self._computed.append(_ComputedHop(booked, size, real_ns, now))
        if len(self._computed) >= _MOST_PENDING:
            self._learn()

    def forget(self, agent: AgentId) -> None:
        """Forgets an agent that is gone: the next one of its name may be another machine."""
        self._learn()
        self._impairment_detector.forget(agent)
        self._times.forget(agent)
        self._slowdowns.forget(agent)

    def tick(self, now: Nanoseconds) -> None:
        """Learns from the hops of late; trusts durations less that were not reported for long."""
        self._learn()
        self._times.fade(now)

    def export(self, metrics: Metrics) -> None:
        """Sets the gauge of every agent's slowdown; 0 for an agent that is not connected."""
        for agent, record in self._registry.items():
            ratio = self._slowdowns.ratio(agent, now_ns()) if record.session is not None else 0.0
            metrics.agent_slowdown.labels(agent).set(ratio)

    def _learn(self) -> None:
        computed, self._computed = self._computed, []
        for hop in computed:
            agent, partition = hop.booked.agent, hop.booked.partition
            self._utilisation.add(agent, hop.real_ns)
            self._profiles.served(agent, partition, hop.size, hop.real_ns, hop.reported_ns)
            # Agents report the time of the batch alone, not that of the step it waited for.
            booked_ns = hop.booked.duration_ns - hop.booked.steps_ns
            self._slowdowns.reported(agent, hop.real_ns, booked_ns, hop.reported_ns)
            self._impairment_detector.reported(
                agent, partition, hop.size, hop.real_ns, hop.reported_ns
            )
