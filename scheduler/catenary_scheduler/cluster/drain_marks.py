"""Keeps the marks of agents that are to be drained, across changes of leader.

The marks are in Redis; an agent that is about to stop also says so itself. An agent that an earlier
leader marked is drained as soon as the plan that was in force is resumed: by then its sessions have
been found, and move away as they would have before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from catenary_scheduler.agents.registry import AgentState, is_draining
from catenary_scheduler.cluster.controller import ClusterController
from catenary_scheduler.dispatch.availability import Availability, Impairment
from catenary_scheduler.planning import requirements
from catenary_scheduler.storage.keys import RedisTable
from catenary_services.domain.ids import AgentId
from catenary_services.log import get_logger

_log = get_logger(__name__)


class DrainMarks:
    """The drain marks of one term.

    Marks of this term are impairments. Those of an earlier leader wait here until they are due.
    """

    table = RedisTable.DRAINING

    def __init__(self, cluster: ClusterController, availability: Availability) -> None:
        self._cluster = cluster
        self._availability = availability
        self._waiting: dict[AgentId, int] = {}
        """Incarnation of each agent marked by an earlier leader; a process started since is not
        meant."""
        self._going: set[AgentId] = set()
        """Agents drained on behalf of an earlier leader, which have yet to be told that they are
        drained."""

    def restore(self, marked: Mapping[AgentId, int]) -> None:
        """Takes over the marks of an earlier leader: incarnations by agent."""
        self._waiting.update(marked)

    def records(self) -> dict[str, str | None]:
        """Returns the marks for the next leader: incarnations by agent."""
        marked: dict[str, str | None] = {
            agent: str(incarnation) for agent, incarnation in self._waiting.items()
        }
        for agent, record in self._cluster.registry.items():
            if is_draining(agent, self._availability):
                marked[agent] = str(record.incarnation)
        return marked

    def arrived(self, record: AgentState, *, says_so: bool) -> None:
        """Updates the marks when an agent connects, and perhaps says that it is to stop."""
        agent = record.agent.agent_id
        before = self._cluster.registry.get(agent)
        is_same = before is not None and before.incarnation == record.incarnation
        availability = self._availability
        was_marked = is_draining(agent, availability)
        availability.clear(agent, Impairment.DRAINING)
        if says_so or (is_same and was_marked):
            self._waiting[agent] = record.incarnation
        elif self._waiting.get(agent, record.incarnation) != record.incarnation:
            del self._waiting[agent]

    def taken_back(self, agent: AgentId) -> None:
        """Removes the mark of an agent that is to stay after all."""
        self._waiting.pop(agent, None)

    def due(self) -> list[AgentId]:
        """Removes and returns the waiting agents that can be drained now."""
        found = [agent for agent in self._waiting if self._is_due(agent)]
        for agent in found:
            del self._waiting[agent]
            self._going.add(agent)
            _log.info("draining_goes_on", agent=agent)
        return found

    def done(self, is_idle: Callable[[AgentId], bool]) -> list[AgentId]:
        """Returns the agents returned by `due` that have nothing left to do, each once."""
        self._going &= self._availability.impaired_by(Impairment.DRAINING)
        found = [agent for agent in self._going if is_idle(agent)]
        self._going.difference_update(found)
        return found

    def _is_due(self, agent: AgentId) -> bool:
        cluster = self._cluster
        record = cluster.registry.get(agent)
        if record is None or record.session is None:
            return False
        placement = cluster.restored[0] if cluster.restored is not None else None
        if placement is None and cluster.active is not None:
            placement = cluster.active.placement
        return (
            record.complete or placement is None or agent not in requirements.agents_of(placement)
        )
