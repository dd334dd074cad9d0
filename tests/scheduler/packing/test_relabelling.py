"""As many bytes as possible stay: no permutation of the bins has more of them."""

from itertools import permutations

from hypothesis import given, settings
from hypothesis import strategies as st

from catenary_scheduler.packing.transfers.relabelling import assign, relabel, staying

SQUARES = st.integers(0, 5).flatmap(
    lambda rows: st.integers(0, 5).flatmap(
        lambda columns: st.lists(
            st.lists(st.integers(0, 6), min_size=columns, max_size=columns),
            min_size=rows,
            max_size=rows,
        )
    )
)


def most(gains: list[list[int]]) -> int:
    """Returns the largest sum, by trying every way."""
    columns = len(gains[0]) if gains else 0
    choices: list[int | None] = [*range(columns), *[None] * max(0, len(gains) - columns)]
    sums: list[int] = [
        sum(row[at] for row, at in zip(gains, kinds, strict=True) if at is not None)
        for kinds in permutations(choices, len(gains))
    ]
    return max(sums)


@given(SQUARES)
@settings(max_examples=70, deadline=None)
def test_no_other_assignment_gains_more(gains: list[list[int]]) -> None:
    found = assign(gains)
    assert len(found) == len(gains)
    taken = [at for at in found if at is not None]
    assert len(set(taken)) == len(taken) == min(len(gains), len(gains[0]) if gains else 0)
    gained = sum(row[at] for row, at in zip(gains, found, strict=True) if at is not None)
    assert gained == most(gains)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 9)), max_size=9))
@settings(max_examples=30, deadline=None)
def test_bytes_that_stay_are_as_many_as_any_labels_could_keep(
    drawn: list[tuple[int, int, int]],
) -> None:
    bins = ("a", "b", "c", "d")
    packed = [[item for item, (group, _, _) in enumerate(drawn) if group == at] for at in range(4)]
    where = {item: bins[before] for item, (_, before, _) in enumerate(drawn)}
    sizes = {item: size for item, (_, _, size) in enumerate(drawn)}
    labels = relabel(packed, where, sizes, bins)
    assert sorted(map(str, labels)) == list(bins)
    best = max(staying(packed, kinds, where, sizes) for kinds in permutations(bins))
    assert staying(packed, labels, where, sizes) == best


def test_a_bin_that_is_to_be_emptied_keeps_nothing() -> None:
    labels = relabel([[1, 2], [3]], {1: "x", 2: "x", 3: "y"}, {1: 5, 2: 5, 3: 1}, ["y", "z"])
    assert sorted(map(str, labels)) == ["y", "z"]
    assert labels[1] == "y"  # the one byte that can stay does


def test_groups_beyond_the_bins_get_none() -> None:
    labels = relabel([[1], [2], [3]], {1: 0, 2: 1, 3: 1}, {1: 4, 2: 1, 3: 9}, [0, 1])
    assert labels == [0, None, 1]


def test_nothing_is_labelled_where_there_is_nothing() -> None:
    assert relabel([], {}, {}, ["a"]) == []
    assert relabel([[1]], {}, {}, []) == [None]
