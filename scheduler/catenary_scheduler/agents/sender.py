"""Messages to agents: to one, or to all that are there; nobody waits until they have left."""

from __future__ import annotations

from collections.abc import Mapping

from catenary_protos.catenary.v1 import scheduler_pb2
from catenary_scheduler.agents.registry import AgentState
from catenary_services.domain.ids import AgentId

Message = scheduler_pb2.SchedulerToAgentMessage


class AgentSender:
    """Sends over the streams of the agents of a registry."""

    def __init__(self, registry: Mapping[AgentId, AgentState]) -> None:
        self._registry = registry

    def send(self, agent: AgentId, message: Message) -> None:
        record = self._registry.get(agent)
        if record is not None and record.session is not None:
            record.session.send(message)

    def broadcast(self, message: Message) -> None:
        for record in self._registry.values():
            if record.session is not None:
                record.session.send(message)
