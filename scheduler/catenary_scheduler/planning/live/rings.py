"""Chains of a given number of agents, and conversion of present chains to a composition.

If an operator gives the number of agents per chain there is nothing to tune. Agents form as many
chains as possible, and each agent of a chain has as many blocks as the others, give or take one.
"""

from __future__ import annotations

import math
from fractions import Fraction

from catenary_scheduler.planning.chains import (
    ChainTask,
    ComposedChain,
    ComposedHop,
    Composition,
    HostedBlocks,
    Server,
)
from catenary_scheduler.planning.placement import ModelPlacement
from catenary_services.errors import PlanInfeasible

_Range = tuple[int, int]


def even_ranges(blocks: int, parts: int) -> list[tuple[int, int]]:
    """Returns `parts` consecutive ranges of blocks whose sizes differ by one at most.

    The shorter ones come last, because the last agent also projects to the vocabulary.
    """
    size, longer = divmod(blocks, parts)
    ends = [size * (part + 1) + min(part + 1, longer) for part in range(parts)]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def rings(
    task: ChainTask, per_chain: int, most_sessions: int, previous: Composition | None
) -> Composition:
    """Returns chains of `per_chain` agents each, or of all agents if there are fewer.

    Agents that already host one of the ranges keep it. Agents that are left over host nothing.

    Raises:
        PlanInfeasible: Too few agents have room for their blocks and one session.
    """
    length = min(per_chain, len(task.servers), task.blocks)
    ranges = even_ranges(task.blocks, max(1, length))
    largest = ranges[0][1]
    able = [server for server in task.servers if _sessions(task, server, largest) >= 1]
    if len(able) < length or not able:
        raise PlanInfeasible(
            f"a chain of {length} agents needs room for {largest} blocks and a session's caches on"
            f" each; {len(able)} of {len(task.servers)} have it"
        )
    chains = sorted(
        (_ring(task, row, ranges, most_sessions) for row in _assigned(able, ranges, previous)),
        key=lambda chain: chain.service_s,
    )
    hosted = [
        HostedBlocks(hop.server, hop.first_block, hop.blocks, chain.capacity * hop.blocks)
        for chain in chains
        for hop in chain.hops
    ]
    return Composition(
        most_sessions,
        tuple(hosted),
        tuple(chains),
        float(task.rate_per_s),
        len(chains),
        moved_blocks=_moved(hosted, previous),
    )


def _ring(
    task: ChainTask, row: list[Server], ranges: list[_Range], most_sessions: int
) -> ComposedChain:
    pairs = list(zip(row, ranges, strict=True))
    capacity = min(_sessions(task, server, last - first) for server, (first, last) in pairs)
    service_s = math.fsum(
        float(server.communication_s) + float(server.block_s) * (last - first)
        for server, (first, last) in pairs
    )
    hops = tuple(ComposedHop(server.name, first, last) for server, (first, last) in pairs)
    return ComposedChain(hops, min(capacity, most_sessions), service_s)


def composition_of(model: ModelPlacement, arrivals_per_s: float) -> Composition | None:
    """Returns the chains of a placement in the planner's terms; None if it has none.

    The planner counts sessions of full length, so of oversubscribed slots only those that memory
    holds count.
    """
    if not model.chains:
        return None
    most = max(1, model.session_tokens)
    # While a change is under way an agent may host two ranges. The planner knows one of them.
    ranges = {str(host.agent): host for host in model.hosts}
    hosted = tuple(
        HostedBlocks(
            name,
            host.first_block,
            host.last_block - host.first_block,
            max(1, host.cache_tokens // most) if host.cache_tokens else host.block_slots,
        )
        for name, host in ranges.items()
    )
    chains = tuple(
        ComposedChain(
            tuple(ComposedHop(str(hop.agent), hop.entry, hop.last_block) for hop in chain.hops),
            max(1, chain.cache_tokens // most) if chain.cache_tokens else chain.capacity,
            1.0,
        )
        for chain in model.chains
    )
    c = max(1, min(host.slots // max(1, host.blocks) for host in hosted))
    return Composition(c, hosted, chains, arrivals_per_s, len(chains))


def _sessions(task: ChainTask, server: Server, blocks: int) -> int:
    """Returns how many sessions an agent with `blocks` blocks has room for (eq. 8)."""
    block, cache = task.memory_at(server)
    left = Fraction(server.memory) - blocks * block
    return math.floor(left / (blocks * cache)) if left > 0 else 0


def _assigned(
    servers: list[Server], ranges: list[_Range], previous: Composition | None
) -> list[list[Server]]:
    """Returns one row of servers per chain. A server that already hosts a range gets it again."""
    rows: list[list[Server | None]] = [
        [None] * len(ranges) for _ in range(len(servers) // len(ranges))
    ]
    had = {host.server: (host.first_block, host.last_block) for host in _hosted(previous)}
    free = []
    for server in servers:
        mine = had.get(server.name)
        at = ranges.index(mine) if mine in ranges else -1
        row = next((row for row in rows if at >= 0 and row[at] is None), None)
        if row is None:
            free.append(server)
        else:
            row[at] = server
    rest = iter(free)
    return [[server or next(rest) for server in row] for row in rows]


def _moved(hosted: list[HostedBlocks], previous: Composition | None) -> int:
    """Returns how many blocks have to be loaded by agents that hosted some before."""
    had = {h.server: set(range(h.first_block, h.last_block)) for h in _hosted(previous)}
    return sum(
        len(set(range(host.first_block, host.last_block)) - had[host.server])
        for host in hosted
        if host.server in had
    )


def _hosted(previous: Composition | None) -> tuple[HostedBlocks, ...]:
    return previous.hosted if previous is not None else ()
