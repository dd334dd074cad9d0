"""`earliest_slot` against a twin that looks at every tick."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from catenary_scheduler.book import BookedInterval, Timeline, earliest_slot
from catenary_services.domain.ids import BatchId, ResourceId
from catenary_services.errors import InternalError


def filled(name: str, intervals: list[tuple[int, int]]) -> Timeline:
    line = Timeline(ResourceId(name))
    for start, end in intervals:
        line.insert(BookedInterval(BatchId(1), 0, (line,), start, end))
    return line


@st.composite
def busy(draw: st.DrawFn) -> list[tuple[int, int]]:
    edges = sorted(draw(st.lists(st.integers(0, 40), max_size=12)))
    pairs = [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=False) if a < b]
    return draw(st.permutations(pairs))


def slow_earliest(lines: list[list[tuple[int, int]]], not_before: int, duration: int) -> int:
    start = not_before
    while any(low < start + duration and start < high for line in lines for low, high in line):
        start += 1
    return start


@given(st.lists(busy(), min_size=1, max_size=3), st.integers(0, 45), st.integers(1, 10))
def test_earliest_slot_equals_the_twin_that_looks_at_every_tick(
    lines: list[list[tuple[int, int]]], not_before: int, duration: int
) -> None:
    timelines = [filled(f"r{i}", line) for i, line in enumerate(lines)]
    assert earliest_slot(timelines, not_before, duration) == slow_earliest(
        lines, not_before, duration
    )


@given(busy(), st.integers(0, 40), st.integers(1, 10))
def test_insert_accepts_exactly_what_does_not_overlap(
    intervals: list[tuple[int, int]], start: int, length: int
) -> None:
    line = filled("r", intervals)
    end = start + length
    free = all(end <= low or high <= start for low, high in intervals)
    new = BookedInterval(BatchId(2), 0, (line,), start, end)
    if free:
        line.insert(new)
        assert sorted([*intervals, (start, end)]) == list(zip(line.starts, line.ends, strict=True))
    else:
        with pytest.raises(InternalError):
            line.insert(new)
        assert sorted(intervals) == list(zip(line.starts, line.ends, strict=True))


def test_touching_intervals_do_not_overlap_and_gaps_are_filled() -> None:
    line = filled("gpu/a", [(0, 10), (20, 30), (10, 14)])
    assert earliest_slot([line], 0, 6) == 14
    assert earliest_slot([line], 0, 7) == 30
    assert line.busy_until == 30


def test_busy_until_follows_removal_of_the_last_interval() -> None:
    line = filled("gpu/a", [(0, 10), (20, 30)])
    line.remove(line.uses[1])
    assert line.busy_until == 10
    line.ran_until(12)
    line.remove(line.uses[0])
    assert line.busy_until == 12
