"""Latency lines of any chain of one model in a cluster, from what is known at the moment."""

from __future__ import annotations

from collections.abc import Sequence

from catenary_scheduler.planning.latency.hops import HOP_NS, HopCost, chain_lines
from catenary_scheduler.planning.live.generation import GenerationTimes
from catenary_scheduler.planning.live.links import NO_LINKS, ServerLinks
from catenary_services.domain.decoder import DecoderTable
from catenary_services.domain.ids import NANOSECONDS_PER_SECOND, AgentId, ModelKey, PartitionKey
from catenary_services.domain.latency import LatencyLines
from catenary_services.domain.plan import Agent, ChainHop

_HIDDEN_VALUE_BYTES = 4


class ClusterLines:
    """Estimator of the latency lines of chains of one model.

    The cost of a hop is what its agent measured for the very partition, or else for another range
    of the model, in proportion to the blocks. The last norm and the projection count as blocks in
    proportion to their size. An agent that measured nothing gets the cost of the slowest agent of
    its device class, or else of the slowest of all. If nothing was measured, nothing is known,
    because a guess must not turn requests away. To what frames usually take comes by how much the
    ways between agents were measured to be longer than in one place.
    """

    def __init__(  # noqa: PLR0913 - what lines depend on
        self,
        decoder: DecoderTable,
        agents: Sequence[Agent],
        costs: GenerationTimes,
        model: ModelKey,
        hop_ns: float = HOP_NS,
        precision: str = "fp32",
        *,
        links: ServerLinks = NO_LINKS,
    ) -> None:
        self._decoder = decoder
        self._precision = precision
        self._hop_ns = hop_ns
        self._links = links
        self._agents = {agent.agent_id: agent for agent in agents}
        self._sources: dict[AgentId, list[PartitionKey]] = {}
        for agent, key in sorted(costs, key=lambda each: (each[0], each[1].first_block)):
            if key.model == model and _is_known(costs[agent, key].decode(1)):
                self._sources.setdefault(agent, []).append(key)
        self._costs = costs

    def lines(self, hops: Sequence[ChainHop]) -> LatencyLines | None:
        """Returns the latency lines of a chain; None if nothing is known about one of its hops."""
        costs = [
            self._cost(hop, self._link(hops[number - 1], hop, has_rows=number > 0))
            for number, hop in enumerate(hops)
        ]
        known = [cost for cost in costs if cost is not None]
        return chain_lines(known, self._hop_ns) if known and len(known) == len(costs) else None

    def _cost(self, hop: ChainHop, link: tuple[int, float]) -> HopCost | None:
        source = self._source(hop)
        if source is None:
            return None
        agent, key = source
        whole = self._weight(agent, key.first_block, key.last_block)
        share = self._weight(agent, hop.first_block, hop.last_block) / whole
        rate, longer_ns = link
        row_bytes = self._decoder.hidden_size * _HIDDEN_VALUE_BYTES
        row_ns = row_bytes * NANOSECONDS_PER_SECOND / rate if rate else 0.0
        return HopCost(self._costs[agent, key], share, row_ns, longer_ns)

    def _link(self, before: ChainHop, hop: ChainHop, *, has_rows: bool) -> tuple[int, float]:
        """Returns the bytes per second to a hop, and by how many ns frames take longer to it.

        Only tokens come from the last hop to the first one; with `has_rows` the rows of hidden
        states come from the hop before.
        """
        sender, receiver = self._agents.get(before.agent), self._agents.get(hop.agent)
        if receiver is None:
            return 0, 0.0
        stated = receiver.link_bytes_per_second
        if sender is None:
            return stated, 0.0
        rate = self._links.rate(sender.server, receiver) if has_rows else stated
        return rate, self._links.longer_ns(sender.server, receiver.server)

    def _source(self, hop: ChainHop) -> tuple[AgentId, PartitionKey] | None:
        own = self._sources.get(hop.agent)
        if own is not None:
            return hop.agent, hop.partition if hop.partition in own else own[0]
        mine = self._agents.get(hop.agent)
        others = [(agent, key) for agent, keys in self._sources.items() for key in keys]
        alike = [
            (agent, key)
            for agent, key in others
            if mine is not None
            and agent in self._agents
            and self._agents[agent].device_class == mine.device_class
        ]
        return max(alike or others, key=self._pace, default=None)

    def _pace(self, source: tuple[AgentId, PartitionKey]) -> float:
        agent, key = source
        return self._costs[source].decode(1) / self._weight(agent, key.first_block, key.last_block)

    def _weight(self, agent: AgentId, first_block: int, last_block: int) -> float:
        """Returns the size of a range in blocks.

        The head of the model counts by its size as the agent holds it.
        """
        if last_block < self._decoder.blocks:
            return last_block - first_block
        known = self._agents.get(agent)
        held = self._decoder.held_by(known.runtime if known is not None else "", self._precision)
        return last_block - first_block + held.head_bytes / max(1, held.largest_block_bytes)


def _is_known(step_ns: float) -> bool:
    """Returns True for a measured step.

    Agents without room for a session measure nothing and report 0.
    """
    return step_ns > 0.0
