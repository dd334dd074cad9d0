"""How many agents are in which state, as metrics."""

from __future__ import annotations

from catenary_scheduler.agents.hosting import agents_by_state
from catenary_scheduler.agents.registry import AgentRegistry
from catenary_scheduler.dispatch.availability import Availability, Impairment
from catenary_services.telemetry.metrics import Metrics


class AgentMetrics:
    """Exports the agents of a registry by state, and by what speaks against giving them work."""

    def __init__(self, registry: AgentRegistry, availability: Availability) -> None:
        self._registry = registry
        self._availability = availability

    def export(self, metrics: Metrics) -> None:
        """Shows them."""
        availability = self._availability
        for state, count in agents_by_state(self._registry, availability).items():
            metrics.agents.labels(state).set(count)
        for impairment in Impairment:
            impaired = availability.impaired_by(impairment) & availability.connected_agents
            metrics.impaired_agents.labels(impairment.name.lower()).set(len(impaired))
        metrics.stragglers.set(len(availability.impaired_by(Impairment.STRAGGLING)))
