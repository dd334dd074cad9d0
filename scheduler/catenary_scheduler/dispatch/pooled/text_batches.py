"""Batches of texts: whole rows of unlike lengths, within a budget of tokens.

Rows of a batch are filled up to the longest of them, and what is filled up is computed as well. So
a batch is as large as its rows times the longest. Rows are taken in the order in which they are to
be served, the head first. A run of rows of one length joins if that takes no longer than computing
these rows by themselves, by the times that batches are booked with: on a device that is busy with
few tokens, only rows of about one length share a batch; on one that takes about as long for many,
rows of all lengths do. What is left out has its turn with the next batch, as its head if need be.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from catenary_scheduler.dispatch.pooled.tracking import RowRange
from catenary_services.domain.ids import Nanoseconds
from catenary_services.domain.model import TokenUnits

_MOST_LOOKED_AT = 256
"""The most ranges of rows that are looked at for one batch."""


class TextBatch:
    """Rows that may go together in one batch.

    Attributes:
        counts: How many rows of each range are in it, the first ones; ranges behind are not.
        rows: Number of rows.
        tokens: Tokens of the longest one.
        is_full: True if not even one more row fits, however short it is.
        leaves_rows: True if rows that were looked at are left out.
    """

    __slots__ = ("counts", "is_full", "leaves_rows", "rows", "tokens")

    def __init__(self) -> None:
        self.counts: list[int] = []
        self.rows = 0
        self.tokens = 0
        self.is_full = False
        self.leaves_rows = False


def least_size(rows: RowRange, units: TokenUnits | None) -> int:
    """Returns the size of the smallest batch that has room for the first of some rows.

    Where lengths are not known, rows count as texts of full length.
    """
    if units is None:
        return 1
    lengths = rows.request.texts
    if lengths is None:
        return units.per_text
    return min(units.per_text, units.of(1, lengths.tokens[lengths.run_at(rows.first)]))


def pack_texts(
    ranges: Iterable[RowRange],
    units: TokenUnits,
    limit: int,
    work_ns: Sequence[Nanoseconds],
) -> TextBatch:
    """Returns the batch of at most `limit` units that begins with the first of some rows.

    Args:
        ranges: Rows that may go together, those to be served first before the others.
        units: The units in which batches are counted.
        limit: The largest batch. The first row has to fit into it.
        work_ns: What a batch of 1, 2, .. units takes.
    """
    room = limit * units.tokens
    batch = TextBatch()
    for part in ranges:
        taken = _join(batch, part, units, room, work_ns)
        batch.counts.append(taken)
        batch.leaves_rows = batch.leaves_rows or taken < part.count
        batch.is_full = (batch.rows + 1) * batch.tokens > room
        if batch.is_full or len(batch.counts) >= _MOST_LOOKED_AT:
            break
    return batch


def _join(
    batch: TextBatch,
    part: RowRange,
    units: TokenUnits,
    room: int,
    work_ns: Sequence[Nanoseconds],
) -> int:
    """Adds as many of the first rows of a range as should join, and returns how many these are."""
    lengths = part.request.texts
    run = 0 if lengths is None else lengths.run_at(part.first)
    taken = 0
    while taken < part.count:
        count, tokens = part.count - taken, units.text_tokens
        if lengths is not None:
            count, tokens = min(count, lengths.ends[run] - part.first - taken), lengths.tokens[run]
        longest = max(batch.tokens, tokens)
        fitting = min(count, room // longest - batch.rows)
        if not batch.rows:
            fitting = max(1, fitting)
        elif fitting <= 0:
            break
        else:
            together = work_ns[units.of(batch.rows + fitting, longest) - 1]
            apart = work_ns[units.of(batch.rows, batch.tokens) - 1]
            if together > apart + work_ns[units.of(fitting, tokens) - 1]:
                break
        batch.rows += fitting
        batch.tokens = longest
        taken += fitting
        run += 1
        if fitting < count:
            break
    return taken
