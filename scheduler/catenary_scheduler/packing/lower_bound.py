"""How few GPUs could hold the caches of a moment: a lower bound on bin packing.

Source: Martello and Toth, "Lower bounds and reduction procedures for the bin packing problem"
(1990), bound L2. It is at least 3/4 of what an exact packing takes in the limit, and 4/3 of it plus
a constant is what Mell promises (Theorem 2).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate


def lower_bound(sizes: Iterable[int], capacity: int) -> int:
    """Returns a number of bins below which no packing of the sizes is possible.

    For a threshold k, items above capacity - k share a bin with nothing of at least k; those above
    half the capacity share one with no other of their kind; what of the others, down to k, does not
    fit beside them needs bins of its own. The bound is the most over all k that are sizes of small
    items, and 0 (which is the sum over the capacity where nothing is large).

    Args:
        sizes: Of the items, in any order; empty items count nothing.
        capacity: Of a bin, in the same units; no item is larger.

    Time: one sort, then at most one step for each distinct size up to half the capacity.
    """
    ordered = sorted(sizes)
    if not ordered:
        return 0
    assert 0 <= ordered[0] <= ordered[-1] <= capacity, "an item fits into no bin"
    sums = list(accumulate(ordered, initial=0))
    small = bisect_right(ordered, capacity // 2)
    large = len(ordered) - small
    # From sum to bins: `large` bins, and those that the rest needs beyond the room beside them.
    most, at, threshold = 0, 0, 0
    while True:
        rest = sums[small] - sums[at]
        if rest <= most * capacity:
            return large + most  # and so for every higher threshold: the rest only shrinks
        roomy = bisect_right(ordered, capacity - threshold)
        room = (roomy - small) * capacity - (sums[roomy] - sums[small])
        most = max(most, -(-(rest - room) // capacity))
        at = bisect_right(ordered, threshold, at, small)
        if at == small:
            return large + most
        threshold = ordered[at]
