"""What a plan survives: whose loss leaves a model without a complete pipeline or chain."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from catenary_services.domain.ids import AgentId, ServerId
from catenary_services.domain.plan import ChainHop, ModelPlan


@dataclass(frozen=True, slots=True)
class LossSurvival:
    """The single losses that would leave one model unserved."""

    agents: tuple[AgentId, ...]
    """Each of these agents alone; empty if the loss of any one agent is survived."""
    servers: tuple[ServerId, ...]
    """Each of these servers, with all its agents; empty if any one may be lost."""

    def in_words(self) -> str:
        """Returns one sentence without its full stop."""
        if self.agents:
            return f"does not survive the loss of {_listed(self.agents)}"
        if self.servers:
            return f"survives the loss of any one agent, not that of server {_listed(self.servers)}"
        return "survives the loss of any one agent, and of any one server"

    @property
    def is_fragile(self) -> bool:
        """True if the loss of one agent is enough to leave the model unserved."""
        return bool(self.agents)


def survival_of(model: ModelPlan, servers: Mapping[AgentId, ServerId]) -> LossSurvival:
    """Returns whose loss a model of a plan would not survive.

    Args:
        model: Its pipelines, or chains.
        servers: The server of each agent, as far as it is known.
    """
    agents = sorted(_agents_of(model))
    by_server: dict[ServerId, set[AgentId]] = {}
    for agent in agents:
        if agent in servers:
            by_server.setdefault(servers[agent], set()).add(agent)
    return LossSurvival(
        tuple(agent for agent in agents if not is_served_without(model, {agent})),
        tuple(
            server
            for server, lost in sorted(by_server.items())
            if not is_served_without(model, lost)
        ),
    )


def is_served_without(model: ModelPlan, lost: set[AgentId]) -> bool:
    """True if a pipeline has a member left in every pool, or a chain has lost no hop.

    Chains that only run prompts count together with those that only generate.
    """
    if any(
        all(not lost.issuperset(stage.agents) for stage in pipeline.stages)
        for pipeline in model.pipelines
    ):
        return True
    roles = {chain.role for chain in model.chains if _is_whole(chain.hops, lost)}
    return "mixed" in roles or {"prefill", "decode"} <= roles


def _is_whole(hops: Iterable[ChainHop], lost: set[AgentId]) -> bool:
    return all(hop.agent not in lost for hop in hops)


def _agents_of(model: ModelPlan) -> set[AgentId]:
    pools = {a for pipeline in model.pipelines for stage in pipeline.stages for a in stage.agents}
    return pools | {hop.agent for chain in model.chains for hop in chain.hops}


def _listed(names: Iterable[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} or {last}" if most else last
