"""Lower bound on the number of GPUs that could hold the caches of a moment (bin packing).

Source: Martello and Toth, "Lower bounds and reduction procedures for the bin packing problem"
(1990), bound L2. In the limit it is at least 3/4 of the optimum. Mell promises at most 4/3 of the
optimum plus a constant (Theorem 2).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate


def lower_bound(sizes: Iterable[int], capacity: int) -> int:
    """Returns a number of bins that every packing of the sizes needs.

    For a threshold k, items above capacity - k share a bin with no item of at least k, and items
    above half the capacity share none with each other. The other items of at least k that do not
    fit beside them need bins of their own. The bound is the maximum over k = 0 and the sizes of all
    small items. With k = 0 and no large item it is the sum of the sizes divided by the capacity.

    Args:
        sizes: Sizes of the items, in any order; items of size 0 do not count.
        capacity: Capacity of a bin in the same unit; no item is larger.

    Time: one sort, then at most one step for each distinct size up to half the capacity.
    """
    ordered = sorted(sizes)
    if not ordered:
        return 0
    assert 0 <= ordered[0] <= ordered[-1] <= capacity, "an item fits into no bin"
    sums = list(accumulate(ordered, initial=0))
    small = bisect_right(ordered, capacity // 2)
    large = len(ordered) - small
    # The number of bins is `large` plus those that the rest needs beyond the room beside large
    # items.
    most, at, threshold = 0, 0, 0
    while True:
        rest = sums[small] - sums[at]
        if rest <= most * capacity:
            return large + most  # the rest only shrinks, so higher thresholds give no more
        roomy = bisect_right(ordered, capacity - threshold)
        room = (roomy - small) * capacity - (sums[roomy] - sums[small])
        most = max(most, -(-(rest - room) // capacity))
        at = bisect_right(ordered, threshold, at, small)
        if at == small:
            return large + most
        threshold = ordered[at]
