"""Fastest path from block to block, again and again while servers fill up: the core of GCA.

Whether a server can follow depends on the server before it only through the block that is needed
next. The graph over pairs of servers (Algorithm 2) therefore collapses to one over block boundaries
0..L: an edge from entry b to end e for every server that hosts [a, e) with a <= b < e, at the cost
tau_c + tau_p (e - b), as long as it has e - b slots left. For every pair (b, e) the servers are
stacked with the cheapest on top. Costs never change and slots only shrink, so a server that is too
full leaves a stack for good. Only entries whose top changed, or that lead to one whose top changed,
are computed again. The cost is O(sum m_j log J) for the stacks and a few microseconds per chain.

A cost is one integer: (time * hops_base + hops) * servers + server. It orders paths by time, then
by the number of servers, then by the server numbers from the first hop on.
"""

from __future__ import annotations

from collections.abc import Sequence

NO_PATH = 1 << 600
"""Cost of a missing path, greater than any real cost."""


class BoundaryPaths:
    """Shortest paths over block boundaries by the slots that are left."""

    def __init__(
        self,
        blocks: int,
        ranges: Sequence[tuple[int, int, int]],
        communication: Sequence[int],
        compute: Sequence[int],
        slots: Sequence[int],
    ) -> None:
        """Takes the hosted ranges as (server, first block, end), and the rest by server number.

        Args:
            blocks: Number L of blocks.
            ranges: Ranges of the servers that host something.
            communication: Communication time tau_c in time units.
            compute: Compute time tau_p in time units per block.
            slots: Block slots. They are copied before any are taken.
        """
        self.blocks = blocks
        self.left = list(slots)
        self._servers = max(1, len(communication))
        self._end = [0] * self._servers
        self._hops_base = blocks + 1
        self._entries = _reachable(blocks, ranges)
        self._stacks: list[dict[int, list[int]]] = [{} for _ in range(blocks + 1)]
        self._served: dict[int, list[int]] = {}
        """Entries at which servers of a range can be used, by range (first * (L + 1) + end)."""
        self._range = [0] * self._servers
        self._fill(ranges, communication, compute)
        self._best = [NO_PATH] * (blocks + 1)
        self._best[blocks] = 0
        self._rest = [NO_PATH] * (blocks + 1)
        """Cost from each boundary to the end, without the server number in it."""
        self._rest[blocks] = 0
        self._changed = [True] * (blocks + 1)
        self._leading: list[list[int]] = [[] for _ in range(blocks + 1)]
        """Entries from which each boundary can be reached in one hop."""
        for entry in self._entries:
            for end in self._stacks[entry]:
                self._leading[end].append(entry)

    def _fill(
        self,
        ranges: Sequence[tuple[int, int, int]],
        communication: Sequence[int],
        compute: Sequence[int],
    ) -> None:
        servers, base, left = self._servers, self._hops_base, self.left
        per_block = base * servers
        for server, first, end in ranges:
            kind = first * (self.blocks + 1) + end
            self._end[server], self._range[server] = end, kind
            entries = self._served.get(kind)
            if entries is None:
                entries = [entry for entry in self._entries if first <= entry < end]
                self._served[kind] = entries
                for entry in entries:
                    self._stacks[entry].setdefault(end, [])
            fixed = (communication[server] * base + 1) * servers + server
            each, room = compute[server] * per_block, left[server]
            for entry in entries:
                if end - entry <= room:
                    self._stacks[entry][end].append(fixed + each * (end - entry))
        for ends in self._stacks:
            for end in [end for end, stack in ends.items() if not stack]:
                del ends[end]
            for stack in ends.values():
                stack.sort(reverse=True)

    def shortest(self) -> list[int] | None:
        """Returns the servers of the fastest path; None if no path is left."""
        changed, best, rest, stacks = self._changed, self._best, self._rest, self._stacks
        servers = self._servers
        for entry in self._entries:  # from the last to the first
            if not changed[entry]:
                continue
            changed[entry] = False
            least = NO_PATH
            for end, stack in stacks[entry].items():
                cost = stack[-1] + rest[end]
                if cost < least:  # noqa: PLR1730, min() is a call, and this the inner loop
                    least = cost
            if least != best[entry]:
                best[entry] = least
                rest[entry] = NO_PATH if least >= NO_PATH else least - least % servers
                for before in self._leading[entry]:
                    changed[before] = True
        if best[0] >= NO_PATH:
            return None
        path, at = [], 0
        while at < self.blocks:
            server = best[at] % servers
            path.append(server)
            at = self._end[server]
        return path

    def take(self, path: Sequence[int]) -> int:
        """Takes the slots of as many sessions as a path has room for, and returns their number."""
        left, ends, at, capacity = self.left, self._end, 0, -1
        for server in path:
            room = left[server] // (ends[server] - at)
            at = ends[server]
            if capacity < 0 or room < capacity:
                capacity = room
        at = 0
        for server in path:
            left[server] -= capacity * (ends[server] - at)
            at = ends[server]
            self._drop(server)
        return capacity

    def _drop(self, server: int) -> None:
        """Removes servers with too few slots from the top of each stack that this server tops."""
        end, room, left, servers = self._end[server], self.left[server], self.left, self._servers
        for entry in self._served[self._range[server]]:
            needed = end - entry
            if needed <= room:
                continue
            stack = self._stacks[entry].get(end)
            if stack is None or stack[-1] % servers != server:
                continue
            while stack and left[stack[-1] % servers] < needed:
                stack.pop()
            if not stack:
                del self._stacks[entry][end]
            self._changed[entry] = True

    def time(
        self, path: Sequence[int], communication: Sequence[int], compute: Sequence[int]
    ) -> int:
        """Returns the time T_k of a path in time units, for the blocks really processed."""
        at = total = 0
        for server in path:
            total += communication[server] + compute[server] * (self._end[server] - at)
            at = self._end[server]
        return total


def _reachable(blocks: int, ranges: Sequence[tuple[int, int, int]]) -> list[int]:
    """Returns the boundaries that a session can reach, the last first, without the end L."""
    ends_of: dict[int, set[int]] = {}
    for _, first, end in ranges:
        ends_of.setdefault(end, set()).add(first)
    found = {0}
    for end in sorted(ends_of):
        earliest = min(ends_of[end])
        if any(earliest <= entry < end for entry in found):
            found.add(end)
    return sorted(found - {blocks}, reverse=True)
