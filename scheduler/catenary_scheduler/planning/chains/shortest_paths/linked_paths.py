"""Fastest path where the time to a server depends on the server before it (footnote 4).

With peer-to-peer communication the last server of a partial path matters, not only the block that
is needed next. The graph is therefore that of Algorithm 2 over pairs of servers, with an edge i ->
j if j hosts the block after the end of i and ends later. All servers with the same end form one
matrix of costs, and the matrices are swept from the last end to the first, in O(pairs) per chain in
NumPy.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from catenary_scheduler.planning.chains.sizes import NO_LINK, NO_PATH, LinkTimes

Numbers = npt.NDArray[np.int64]
_ORCHESTRATOR = -1
"""Index of the orchestrator, whose row and column are the last."""


class LinkedPaths:
    """Shortest paths over servers by the slots that are left, used as `BoundaryPaths` are."""

    def __init__(
        self,
        blocks: int,
        ranges: Sequence[tuple[int, int, int]],
        links: LinkTimes,
        slots: Sequence[int],
    ) -> None:
        """Takes the hosted ranges as (server, first block, end), and the slots by server number.

        Args:
            blocks: Number L of blocks.
            ranges: Ranges of the servers that host something.
            links: Nanoseconds from server to server, and of compute per block.
            slots: Block slots by server number. They are copied before any are taken.
        """
        ranges = sorted(ranges)
        self.blocks = blocks
        self._links = links
        self._base = blocks + 1  # costs are time * base + hops
        self._server = np.array([server for server, _, _ in ranges], dtype=np.int64)
        self._first = np.array([first for _, first, _ in ranges], dtype=np.int64)
        self._end = np.array([end for _, _, end in ranges], dtype=np.int64)
        self._room = np.array([slots[server] for server, _, _ in ranges], dtype=np.int64)
        self._at = {server: at for at, (server, _, _) in enumerate(ranges)}
        self._last = np.flatnonzero(self._end == blocks)
        self._back = links.times[self._server[self._last], _ORCHESTRATOR] * self._base
        self._steps = self._graph()
        self._next = np.zeros(len(ranges), dtype=np.int64)

    def _graph(self) -> list[tuple[Numbers, Numbers, Numbers, Numbers]]:
        """Returns servers, successors, needs and costs for each end, the last end first.

        Block 0 counts as the end of the orchestrator, which has no index of its own.
        """
        steps = []
        for end in sorted({0, *self._end.tolist()} - {self.blocks}, reverse=True):
            here = np.flatnonzero(self._end == end)
            rows = self._server[here] if end else np.array([_ORCHESTRATOR])
            after = np.flatnonzero((self._first <= end) & (self._end > end))
            needs = self._end[after] - end
            columns = self._server[after]
            links = self._links.times[np.ix_(rows, columns)]
            costs = (links + self._links.compute[columns] * needs) * self._base + 1
            costs[links == NO_LINK] = NO_PATH
            steps.append((here, after, needs, costs))
        return steps

    def shortest(self) -> list[int] | None:
        """Returns the servers of the fastest path; None if no path is left."""
        rest = np.full(len(self._server), NO_PATH, dtype=np.int64)
        rest[self._last] = self._back
        begin, least = 0, NO_PATH
        for here, after, needs, costs in self._steps:
            if not len(after):
                continue
            onward = np.where(self._room[after] >= needs, rest[after], NO_PATH)
            totals = np.minimum(costs + onward, NO_PATH)
            chosen = totals.argmin(axis=1)  # of equal ones the smallest server number
            values = totals[np.arange(len(totals)), chosen]
            if len(here):
                rest[here], self._next[here] = values, after[chosen]
            else:  # the orchestrator comes last
                begin, least = int(after[chosen[0]]), int(values[0])
        if least >= NO_PATH:
            return None
        path = [int(self._server[begin])]
        while self._end[begin] < self.blocks:
            begin = int(self._next[begin])
            path.append(int(self._server[begin]))
        return path

    def take(self, path: Sequence[int]) -> int:
        """Takes the slots of as many sessions as a path has room for, and returns their number."""
        at, needs = self._places(path)
        capacity = int((self._room[at] // needs).min())
        self._room[at] -= capacity * needs
        return capacity

    def time(self, path: Sequence[int]) -> int:
        """Returns the time T_k of a path in nanoseconds, the way back included."""
        _, needs = self._places(path)
        compute = int(self._links.compute[list(path)] @ needs)
        ring = [_ORCHESTRATOR, *path, _ORCHESTRATOR]
        return compute + sum(int(self._links.times[hop]) for hop in pairwise(ring))

    def _places(self, path: Sequence[int]) -> tuple[Numbers, Numbers]:
        """Returns the indices of the servers, and the blocks really processed at each."""
        at = np.array([self._at[server] for server in path], dtype=np.int64)
        return at, np.diff(self._end[at], prepend=0)
