"""The algorithms of server-chain composition word for word, in fractions, for tiny tasks.

Written from the paper alone and slow on purpose: what the planner computes must equal this.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import permutations, product

import numpy as np
from hypothesis import strategies as st

from catenary_scheduler.planning.chains import (
    ChainTask,
    ComposedChain,
    HostedBlocks,
    Server,
    gbp_cr,
)
from catenary_scheduler.planning.chains.problem import exact

Path = tuple[int, ...]


@dataclass(frozen=True)
class LiteralChain:
    """A chain by server numbers, with what it takes."""

    servers: Path
    blocks: tuple[int, ...]
    capacity: int
    service_s: Fraction


class LiteralAllocation:
    """Algorithm 2 over pairs of servers; dummies -1 (start) and -2 (end)."""

    def __init__(self, task: ChainTask, hosted: Sequence[HostedBlocks]) -> None:
        self.task = task
        self.hosted = {task.number_of[item.server]: item for item in hosted}
        self.left = {number: item.slots for number, item in self.hosted.items()}

    def _next_block(self, server: int) -> int:
        """a_i + m_i, blocks from 1."""
        if server == -1:
            return 1
        return self.hosted[server].first_block + 1 + self.hosted[server].blocks

    def processed(self, before: int, server: int) -> int:
        """m_ij."""
        return self._next_block(server) - self._next_block(before)

    def links(self) -> dict[tuple[int, int], Fraction]:
        """All feasible links with their cost."""
        found = {}
        for before in (-1, *self.hosted):
            wanted = self._next_block(before)
            if wanted == self.task.blocks + 1:
                found[before, -2] = self._return(before)
            for server, item in self.hosted.items():
                first = item.first_block + 1
                if server != before and first <= wanted <= first + item.blocks - 1:
                    link = self._communication(before, server)
                    if link is not None:
                        compute = exact(self.task.servers[server].block_s)
                        found[before, server] = link + compute * self.processed(before, server)
        return found

    def _communication(self, before: int, server: int) -> Fraction | None:
        if self.task.links is None:
            return exact(self.task.servers[server].communication_s)
        names = [None if n < 0 else self.task.servers[n].name for n in (before, server)]
        seconds = self.task.links.get((names[0], names[1]))
        return None if seconds is None else exact(seconds)

    def _return(self, server: int) -> Fraction:
        links = self.task.links or {}
        return exact(links.get((self.task.servers[server].name, None), 0))

    def paths(self, links: Mapping[tuple[int, int], Fraction]) -> Iterator[tuple[Fraction, Path]]:
        """Every path from the start to the end, by exhaustive search."""

        def walk(at: int, cost: Fraction, path: Path) -> Iterator[tuple[Fraction, Path]]:
            for (before, after), seconds in links.items():
                if before == at and after == -2:
                    yield cost + seconds, path
                elif before == at:
                    yield from walk(after, cost + seconds, (*path, after))

        yield from walk(-1, Fraction(0), ())

    def run(self) -> list[LiteralChain]:
        """Lines 1 to 12, chains of capacity 0 included; only links of the last path are tested."""
        links, chains = self.links(), []
        while True:
            found = min(((cost, len(path), path) for cost, path in self.paths(links)), default=None)
            if found is None:
                return chains
            cost, _, path = found
            hops = list(zip((-1, *path), path, strict=False))
            needs = [self.processed(*hop) for hop in hops]
            capacity = min(self.left[s] // n for s, n in zip(path, needs, strict=True))
            for server, need in zip(path, needs, strict=True):
                self.left[server] -= capacity * need
            chains.append(LiteralChain(path, tuple(needs), capacity, cost))
            for hop, need in zip(hops, needs, strict=True):
                if self.left[hop[1]] < need:
                    del links[hop]


def literal_chains(task: ChainTask, hosted: Sequence[HostedBlocks]) -> list[LiteralChain]:
    """Chains of Algorithm 2 without those nobody can use."""
    return [chain for chain in LiteralAllocation(task, hosted).run() if chain.capacity]


def as_literal(task: ChainTask, chain: ComposedChain) -> tuple[Path, tuple[int, ...], int]:
    """A chain of the planner in the same terms, for comparison."""
    servers = tuple(task.number_of[hop.server] for hop in chain.hops)
    return servers, tuple(hop.blocks for hop in chain.hops), chain.capacity


def literal_groups(task: ChainTask, c: int) -> tuple[list[list[int]], dict[int, tuple[int, int]]]:
    """Algorithm 1 in fractions: groups, and (first block from 1, blocks) per server."""
    blocks = {}
    for number, server in enumerate(task.servers):
        block = exact(task.block_memory if server.block_memory is None else server.block_memory)
        cache = exact(task.cache_memory if server.cache_memory is None else server.cache_memory)
        room = exact(server.memory) / (block + cache * c)
        blocks[number] = min(math.floor(room), task.blocks)

    def service(number: int) -> Fraction:
        server = task.servers[number]
        return exact(server.communication_s) + exact(server.block_s) * blocks[number]

    order = sorted((n for n in blocks if blocks[n]), key=lambda n: (service(n) / blocks[n], n))
    needed = exact(task.rate_per_s) / exact(task.load) / c
    groups: list[list[int]] = []
    placed, group = {}, []
    rate, wanted = Fraction(0), 1
    for number in order:
        if task.stop == "rate" and rate >= needed:
            break
        placed[number] = (min(wanted, task.blocks - blocks[number] + 1), blocks[number])
        group.append(number)
        wanted += blocks[number]
        if wanted > task.blocks:
            rate += 1 / sum(map(service, group))
            groups.append(group)
            group, wanted = [], 1
    return groups, placed


def exact_response_s(capacities: Sequence[int], rates: Sequence[float], arrivals: float) -> float:
    """Mean response under JFFC from the whole Markov chain; chains from fastest to slowest.

    While all are full, only the queue moves, so states without a queue balance among themselves as
    if arrivals at a full system were lost; the queue is geometric on top.
    """
    states = list(product(*(range(c + 1) for c in capacities)))
    number = {state: at for at, state in enumerate(states)}
    flow = np.zeros((len(states), len(states)))
    for state, at in number.items():
        free = next((k for k, z in enumerate(state) if z < capacities[k]), None)
        if free is not None:
            flow[at, number[(*state[:free], state[free] + 1, *state[free + 1 :])]] += arrivals
        for k, z in enumerate(state):
            if z:
                flow[at, number[(*state[:k], z - 1, *state[k + 1 :])]] += z * rates[k]
    balance = flow.T - np.diag(flow.sum(axis=1))
    balance[-1] = 1.0
    share = np.linalg.solve(balance, np.eye(len(states))[-1])
    load = arrivals / sum(c * mu for c, mu in zip(capacities, rates, strict=True))
    sessions = np.array([sum(state) for state in states])
    queue = share[number[tuple(capacities)]] * load / (1 - load)
    mean = share @ sessions + queue * (sum(capacities) + 1 / (1 - load))
    return float(mean / (1 + queue) / arrivals)


def decimals(least: int, most: int, places: int = 1) -> st.SearchStrategy[float]:
    """Floats that print with so many places, bounds in units of the last."""
    return st.integers(least, most).map(lambda value: value / 10**places)


@st.composite
def chain_tasks(draw: st.DrawFn, most_servers: int = 6, *, linked: bool = False) -> ChainTask:
    """Tiny tasks full of ties and of divisions without remainder."""
    servers = tuple(
        Server(
            str(number),
            draw(decimals(0, 60)),
            draw(decimals(0, 20)),
            draw(decimals(1, 5)),
            draw(st.sampled_from((None, None, 0.5, 2))),
            draw(st.sampled_from((None, None, 0.2, 1.0))),
        )
        for number in range(draw(st.integers(1, most_servers)))
    )
    task = ChainTask(
        servers=servers,
        blocks=draw(st.integers(1, 6)),
        block_memory=1,
        cache_memory=draw(decimals(1, 5)),
        rate_per_s=draw(decimals(1, 30)),
        stop=draw(st.sampled_from(("all", "rate"))),
    )
    if not linked:
        return task
    names: list[str | None] = [None, *(server.name for server in servers)]
    pairs = [(one, other) for one, other in permutations(names, 2)]
    given = draw(st.lists(st.sampled_from(pairs), unique=True))
    return replace(task, links={pair: draw(decimals(0, 20)) for pair in given})


@st.composite
def placed_tasks(
    draw: st.DrawFn, *, linked: bool = False
) -> tuple[ChainTask, tuple[HostedBlocks, ...]]:
    """A task with blocks anywhere on its servers, as no algorithm of ours would put them."""
    task = draw(chain_tasks(linked=linked))
    if draw(st.booleans()):
        return task, gbp_cr(task, draw(st.integers(1, 4))).hosted(task)
    hosted = []
    for server in task.servers:
        first = draw(st.integers(0, task.blocks - 1))
        blocks = draw(st.integers(1, task.blocks - first))
        hosted.append(HostedBlocks(server.name, first, blocks, draw(st.integers(0, 8))))
    return task, tuple(hosted)
