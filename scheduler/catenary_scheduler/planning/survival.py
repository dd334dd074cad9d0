"""Survival: agents and servers whose loss leaves a model without a pipeline or chain."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from catenary_scheduler.planning.chain_placement import HopPlacement
from catenary_scheduler.planning.placement import ModelPlacement
from catenary_services.domain.ids import AgentId, ServerId
from catenary_services.domain.plan import ChainHop, ModelPlan


@dataclass(frozen=True, slots=True)
class LossSurvival:
    """The agents and servers each of which would, if lost, leave one model unserved."""

    agents: tuple[AgentId, ...]
    """Agents whose loss alone leaves the model unserved; empty if any one agent may be lost."""
    servers: tuple[ServerId, ...]
    """Servers whose loss, with all their agents, leaves the model unserved; empty if any one may be
    lost."""

    def in_words(self) -> str:
        """Returns a statement about the model, without subject and full stop."""
        if self.agents:
            return f"does not survive the loss of {_listed(self.agents)}"
        if self.servers:
            return f"survives the loss of any one agent, not that of server {_listed(self.servers)}"
        return "survives the loss of any one agent, and of any one server"

    @property
    def is_fragile(self) -> bool:
        """True if the loss of a single agent is enough to leave the model unserved."""
        return bool(self.agents)


def survival_of(model: ModelPlan, servers: Mapping[AgentId, ServerId]) -> LossSurvival:
    """Returns the agents and servers whose loss a model of a plan would not survive.

    Args:
        model: The plan of the model, with its pipelines or chains.
        servers: The server of each agent. Agents that are missing count for no server.
    """
    agents = sorted(agents_of(model))
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


def is_served_without(model: ModelPlan | ModelPlacement, lost: set[AgentId]) -> bool:
    """Returns True if a pipeline has a member left in every pool, or a chain all its hops.

    Chains with separate roles count only if one that runs prompts and one that generates are left.
    """
    if any(
        all(not lost.issuperset(stage.agents) for stage in pipeline.stages)
        for pipeline in model.pipelines
    ):
        return True
    roles = {chain.role for chain in model.chains if _is_whole(chain.hops, lost)}
    return "mixed" in roles or {"prefill", "decode"} <= roles


def survives_any_agent(model: ModelPlan | ModelPlacement) -> bool:
    """Returns True if a model is served, and still is when any one of its agents is lost."""
    agents = agents_of(model)
    return bool(agents) and all(is_served_without(model, {agent}) for agent in agents)


def _is_whole(hops: Iterable[ChainHop | HopPlacement], lost: set[AgentId]) -> bool:
    return all(hop.agent not in lost for hop in hops)


def agents_of(model: ModelPlan | ModelPlacement) -> set[AgentId]:
    """Returns the agents in pipelines and chains of a model."""
    pools = {a for pipeline in model.pipelines for stage in pipeline.stages for a in stage.agents}
    return pools | {hop.agent for chain in model.chains for hop in chain.hops}


def _listed(names: Iterable[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} or {last}" if most else last
