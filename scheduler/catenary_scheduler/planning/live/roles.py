"""Split phase: some agents run prompts for the others.

A model's agents are divided, and chains are composed of each part by itself, for what its sessions
do there: a prompt and one token, or all tokens behind the first. Agents keep the role they had;
beyond that the fastest run prompts, because that is bound by computing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from catenary_scheduler.planning.chains import ChainTask, Server
from catenary_scheduler.planning.placement import ModelPlacement
from catenary_services.domain.plan import ChainRole


def divided(
    task: ChainTask, prefill_agents: int, before: ModelPlacement | None
) -> tuple[list[Server], list[Server]] | None:
    """Returns who runs prompts and who generates; None if too few are there for both.

    Args:
        task: Of the whole model.
        prefill_agents: How many run prompts; 0: none.
        before: The model's placement so far.
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
    """Returns the part of a placement that has a role; None if there is none."""
    if before is None:
        return None
    chains = tuple(chain for chain in before.chains if chain.role == role)
    used = {hop.host for chain in chains for hop in chain.hops}
    hosts = tuple(host for host in before.hosts if host.host in used)
    return replace(before, chains=chains, hosts=hosts) if chains else None


def joined_roles(placements: Iterable[ModelPlacement]) -> tuple[ModelPlacement, ...]:
    """Returns one placement per model, with the chains of all its roles."""
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
