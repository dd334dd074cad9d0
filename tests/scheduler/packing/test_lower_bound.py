"""No packing has fewer bins than the bound says, and often one has exactly so many."""

from collections.abc import Sequence

from hypothesis import example, given, settings
from hypothesis import strategies as st

from catenary_scheduler.packing.lower_bound import lower_bound

CAPACITY = 24
SIZES = st.lists(st.integers(0, CAPACITY), max_size=9)


def fewest_bins(sizes: Sequence[int], capacity: int) -> int:
    """Returns the least number of bins, by trying every bin for every item (largest first)."""
    ordered = sorted((size for size in sizes if size), reverse=True)
    best = len(ordered)

    def place(at: int, loads: list[int]) -> None:
        nonlocal best
        if len(loads) >= best:
            return
        if at == len(ordered):
            best = len(loads)
            return
        for each in {load: i for i, load in enumerate(loads)}.values():
            if loads[each] + ordered[at] <= capacity:
                loads[each] += ordered[at]
                place(at + 1, loads)
                loads[each] -= ordered[at]
        place(at + 1, [*loads, ordered[at]])

    place(0, [])
    return best


def by_definition(sizes: Sequence[int], capacity: int) -> int:
    """Returns L2 as the paper writes it, over every threshold up to half the capacity."""
    most = 0
    for k in range(capacity // 2 + 1):
        first = [w for w in sizes if w > capacity - k]
        second = [w for w in sizes if capacity - k >= w and 2 * w > capacity]
        third = [w for w in sizes if w >= k and 2 * w <= capacity]
        room = len(second) * capacity - sum(second)
        beyond = max(0, -(-(sum(third) - room) // capacity))
        most = max(most, len(first) + len(second) + beyond)
    return most


@given(SIZES)
@settings(max_examples=50, deadline=None)
@example([])
@example([0, 0])
@example([12, 12, 12])
@example([13, 13, 11, 11])
def test_no_packing_has_fewer_bins(sizes: list[int]) -> None:
    assert lower_bound(sizes, CAPACITY) <= fewest_bins(sizes, CAPACITY)


@given(st.lists(st.integers(0, 37), max_size=60), st.integers(37, 50))
@settings(max_examples=50, deadline=None)
def test_it_is_the_bound_of_the_paper(sizes: list[int], capacity: int) -> None:
    assert lower_bound(sizes, capacity) == by_definition(sizes, capacity)


def test_it_sees_more_than_the_sum() -> None:
    # 3 x 13 + 2 x 12 = 63 of 72, but two of 13 do not share a bin, and none has room for a 12
    assert lower_bound([13, 13, 13, 12, 12], CAPACITY) == 4
    assert lower_bound([13] * 5, CAPACITY) == 5


def test_borders_are_exact_for_odd_capacities() -> None:
    assert lower_bound([12, 12, 12], 25) == 2
    assert lower_bound([13, 13], 25) == 2
    assert lower_bound([13, 12], 25) == 1
