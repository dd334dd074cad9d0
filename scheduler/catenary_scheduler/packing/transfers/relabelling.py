"""Assignment of chains to the bins of a new packing, so that the fewest bytes move.

A packing determines which sessions live together, not where, so bins of one capacity may be
exchanged. Bins and chains are matched so that as many bytes as possible are already where they
should be.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

Bin = TypeVar("Bin", bound=Hashable)
Item = TypeVar("Item", bound=Hashable)


def relabel(
    packed: Sequence[Sequence[Item]],
    where: Mapping[Item, Bin],
    sizes: Mapping[Item, int],
    bins: Sequence[Bin],
) -> list[Bin | None]:
    """Returns a bin for each group of items that is to share one.

    The bins are chosen so that as many bytes as possible stay where they are, which is an
    assignment problem.

    Args:
        packed: The groups of a new packing; no item is in two groups.
        where: Present bins of the items that have one.
        sizes: Bytes of the items; an item that is missing has none.
        bins: The bins that may be used, each once. A bin that is not among them is to be emptied.

    Returns:
        One bin for each group, none twice; None for groups beyond the number of bins.
    """
    columns = {each: at for at, each in enumerate(bins)}
    overlap = [[0] * len(bins) for _ in packed]
    for row, items in zip(overlap, packed, strict=True):
        for item in items:
            at = columns.get(where[item]) if item in where else None
            if at is not None:
                row[at] += sizes.get(item, 0)
    return [None if at is None else bins[at] for at in assign(overlap)]


def staying(
    packed: Sequence[Sequence[Item]],
    labels: Sequence[Bin | None],
    where: Mapping[Item, Bin],
    sizes: Mapping[Item, int],
) -> int:
    """Returns the number of bytes that do not move if the groups get these bins."""
    return sum(
        sizes.get(item, 0)
        for items, label in zip(packed, labels, strict=True)
        for item in items
        if label is not None and where.get(item) == label
    )


def assign(gains: Sequence[Sequence[int]]) -> list[int | None]:
    """Returns a column for each row, none twice, so that the sum of gains is as large as possible.

    If every row can have the column with its largest gain, that is the answer. Otherwise it is
    computed by the Hungarian method with shortest augmenting paths (Kuhn 1955; Jonker and Volgenant
    1987) in O(n^2 m), where n is the smaller of the numbers of rows and columns and m the larger.

    Args:
        gains: Rows of equal length. If there are more rows than columns, some rows get None.
    """
    if not gains or not gains[0]:
        return [None] * len(gains)
    columns = len(gains[0])
    wanted = [max(range(columns), key=row.__getitem__) for row in gains]
    if len(set(wanted)) == len(gains):
        return list(wanted)
    if len(gains) <= columns:
        return list(_matched([[-gain for gain in row] for row in gains]))
    taken: list[int | None] = [None] * len(gains)
    for column, row in enumerate(
        _matched([[-gain for gain in row] for row in zip(*gains, strict=True)])
    ):
        taken[row] = column
    return taken


def _matched(costs: Sequence[Sequence[int]]) -> list[int]:
    """Returns each row's column at the least total cost; rows are no more than columns."""
    columns = len(costs[0])
    prices = _Prices([0] * len(costs), [0] * columns)
    owner: list[int | None] = [None] * columns
    for row in range(len(costs)):
        _augment(costs, prices, owner, row)
    of_row = {row: column for column, row in enumerate(owner) if row is not None}
    return [of_row[row] for row in range(len(costs))]


@dataclass(slots=True)
class _Prices:
    """Dual prices of rows and columns.

    Invariant: cost - row - column is never negative, and 0 where matched.
    """

    rows: list[int]
    columns: list[int]


def _augment(
    costs: Sequence[Sequence[int]], prices: _Prices, owner: list[int | None], row: int
) -> None:
    """Matches one more row, along the cheapest chain of exchanges that ends at a free column."""
    slack: dict[int, tuple[int, int | None]] = {}
    """Reduced cost of reaching each column not reached yet, and the column before it."""
    reached: dict[int, int | None] = {}
    """Predecessor of each column on the way; None for a column reached from the row itself."""
    before: int | None = None
    at = row
    left = set(range(len(owner)))
    while True:
        for column in left:
            lacks = costs[at][column] - prices.rows[at] - prices.columns[column]
            if column not in slack or lacks < slack[column][0]:
                slack[column] = lacks, before
        nearest = min(left, key=lambda column: (slack[column][0], column))
        step = slack[nearest][0]
        prices.rows[row] += step
        for column in reached:
            taker = owner[column]
            assert taker is not None, "only a taken column leads on"
            prices.rows[taker] += step
            prices.columns[column] -= step
        slack = {column: (slack[column][0] - step, slack[column][1]) for column in left}
        reached[nearest] = slack.pop(nearest)[1]
        left.remove(nearest)
        taker = owner[nearest]
        if taker is None:
            break
        before, at = nearest, taker
    end: int | None = nearest
    while end is not None:
        came_from = reached[end]
        owner[end] = row if came_from is None else owner[came_from]
        end = came_from
