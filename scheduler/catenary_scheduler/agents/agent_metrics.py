"""Metrics of how many agents are in which state."""

from __future__ import annotations

from catenary_scheduler.agents.hosting import agents_by_state
from catenary_scheduler.agents.registry import AgentRegistry
from catenary_scheduler.dispatch.availability import Availability, Impairment
from catenary_services.telemetry.metrics import Metrics


class AgentMetrics:
    """Exports the number of agents in each state, and with each impairment."""

    def __init__(self, registry: AgentRegistry, availability: Availability) -> None:
        self._registry = registry
        self._availability = availability

    def export(self, metrics: Metrics) -> None:
        """Sets the gauges of agents by state and by impairment."""
        availability = self._availability
        for state, count in agents_by_state(self._registry, availability).items():
            metrics.agents.labels(state).set(count)
        for impairment in Impairment:
            impaired = availability.impaired_by(impairment) & availability.connected_agents
            metrics.impaired_agents.labels(impairment.name.lower()).set(len(impaired))
        metrics.stragglers.set(len(availability.impaired_by(Impairment.STRAGGLING)))
