"""Search space of placements: one candidate for each c that changes anything.

The number m_j(c) is a step function: of 351 values of c in the paper's setting, some 20 give
different placements. Neither it nor the number of groups ever grows with c, so equal placements are
neighbours, and the smallest c of each is the candidate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from catenary_scheduler.planning.chains.gbp_cr import (
    BlockPlacementRun,
    placement,
    requirement,
    run_groups,
    servers_used,
)
from catenary_scheduler.planning.chains.gca import Range, composed, cut_chains
from catenary_scheduler.planning.chains.problem import ChainTask, Composition
from catenary_scheduler.planning.chains.sizes import Blocks, TaskSizes

_NEAR = 1e-9


@dataclass(frozen=True, slots=True)
class PlacementCandidate:
    """A placement that is worth evaluating, and its c."""

    c: int
    run: BlockPlacementRun
    needed: int | None
    """Number K(c) of groups; None if the requirement is not reached."""
    used: int
    """Number of servers of the run's order that host blocks."""

    def ranges(self) -> list[Range]:
        """Returns the hosted range of every server that hosts blocks."""
        first, blocks = self.run.first, self.run.blocks
        return [
            (server, first[server], first[server] + blocks[server])
            for server in self.run.order[: self.used]
        ]

    def slots(self, sizes: TaskSizes) -> list[int]:
        """Returns the cache slots of each server, by server number."""
        slots = [0] * len(self.run.blocks)
        for server in self.run.order[: self.used]:
            slots[server] = sizes.cache_slots(server, self.run.blocks[server])
        return slots


def candidates(
    task: ChainTask, sizes: TaskSizes, worth: Callable[[Blocks], bool] = lambda limits: True
) -> Iterator[PlacementCandidate]:
    """Yields every placement with at least one complete group once, with its smallest c.

    Args:
        task: The task to plan.
        sizes: The sizes of the task as integers.
        worth: Returns whether to examine placements with these numbers of blocks per server.
    """
    before: list[Range] = []
    for c, until, limits in _steps(task, sizes):
        if not worth(limits):
            continue
        run = run_groups(sizes, limits)
        for each, needed in _needs(task, sizes, run, range(c, until)):
            found = PlacementCandidate(each, run, needed, servers_used(run, task, needed))
            if task.stop == "all":
                yield found
                break
            ranges = found.ranges()  # the servers that the stop leaves out may be all that changed
            if ranges != before:
                yield found
            before = ranges


def least_service_s(sizes: TaskSizes, limits: Blocks) -> float:
    """Returns seconds below which no chain can go with these numbers of blocks per server.

    Every block costs at least tau_c / m_j + tau_p at the server for which that is least. The result
    is a little lower, to allow for rounding.
    """
    used = limits > 0
    communication, compute = sizes.seconds_arrays
    per_block = communication[used] / limits[used] + compute[used]
    return sizes.blocks * float(per_block.min()) * (1.0 - _NEAR)


def least_surrogate(task: ChainTask, sizes: TaskSizes) -> tuple[int, int] | None:
    """Returns the c and K(c) with the least product c K(c) (eq. 14), the smaller c of equals."""
    best: tuple[int, int] | None = None
    for c, until, limits in _steps(task, sizes):
        if best is not None and c >= best[0] * best[1]:
            break  # K is at least 1, so no larger c can be better
        run = run_groups(sizes, limits)
        for each, needed in _needs(task, sizes, run, range(c, until)):
            if needed is not None and (best is None or each * needed < best[0] * best[1]):
                best = (each, needed)
    return best


def _needs(
    task: ChainTask, sizes: TaskSizes, run: BlockPlacementRun, values: range
) -> Iterator[tuple[int, int | None]]:
    """Yields c and K(c) wherever K changes over values of c that have equal placements."""
    if not run.group_ends:
        return
    c = values.start
    while c < values.stop:
        needed = run.groups_for(requirement(task, c), sizes.unit)
        yield c, needed
        if needed == 1:
            return
        # From about `enough` on, one group less suffices. Rounding never steps past that value.
        fewer = len(run.rates) if needed is None else needed - 1
        enough = float(requirement(task, 1)) / run.rates[fewer - 1]
        c = max(c + 1, math.floor(enough * (1.0 - _NEAR)))


def _steps(task: ChainTask, sizes: TaskSizes) -> Iterator[tuple[int, int, Blocks]]:
    """Yields c, the next larger c with other numbers of blocks per server, and the blocks for c."""
    c, largest = 1, task.largest_c
    while c <= largest:
        limits = sizes.max_blocks(c)
        if int(limits.sum()) < sizes.blocks:
            return
        until = min(_next_step(sizes, limits), largest + 1)
        yield c, until, limits
        c = until


def _next_step(sizes: TaskSizes, limits: Blocks) -> int:
    if sizes.memory_arrays is not None:
        used = limits > 0
        have, block, cache = (column[used] for column in sizes.memory_arrays)
        kept: Blocks = (have - block * limits[used]) // (cache * limits[used])
        return 1 + int(np.min(kept))
    blocks: list[int] = limits.tolist()
    return 1 + min(
        (sizes.memory[server] - sizes.block_memory[server] * mine)
        // (sizes.cache_memory[server] * mine)
        for server, mine in enumerate(blocks)
        if mine
    )


def compose_at(task: ChainTask, sizes: TaskSizes, c: int) -> Composition:
    """Returns the composition by GBP-CR and GCA for one c."""
    placed = placement(task, sizes, c)
    ranges = [
        (server, first, first + blocks)
        for server, (first, blocks) in enumerate(
            zip(placed.first_block, placed.blocks, strict=True)
        )
        if blocks
    ]
    chains = composed(task, ranges, cut_chains(task, sizes, ranges, placed.slots))
    hosted = placed.hosted(task)
    return Composition(
        c=c,
        hosted=hosted,
        chains=chains,
        arrivals_per_s=float(task.rate_per_s),
        groups=len(placed.groups),
        requirement_reached=placed.reached,
        loaded_blocks=int(np.sum([item.blocks for item in hosted], dtype=np.int64)),
    )
