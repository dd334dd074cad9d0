"""Messages to agents: to one, or to all that are there; nobody waits until they have left."""

from __future__ import annotations

from collections.abc import Mapping

from catenary_protos.catenary.v1 import scheduler_pb2
from catenary_scheduler.agents.registry import AgentRecord
from catenary_services.domain.ids import AgentId

Message = scheduler_pb2.SchedulerToAgentMessage


class AgentSender:
    """Sends over the streams of the agents of a roster."""

    def __init__(self, roster: Mapping[AgentId, AgentRecord]) -> None:
        self._roster = roster

    def send(self, agent: AgentId, message: Message) -> None:
        """Sends to an agent, if it is there."""
        record = self._roster.get(agent)
        if record is not None and record.session is not None:
            record.session.send(message)

    def broadcast(self, message: Message) -> None:
        """Sends to every agent that is there."""
        for record in self._roster.values():
            if record.session is not None:
                record.session.send(message)
