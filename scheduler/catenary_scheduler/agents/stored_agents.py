"""The agents as Redis keeps them for people and dashboards; each says itself what it holds."""

from __future__ import annotations

from collections.abc import Mapping

from catenary_scheduler.agents.registry import AgentState
from catenary_scheduler.dispatch.availability import Availability
from catenary_scheduler.storage.journal import Fields
from catenary_scheduler.storage.keys import RedisTable
from catenary_scheduler.storage.values.codec import encode_document
from catenary_services.domain.ids import AgentId


class StoredAgents:
    """The records of a registry, with the state each agent is in."""

    table = RedisTable.AGENTS

    def __init__(self, registry: Mapping[AgentId, AgentState], availability: Availability) -> None:
        self._registry = registry
        self._availability = availability

    def records(self) -> Fields:
        """Returns every agent, there or not."""
        return {
            agent: encode_document(record.stored(self._availability))
            for agent, record in self._registry.items()
        }
