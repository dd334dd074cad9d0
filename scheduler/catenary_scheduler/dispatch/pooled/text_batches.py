"""Batches of texts: whole rows of unlike lengths, within a budget of tokens.

Rows of a batch are filled up to the longest of them, and what is filled up is computed as well. So
a batch is as large as its rows times the longest.

A batch begins with the head, the row that is to be served first. Of the others those nearest to it
in length come first, shorter ones before longer ones. A run of rows of one length joins if that
takes no longer than computing these rows by themselves, by the times that batches are booked with:
where time grows with every token, only rows of about one length share a batch; on a device that
takes about as long for few tokens as for many, rows of all lengths do. What is left out has its
turn with the next batch, as its head if need be.
"""

from __future__ import annotations

from collections.abc import Sequence

from catenary_scheduler.dispatch.pooled.tracking import RowRange
from catenary_services.domain.ids import Nanoseconds
from catenary_services.domain.model import TokenUnits


class TextBatch:
    """Rows that may go together in one batch.

    Attributes:
        counts: How many rows of each range are in it, the first ones; of others there are none.
        rows: Number of rows.
        tokens: Tokens of the longest one.
        is_full: True if not even one more row fits, however short it is.
        leaves_rows: True if rows are left out.
    """

    __slots__ = ("counts", "is_full", "leaves_rows", "rows", "tokens")

    def __init__(self, ranges: int) -> None:
        self.counts = [0] * ranges
        self.rows = 0
        self.tokens = 0
        self.is_full = False
        self.leaves_rows = False


def least_size(rows: RowRange, units: TokenUnits | None) -> int:
    """Returns the size of the smallest batch that has room for the first of some rows.

    Where lengths are not known, rows count as texts of full length.
    """
    return 1 if units is None else min(units.per_text, units.of(1, _first_tokens(rows, units)))


def _first_tokens(rows: RowRange, units: TokenUnits) -> int:
    lengths = rows.request.texts
    return units.text_tokens if lengths is None else lengths.tokens[lengths.run_at(rows.first)]


def pack_texts(
    ranges: Sequence[RowRange],
    units: TokenUnits,
    limit: int,
    work_ns: Sequence[Nanoseconds],
) -> TextBatch:
    """Returns the batch of at most `limit` units that begins with the first of some rows.

    Args:
        ranges: Rows that may go together, those to be served first before the others; the first of
            each are the shortest.
        units: The units in which batches are counted.
        limit: The largest batch. The first row has to fit into it.
        work_ns: What a batch of 1, 2, .. units takes.
    """
    room = limit * units.tokens
    tokens = [_first_tokens(part, units) for part in ranges]
    head = tokens[0]
    nearest = [((each > head, abs(each - head)), at) for at, each in enumerate(tokens) if at]
    batch = TextBatch(len(ranges))
    for at in [0, *[at for _, at in sorted(nearest)]]:
        part = ranges[at]
        batch.counts[at] = _join(batch, part, units, room, work_ns)
        batch.leaves_rows = batch.leaves_rows or batch.counts[at] < part.count
        batch.is_full = (batch.rows + 1) * batch.tokens > room
        if batch.is_full:
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
            together = _work(work_ns, units, (batch.rows + fitting) * longest)
            apart = _work(work_ns, units, batch.rows * batch.tokens)
            if together > apart + _work(work_ns, units, fitting * tokens):
                break
        batch.rows += fitting
        batch.tokens = longest
        taken += fitting
        run += 1
        if fitting < count:
            break
    return taken


def _work(work_ns: Sequence[Nanoseconds], units: TokenUnits, tokens: int) -> Nanoseconds:
    """Returns what a batch of so many tokens takes: times between those of sizes are on a line."""
    whole, rest = divmod(tokens, units.tokens)
    if whole == 0:
        step = work_ns[1] - work_ns[0] if len(work_ns) > 1 else 0
        return max(0, work_ns[0] - step * (units.tokens - rest) // units.tokens)
    if rest == 0 or whole >= len(work_ns):
        return work_ns[min(whole, len(work_ns)) - 1]
    below = work_ns[whole - 1]
    return below + (work_ns[whole] - below) * rest // units.tokens
