"""The agents as Redis keeps them for people and dashboards; each says itself what it holds."""

from __future__ import annotations

from collections.abc import Mapping

from catenary_scheduler.agents.registry import AgentRecord
from catenary_scheduler.dispatch.availability import Availability
from catenary_scheduler.storage.journal import Fields
from catenary_scheduler.storage.keys import Table
from catenary_scheduler.storage.values.codec import encode_document
from catenary_services.domain.ids import AgentId


class StoredAgents:
    """The records of a roster, with the state each agent is in."""

    table = Table.AGENTS

    def __init__(self, roster: Mapping[AgentId, AgentRecord], availability: Availability) -> None:
        self._roster = roster
        self._availability = availability

    def records(self) -> Fields:
        """Returns every agent, there or not."""
        return {
            agent: encode_document(record.stored(self._availability))
            for agent, record in self._roster.items()
        }
