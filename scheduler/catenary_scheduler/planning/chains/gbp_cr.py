"""GBP-CR: greedy block placement with cache reservation (Algorithm 1 of server-chain composition).

Servers, the fastest per block first, form disjoint groups that host the whole model once each, with
room for c sessions. Where Algorithm 1 leaves a choice, servers without room for a block are skipped
(it would add their communication time to a group), equal servers come in the order of the task, and
servers of an unfinished group keep their blocks for GCA.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise

from catenary_scheduler.planning.chains.problem import ChainTask, HostedBlocks, exact
from catenary_scheduler.planning.chains.sizes import Blocks, TaskSizes, sizes_of
from catenary_services.errors import InvalidInput

_NEAR = 1e-9
"""Relative distance below which a rate and the required one are compared exactly."""


@dataclass(frozen=True, slots=True)
class BlockPlacement:
    """Blocks that every server hosts, and the groups of servers that host the model together.

    Tuples over servers are in the order of the task.
    """

    c: int
    max_blocks: tuple[int, ...]
    """Number m_j(c) of blocks that fit on each server."""
    first_block: tuple[int, ...]
    """First block of each server, counted from 0; also 0 for servers that host nothing."""
    blocks: tuple[int, ...]
    """Number of blocks on each server; 0 if it hosts nothing."""
    slots: tuple[int, ...]
    """Cache slots of each server, in blocks (eq. 3)."""
    groups: tuple[tuple[int, ...], ...]
    """Positions in the task of the servers of every complete group."""
    group_service_s: tuple[float, ...]
    scaled_rate_per_s: float
    """Sessions per second of all groups with one session each, nu / c."""
    requirement_per_s: float
    """Required sessions per second with one session per group, lambda / (rho_bar c)."""
    groups_needed: int | None
    """Number K(c) of groups that reach the requirement; None if all together do not."""

    @property
    def reached(self) -> bool:
        """True if the groups have the required rate."""
        return self.groups_needed is not None

    def hosted(self, task: ChainTask) -> tuple[HostedBlocks, ...]:
        """Returns the hosted blocks of every server that hosts any."""
        return tuple(
            HostedBlocks(server.name, first, blocks, slots)
            for server, first, blocks, slots in zip(
                task.servers, self.first_block, self.blocks, self.slots, strict=True
            )
            if blocks
        )


@dataclass(frozen=True, slots=True)
class BlockPlacementRun:
    """Run of Algorithm 1 without its stop. It depends on c only through the blocks per server."""

    order: list[int]
    """Servers in the order in which they were placed."""
    first: list[int]
    """First block of each server, by its position in the task."""
    blocks: list[int]
    """Blocks m_j of each server, by its position in the task; also of servers that a stop leaves
    out."""
    group_ends: list[int]
    """Number of servers that were placed when each group was complete."""
    group_times: list[int]
    """Service time of each group, in time units."""
    rates: list[float]
    """Scaled rate after every group, in sessions per second."""

    def groups_for(self, requirement: Fraction, unit: int) -> int | None:
        """Returns the fewest groups whose rate is at least the requirement.

        Returns None if there are too few.
        """
        wanted = float(requirement)
        found = bisect_left(self.rates, wanted * (1.0 - _NEAR))
        while found < len(self.rates):
            if self.rates[found] > wanted * (1.0 + _NEAR) or self._reaches(
                found + 1, requirement, unit
            ):
                return found + 1
            found += 1
        return None

    def _reaches(self, groups: int, requirement: Fraction, unit: int) -> bool:
        rate = sum((Fraction(unit, time) for time in self.group_times[:groups]), Fraction(0))
        return rate >= requirement


def run_groups(sizes: TaskSizes, max_blocks: Blocks) -> BlockPlacementRun:
    """Returns all groups that can be formed by servers with these numbers of blocks."""
    last, blocks = sizes.blocks, max_blocks.tolist()
    order = _fastest_first(sizes, blocks)
    first = [0] * len(blocks)
    ends, times = [], []
    reached = time = 0
    communication, compute = sizes.communication, sizes.compute
    for placed, server in enumerate(order, start=1):
        mine = blocks[server]
        first[server] = min(reached, last - mine)  # the last server of a group moves back
        reached += mine
        time += communication[server] + compute[server] * mine
        if reached >= last:
            ends.append(placed)
            times.append(time)
            reached = time = 0
    rates = list(accumulate(sizes.unit / time for time in times))
    return BlockPlacementRun(order, first, blocks, ends, times, rates)


def _fastest_first(sizes: TaskSizes, blocks: list[int]) -> list[int]:
    # The key t_j / m_j is a whole number over a common denominator, so that equal servers are
    # equal.
    common = math.lcm(1, *(mine for mine in set(blocks) if mine))
    share = {mine: common // mine for mine in set(blocks) if mine}
    keys = [
        (communication + compute * mine) * share[mine] if mine else 0
        for communication, compute, mine in zip(
            sizes.communication, sizes.compute, blocks, strict=True
        )
    ]
    used = [server for server, mine in enumerate(blocks) if mine]
    used.sort(key=keys.__getitem__)
    return used


def requirement(task: ChainTask, c: int) -> Fraction:
    """Returns the rate that groups must have with one session each, lambda / (rho_bar c)."""
    return exact(task.rate_per_s) / (exact(task.load) * c)


def servers_used(run: BlockPlacementRun, task: ChainTask, needed: int | None) -> int:
    """Returns how many servers of a run's order get blocks under the task's stop rule."""
    if task.stop == "all" or needed is None:
        return len(run.order)
    return run.group_ends[needed - 1]


def gbp_cr(task: ChainTask, c: int) -> BlockPlacement:
    """Returns the placement in which every block has room for `c` sessions.

    Raises:
        InvalidInput: c is below 1.
    """
    if c < 1:
        raise InvalidInput("c", "must be at least 1")
    return placement(task, sizes_of(task), c)


def placement(task: ChainTask, sizes: TaskSizes, c: int) -> BlockPlacement:
    """Returns the placement of Algorithm 1 for `c`, from sizes that are already integers."""
    limits = sizes.max_blocks(c)
    run = run_groups(sizes, limits)
    needs = requirement(task, c)
    needed = run.groups_for(needs, sizes.unit)
    used = servers_used(run, task, needed)
    count = needed if task.stop == "rate" and needed is not None else len(run.group_ends)
    first, blocks = [0] * len(run.blocks), [0] * len(run.blocks)
    for server in run.order[:used]:
        first[server], blocks[server] = run.first[server], run.blocks[server]
    bounds = [0, *run.group_ends[:count]]
    return BlockPlacement(
        c=c,
        max_blocks=tuple(run.blocks),
        first_block=tuple(first),
        blocks=tuple(blocks),
        slots=tuple(sizes.cache_slots(server, mine) for server, mine in enumerate(blocks)),
        groups=tuple(tuple(run.order[begin:end]) for begin, end in pairwise(bounds)),
        group_service_s=tuple(sizes.seconds(time) for time in run.group_times[:count]),
        scaled_rate_per_s=run.rates[count - 1] if count else 0.0,
        requirement_per_s=float(needs),
        groups_needed=needed,
    )
