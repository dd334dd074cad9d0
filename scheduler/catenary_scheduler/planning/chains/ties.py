"""Check whether GCA ever had a choice, since several shortest paths give several right answers."""

from __future__ import annotations

from collections.abc import Sequence

from catenary_scheduler.planning.chains.gca import Range
from catenary_scheduler.planning.chains.problem import ChainTask
from catenary_scheduler.planning.chains.shortest_paths.paths import BoundaryPaths
from catenary_scheduler.planning.chains.sizes import TaskSizes


def shortest_paths_are_unique(
    task: ChainTask, sizes: TaskSizes, ranges: Sequence[Range], slots: Sequence[int]
) -> bool:
    """Returns True if every chain of GCA was the only fastest path at its time.

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
