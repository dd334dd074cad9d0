"""Split phase, in which some agents run prompts for the others.

The agents of a model are divided, and chains are composed from each part separately for the work of
sessions there: a prompt and one token, or all tokens after the first. Agents keep the role they
had. Otherwise those that are fastest at prompts run them, because that is compute-bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

from catenary_scheduler.planning.chains import ChainTask, Server
from catenary_scheduler.planning.placement import ModelPlacement
from catenary_services.domain.plan import ChainRole


def divided(
    task: ChainTask, prefill_agents: int, before: ModelPlacement | None
) -> tuple[list[Server], list[Server]] | None:
    """Returns the servers that run prompts and those that generate.

    Returns None if there are too few for both.

    Args:
        task: The task of the whole model, with the times of prompts.
        prefill_agents: Number of servers that run prompts; 0 for none.
        before: The present placement of the model; None if there is none.
    """
    if not 0 < prefill_agents < len(task.servers):
        return None
    rank: dict[str, int] = {}
    for chain in before.chains if before is not None else ():
        for hop in chain.hops:
            rank[str(hop.agent)] = {"prefill": 0, "mixed": 1, "decode": 2}[chain.role]
    order = sorted(task.servers, key=lambda s: (rank.get(s.name, 1), s.block_s, s.name))
    chosen = {server.name for server in order[:prefill_agents]}
    first = [server for server in task.servers if server.name in chosen]
    return first, [server for server in task.servers if server.name not in chosen]


def of_role(before: ModelPlacement | None, role: ChainRole) -> ModelPlacement | None:
    """Returns the part of a placement whose chains have a role; None if there is none."""
    if before is None:
        return None
    chains = tuple(chain for chain in before.chains if chain.role == role)
    used = {hop.host for chain in chains for hop in chain.hops}
    hosts = tuple(host for host in before.hosts if host.host in used)
    return replace(before, chains=chains, hosts=hosts) if chains else None


def of_agents(before: ModelPlacement | None, agents: AbstractSet[str]) -> ModelPlacement | None:
    """Returns the part of a placement whose chains lead over given agents; None if there is none.

    Args:
        before: The placement; None if there is none.
        agents: The names of the agents.
    """
    if before is None:
        return None
    chains = tuple(
        chain for chain in before.chains if all(hop.agent in agents for hop in chain.hops)
    )
    hosts = tuple(host for host in before.hosts if host.agent in agents)
    return replace(before, chains=chains, hosts=hosts) if chains else None


def joined_roles(placements: Iterable[ModelPlacement]) -> tuple[ModelPlacement, ...]:
    """Returns one placement per model, with the chains and hosts of all its roles."""
    models: dict[object, list[ModelPlacement]] = {}
    for placement in placements:
        models.setdefault(placement.model, []).append(placement)
    return tuple(_joined(parts) for parts in models.values())


def _joined(parts: Sequence[ModelPlacement]) -> ModelPlacement:
    first = parts[0]
    if len(parts) == 1:
        return first
    return replace(
        first,
        chains=tuple(chain for part in parts for chain in part.chains),
        hosts=tuple(host for part in parts for host in part.hosts),
    )
