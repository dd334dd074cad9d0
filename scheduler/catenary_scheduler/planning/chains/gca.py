"""GCA: greedy cache allocation (Algorithm 2 of server-chain composition).

Chains are cut from a placement, the fastest first. Each takes as many slots as its narrowest server
has left. Departure from the text: Algorithm 2 tests only the links of the last path (lines 10-12),
so later paths may have capacity 0. Here a server can be entered only while it has the slots for one
session, which gives the same chains without the empty ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from catenary_scheduler.planning.chains.problem import (
    ChainTask,
    ComposedChain,
    ComposedHop,
    HostedBlocks,
)
from catenary_scheduler.planning.chains.shortest_paths.linked_paths import LinkedPaths
from catenary_scheduler.planning.chains.shortest_paths.paths import BoundaryPaths
from catenary_scheduler.planning.chains.sizes import NANOSECONDS, TaskSizes, sizes_of
from catenary_services.errors import InvalidInput

Cut = tuple[list[int], int, float]
"""A chain: its server numbers in order, its sessions at a time, and its service time in seconds."""
Range = tuple[int, int, int]
"""Server number, first block and end of a hosted range."""


def gca(task: ChainTask, hosted: Sequence[HostedBlocks]) -> tuple[ComposedChain, ...]:
    """Returns chains over a placement until no path has slots left, the fastest first.

    Of equally fast paths the one with the fewest servers is taken, then the one whose servers come
    first in the task. The run time is near-linear in the servers without links, and about their
    square per chain with links.

    Args:
        task: The task, for its times and links; its memory and rate do not matter here.
        hosted: Blocks and slots of servers of the task.

    Raises:
        InvalidInput: The hosted blocks do not fit the task.
    """
    slots = _checked_slots(task, hosted)
    ranges = [(task.number_of[item.server], item.first_block, item.last_block) for item in hosted]
    cuts = cut_chains(task, sizes_of(task), ranges, slots)
    return composed(task, ranges, cuts)


def cut_chains(
    task: ChainTask, sizes: TaskSizes, ranges: Sequence[Range], slots: Sequence[int]
) -> Iterator[Cut]:
    """Yields the chains of GCA as server numbers; see `gca`."""
    if sizes.links is not None:
        linked = LinkedPaths(task.blocks, ranges, sizes.links, slots)
        while (path := linked.shortest()) is not None:
            time = linked.time(path)
            yield path, linked.take(path), time / NANOSECONDS
        return
    paths = BoundaryPaths(task.blocks, ranges, sizes.communication, sizes.compute, slots)
    while (path := paths.shortest()) is not None:
        time = paths.time(path, sizes.communication, sizes.compute)
        yield path, paths.take(path), time / sizes.unit


def composed(
    task: ChainTask, ranges: Sequence[Range], cuts: Iterator[Cut]
) -> tuple[ComposedChain, ...]:
    """Returns the chains with server names, and with the blocks really processed at every hop."""
    end_of = {server: end for server, _, end in ranges}
    chains = []
    for servers, capacity, service_s in cuts:
        ends = [0, *(end_of[server] for server in servers)]
        hops = tuple(
            ComposedHop(task.servers[server].name, begin, end)
            for server, begin, end in zip(servers, ends, ends[1:], strict=False)
        )
        chains.append(ComposedChain(hops, capacity, service_s))
    return tuple(chains)


def _checked_slots(task: ChainTask, hosted: Sequence[HostedBlocks]) -> list[int]:
    slots = [0] * len(task.servers)
    seen = set()
    for number, item in enumerate(hosted):
        field = f"hosted[{number}]"
        if item.server not in task.number_of or item.server in seen:
            raise InvalidInput(f"{field}.server", f"{item.server!r} is unknown or there twice")
        if not 0 <= item.first_block < item.last_block <= task.blocks:
            raise InvalidInput(f"{field}.blocks", f"do not lie within {task.blocks} blocks")
        if item.slots < 0:
            raise InvalidInput(f"{field}.slots", "must not be below 0")
        seen.add(item.server)
        slots[task.number_of[item.server]] = item.slots
    return slots


def shortest_paths_are_unique(
    task: ChainTask, sizes: TaskSizes, ranges: Sequence[Range], slots: Sequence[int]
) -> bool:
    """Returns True if every chain of GCA was the only fastest path at its time.

    If not, several compositions are right.

    The task must have no links, and be small: the check takes O(servers x blocks) per chain.
    """
    paths = BoundaryPaths(task.blocks, ranges, sizes.communication, sizes.compute, slots)
    while (path := paths.shortest()) is not None:
        if _count_shortest(sizes, ranges, paths.left) > 1:
            return False
        paths.take(path)
    return True


def _count_shortest(sizes: TaskSizes, ranges: Sequence[Range], left: Sequence[int]) -> int:
    best: list[tuple[int, int] | None] = [None] * sizes.blocks + [(0, 1)]
    for entry in range(sizes.blocks - 1, -1, -1):
        counts: dict[int, int] = {}
        for server, first, end in ranges:
            onward = best[end]
            if first <= entry < end and left[server] >= end - entry and onward is not None:
                time = sizes.service(server, end - entry) + onward[0]
                counts[time] = counts.get(time, 0) + onward[1]
        if counts:
            least = min(counts)
            best[entry] = (least, counts[least])
    return 0 if best[0] is None else best[0][1]
