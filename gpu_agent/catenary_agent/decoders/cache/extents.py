"""The places of sessions in a pool of rows: contiguous extents that grow, move and are compacted.

An extent has a line of rows for every layer of a session, one line behind the other, all as long.
Where memory is plentiful an extent is as long at once as its session can become. Where it is short,
extents have little more than the rows in use, and grow by moving to a larger gap. If there is none,
some neighbours are pushed together to make one, and as a last resort all, so that every free row is
of use. Nothing here knows of devices: what has to be copied is returned.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from catenary_services.domain.decoder import CACHE_BLOCK_TOKENS
from catenary_services.errors import Overloaded

_AHEAD_TOKENS = 64
"""The least that an extent is longer than it has to be when it moves, where memory is short."""
_SLACK_TOKENS = (32, 0)
"""Rows to spare that a line keeps when it makes room for another, at first and if that is not
enough."""


@dataclass(slots=True, eq=False)
class Extent:
    """The rows of one session."""

    lines: int
    """Number of lines, one for each layer."""
    most: int
    """The most rows that a line can need."""
    first: int = 0
    """Index of its first row in the pool."""
    length: int = 0
    """Rows of a line; 0 if the session has none yet."""
    needed: int = 0
    """Rows of a line that may have content; the others are to spare."""

    @property
    def rows(self) -> int:
        """Number of rows of all lines."""
        return self.lines * self.length

    @property
    def end(self) -> int:
        """Index of the row behind its last one."""
        return self.first + self.rows

    def fitting(self, tokens: int) -> int:
        """Returns how long a line for so many tokens is."""
        return min(-(-tokens // CACHE_BLOCK_TOKENS) * CACHE_BLOCK_TOKENS, self.most)

    def kept(self, slack: int) -> int:
        """Returns how long a line is that keeps so many rows to spare, if it has them."""
        return min(self.length, self.fitting(self.needed + slack))

    def room(self, tokens: int) -> int:
        """Returns the rows of all lines that so many tokens need."""
        return self.lines * self.fitting(tokens)


@dataclass(frozen=True, slots=True)
class ExtentMove:
    """The first `tokens` rows of each line have to be copied from one place to another.

    The places may overlap. Then all rows move in the same direction.
    """

    extent: Extent
    source: int
    source_length: int
    target: int
    target_length: int
    tokens: int

    @property
    def is_down(self) -> bool:
        """Whether rows move towards the pool's begin, so that the first have to go first."""
        return (self.target, self.target_length) <= (self.source, self.source_length)

    @property
    def is_needed(self) -> bool:
        """Whether there is something to copy, and another place for it."""
        places = (self.source, self.source_length), (self.target, self.target_length)
        return self.tokens > 0 and places[0] != places[1]


class ExtentTable:
    """The extents of a pool, none of which overlap."""

    def __init__(self, rows: int) -> None:
        """Begins with so many free rows."""
        self.rows = rows
        self._extents: list[Extent] = []
        """The extents that have rows, by ascending place."""

    def release(self, extent: Extent) -> None:
        """Frees the rows of an extent."""
        if extent.length:
            self._extents.remove(extent)
        extent.first = extent.length = extent.needed = 0

    def grow(self, extent: Extent, needed: int) -> list[ExtentMove]:
        """Gives an extent room for `needed` rows in each line, which keep their content.

        Returns:
            The copies that have to be made, in this order, before anything is written.

        Raises:
            Overloaded: All extents together need more rows than there are; nothing has changed.
        """
        if needed <= extent.length:
            extent.needed = max(extent.needed, needed)
            return []
        return [move for move in self._moves(extent, needed) if move.is_needed]

    def _moves(self, extent: Extent, needed: int) -> list[ExtentMove]:
        """Finds the place that costs the fewest copies, and takes it."""
        lengths = self._lengths(extent, needed)
        for length in lengths:
            place = self._gap(extent.lines * length)
            if place is not None:
                return [self._put(extent, needed, place, length)]
        for length, slack in zip(lengths, _SLACK_TOKENS, strict=True):
            neighbours = self._window(extent.lines * length, slack)
            if neighbours:
                moves, place = self._pushed(neighbours, slack)
                return [*moves, self._put(extent, needed, place, length)]
        return self._compact(extent, needed)

    def shrink(self, extent: Extent, tokens: int) -> None:
        """Makes rows behind the first `tokens` of each line ones to spare."""
        extent.needed = min(extent.needed, tokens)
        if not extent.needed:
            self.release(extent)

    def _lengths(self, extent: Extent, needed: int) -> tuple[int, int]:
        """Returns the lengths that a line would best have, the longer one first."""
        free = self.rows - sum(each.rows for each in self._extents)
        if free >= self.rows // 2:
            return extent.most, extent.fitting(needed)
        return extent.fitting(needed + needed // 4 + _AHEAD_TOKENS), extent.fitting(needed)

    def _gap(self, rows: int) -> int | None:
        """Returns where so many rows are free."""
        end = 0
        for each in self._extents:
            if each.first - end >= rows:
                return end
            end = each.end
        return end if self.rows - end >= rows else None

    def _put(self, extent: Extent, needed: int, place: int, length: int) -> ExtentMove:
        """Gives an extent a free place."""
        if not extent.length:
            self._extents.append(extent)
        move = _placed(extent, place, length)
        extent.needed = needed
        self._extents.sort(key=_first)
        return move

    def _window(self, rows: int, slack: int) -> list[Extent]:
        """Returns the neighbours that leave a gap of so many rows when they are pushed together.

        Of all neighbours that do these have the fewest rows to copy. There are none if not even all
        extents do.

        Args:
            rows: The rows of the gap.
            slack: Rows of a line that each keeps to spare, if it has them.
        """
        extents = self._extents
        best, cheapest = range(0), 0
        first = kept = content = 0
        for last, each in enumerate(extents):
            kept += each.lines * each.kept(slack)
            content += each.lines * each.needed
            end = extents[last + 1].first if last + 1 < len(extents) else self.rows
            while first <= last:
                begin = extents[first - 1].end if first else 0
                if end - begin - kept < rows:
                    break
                if not best or content < cheapest:
                    best, cheapest = range(first, last + 1), content
                kept -= extents[first].lines * extents[first].kept(slack)
                content -= extents[first].lines * extents[first].needed
                first += 1
        return extents[best.start : best.stop]

    def _pushed(self, neighbours: list[Extent], slack: int) -> tuple[list[ExtentMove], int]:
        """Pushes neighbours together; returns what has to be copied, and where the gap begins."""
        index = self._extents.index(neighbours[0])
        end = self._extents[index - 1].end if index else 0
        moves = []
        for each in neighbours:
            moves.append(_placed(each, end, each.kept(slack)))
            end = each.end
        return moves, end

    def _compact(self, growing: Extent, needed: int) -> list[ExtentMove]:
        """Moves all extents together and deals out what is left, so that few grow again soon."""
        extents = self._extents if growing.length else [*self._extents, growing]
        wanted = [each.fitting(needed if each is growing else each.needed) for each in extents]
        total = sum(each.lines * length for each, length in zip(extents, wanted, strict=True))
        if total > self.rows:
            raise Overloaded(f"caches have {self.rows} rows, and {total} are needed")
        # The other half is a gap for sessions that begin or grow.
        spare = (self.rows - total) // 2 // sum(each.lines for each in extents)
        spare = spare // CACHE_BLOCK_TOKENS * CACHE_BLOCK_TOKENS
        moves, end = [], 0
        for each in extents:  # towards the pool's begin, each with no more than it needs
            moves.append(_placed(each, end, each.fitting(each.needed)))
            end = each.end
        lengths = [
            min(each.most, length + spare) for each, length in zip(extents, wanted, strict=True)
        ]
        rows = [each.lines * length for each, length in zip(extents, lengths, strict=True)]
        firsts = accumulate(rows, initial=0)
        # And away from it, the last one first.
        for each, length, first in reversed(list(zip(extents, lengths, firsts, strict=False))):
            moves.append(_placed(each, first, length))
        growing.needed = needed
        self._extents = extents
        return moves

    def validate(self) -> None:
        """Raises AssertionError unless extents are in order, apart from each other, and inside."""
        end = 0
        for each in self._extents:
            assert each.first >= end, "extents overlap"
            assert 0 < each.length <= each.most
            assert each.needed <= each.length
            end = each.end
        assert end <= self.rows, "an extent is outside the pool"


def _placed(extent: Extent, first: int, length: int) -> ExtentMove:
    """Gives an extent another place, and returns what has to be copied there."""
    move = ExtentMove(extent, extent.first, extent.length, first, length, extent.needed)
    extent.first, extent.length = first, length
    return move


def _first(extent: Extent) -> int:
    return extent.first
