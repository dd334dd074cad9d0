"""Finds the partitions that the hops of a session run on.

A hop of a route on the wire names the blocks to process, not the partition that holds them.
"""

from __future__ import annotations

from collections.abc import Iterable

from catenary_protos.catenary.v1 import common_pb2
from catenary_scheduler.agents.registry import AgentRegistry
from catenary_scheduler.inflight.sessions import LiveSessions
from catenary_scheduler.planning import Placement
from catenary_scheduler.planning.requirements import Requirements, required_by_agent
from catenary_scheduler.storage.values.stored import Hops
from catenary_services.domain.ids import AgentId, ModelKey, PartitionKey, SessionId
from catenary_services.domain.plan import ChainHop


class SessionHops:
    """Turns routes of messages into hops with partitions.

    A partition is looked up in the records of the previous scheduler, then in the plan and in what
    agents have loaded.
    """

    def __init__(self, live: LiveSessions, registry: AgentRegistry) -> None:
        self._live = live
        self._registry = registry
        self._known: tuple[Placement, dict[AgentId, Requirements]] | None = None

    def hops(
        self, session: SessionId, route: Iterable[common_pb2.Hop], placement: Placement
    ) -> Hops:
        """Returns the hops of a session.

        Args:
            session: The session.
            route: Its hops as a gateway or an agent names them.
            placement: The placement in force, or that of the previous scheduler.
        """
        noted = {(h.agent, h.first_block, h.last_block): h for h in self._live.remembered(session)}
        wanted = self._wanted(placement)
        found = []
        for hop in route:
            agent, first, last = AgentId(hop.agent_id), hop.first_block, hop.last_block
            known = noted.get((agent, first, last))
            if known is None:
                model = ModelKey(hop.model, hop.model_version)
                record = self._registry.get(agent)
                loaded = record.loaded if record is not None else {}
                keys = [*wanted.get(agent, {}), *loaded]
                known = ChainHop(agent, _containing(model, first, last, keys), first, last)
            found.append(known)
        return tuple(found)

    def _wanted(self, placement: Placement) -> dict[AgentId, Requirements]:
        """Returns what each agent is to host; cached, as every session asks after a fail-over."""
        if self._known is None or self._known[0] is not placement:
            self._known = placement, required_by_agent(placement)
        return self._known[1]


def _containing(
    model: ModelKey, first: int, last: int, keys: Iterable[PartitionKey]
) -> PartitionKey:
    """Returns the partition that is entered at `first` and left at `last`."""
    for key in keys:
        if key.model == model and key.first_block <= first and key.last_block == last:
            return key
    return PartitionKey(model, first, last)
