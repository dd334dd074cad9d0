"""The machines of a cluster, by what its status says of their agents."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from catenary.types import AgentInfo, ClusterStatus, LinkInfo


@dataclass(frozen=True, slots=True)
class MachineInfo:
    """One machine and its agents.

    Attributes:
        address: The address, without a port, that other machines reach it at.
        models: The models, "name:version", of which it hosts all or some blocks.
        idle: Agent ids to why nothing is loaded on them.
        links: Measured links from it to other machines.
    """

    machine: str
    address: str
    agents: tuple[AgentInfo, ...]
    models: tuple[str, ...]
    idle: dict[str, str]
    links: tuple[LinkInfo, ...] = ()


def machines_of(status: ClusterStatus) -> list[MachineInfo]:
    """Returns the machines in a status, in the order of their names."""
    by_name: dict[str, list[AgentInfo]] = {}
    for agent in status.agents:
        by_name.setdefault(agent.server_id or agent.agent_id, []).append(agent)
    return [_machine(name, agents, status) for name, agents in sorted(by_name.items())]


def _machine(name: str, agents: list[AgentInfo], status: ClusterStatus) -> MachineInfo:
    parts = {part.partition("[")[0] for agent in agents for part in agent.partitions}
    return MachineInfo(
        name,
        next((agent.address for agent in agents if agent.address), ""),
        tuple(agents),
        tuple(sorted(parts)),
        {agent.agent_id: why for agent in agents if (why := idle_reason(agent, status))},
        tuple(link for link in status.links if link.source_server_id == name),
    )


def hardware_of(agents: Iterable[AgentInfo]) -> list[tuple[str, str]]:
    """Returns names of agents and what their devices are, in words; alike devices share a line."""
    alike: dict[str, list[str]] = {}
    for agent in agents:
        if agent.device_facts is not None:
            alike.setdefault(str(agent.device_facts), []).append(agent.agent_id)
    return [(", ".join(names), facts) for facts, names in alike.items()]


LINK_COLUMNS = ("FROM", "TO", "ROUND TRIP MS", "MB/S")


def links_in_rows(links: Iterable[LinkInfo]) -> list[tuple[object, ...]]:
    """Returns measured links as rows of a table with `LINK_COLUMNS`."""
    return [
        (
            link.source_server_id,
            link.target_server_id,
            link.round_trip_ns / 1e6,
            link.bytes_per_second / 1e6,
        )
        for link in links
    ]


def idle_reason(agent: AgentInfo, status: ClusterStatus) -> str:
    """Returns why nothing is loaded on an agent, in a sentence; "" if something is."""
    if agent.partitions and agent.state != "lost":
        return ""
    by_state = {"lost": "the cluster does not hear it", "draining": "it is draining"}
    if agent.state in by_state:
        return by_state[agent.state]
    if agent.impairments:
        worst = agent.impairments[0]
        what = f" {worst.partition}" if worst.partition else ""
        return f"{worst.kind.replace('_', ' ')}{what}: {worst.why}"
    if not status.models:
        return "no model is deployed"
    if agent.state == "joining":
        return "it has joined and loads what the plan gives it, or waits for a plan that uses it"
    return "the plan in force gives it nothing; `catenary plan explain` says what it goes by"
