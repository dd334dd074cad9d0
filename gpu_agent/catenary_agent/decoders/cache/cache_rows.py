"""The assignment of sessions to rows of the caches, and the row ranges that one call covers.

ONNX Runtime's attention reads and writes the rows `[a, b)` of a cache in place, so the sessions of
a call must be neighbours. Sessions are sorted by the block they enter at: those that run through a
block are the first rows of its cache, without a hole. When one leaves, the last row of its group
moves into the hole, and so on group by group (one move per entry block at most).
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RowMove:
    """An order to copy a session's cache to another row, in the blocks from `entry_block` on."""

    source: int
    target: int
    entry_block: int


class CacheRows:
    """Rows of sessions, grouped by entry block in ascending order.

    Invariant: the rows of the open sessions are `0 .. n-1`, and their entry blocks ascend.
    """

    def __init__(self) -> None:
        self.sessions: list[int] = []
        """The session of each row."""
        self.entries: list[int] = []
        """The entry block of each row's session."""
        self.row_of: dict[int, int] = {}

    def through(self, block: int) -> int:
        """Returns how many sessions run through a block: the number of used rows of its cache."""
        return bisect.bisect_right(self.entries, block)

    def add(self, session: int, entry_block: int) -> list[RowMove]:
        """Assigns a row to a session; returns the moves that make room for it, in order."""
        hole = len(self.sessions)
        self.sessions.append(session)
        self.entries.append(entry_block)
        moves = []
        while hole and self.entries[hole - 1] > entry_block:
            first = bisect.bisect_left(self.entries, self.entries[hole - 1], 0, hole)
            moves.append(self._move(first, hole))
            hole = first
        self._put(session, entry_block, hole)
        return moves

    def remove(self, session: int) -> list[RowMove]:
        """Removes a session; returns the moves that close the hole, in order."""
        hole = self.row_of.pop(session)
        moves = []
        while True:
            last = bisect.bisect_right(self.entries, self.entries[hole]) - 1
            if last > hole:
                moves.append(self._move(last, hole))
                hole = last
            if hole + 1 == len(self.sessions):
                break
            # The next group closes up: its last row becomes its first.
            last = bisect.bisect_right(self.entries, self.entries[hole + 1]) - 1
            moves.append(self._move(last, hole))
            hole = last
        self.sessions.pop()
        self.entries.pop()
        return moves

    def _move(self, source: int, target: int) -> RowMove:
        session, entry = self.sessions[source], self.entries[source]
        self._put(session, entry, target)
        return RowMove(source, target, entry)

    def _put(self, session: int, entry_block: int, row: int) -> None:
        self.sessions[row] = session
        self.entries[row] = entry_block
        self.row_of[session] = row


def cover(rows: Sequence[int], bridge: float, full: frozenset[int]) -> list[tuple[int, int]]:
    """Returns ranges `[a, b)` that contain all of `rows`, with holes where these are cheaper.

    A call reads all weights of the blocks once, whatever its rows (on this CPU 24 ms for fp32
    weights against 2 ms per row). Therefore rows that were not asked for are computed, too, if they
    are fewer than `bridge`. Such a row writes only at its own next position, where its next real
    token will go.

    Args:
        rows: The rows to compute, ascending.
        bridge: The largest hole worth computing: the cost of one reading of the weights, in rows.
        full: Rows that have no next position and must not be computed.
    """
    ranges: list[tuple[int, int]] = []
    for row in rows:
        if ranges:
            first, end = ranges[-1]
            hole = range(end, row)
            if len(hole) <= bridge and not any(dummy in full for dummy in hole):
                ranges[-1] = (first, row + 1)
                continue
        ranges.append((row, row + 1))
    return ranges
