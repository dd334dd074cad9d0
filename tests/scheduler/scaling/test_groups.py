"""Eq. 8 against every division there is."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from catenary_scheduler.scaling.groups import divide, rate_within
from catenary_services.errors import InvalidInput, PlanInfeasible


def divisions(workers: int) -> Iterator[tuple[int, ...]]:
    """Every way to divide workers into groups, as sorted sizes."""
    for bars in itertools.product((False, True), repeat=workers - 1):
        sizes, size = [], 1
        for bar in bars:
            if bar:
                sizes.append(size)
                size = 1
            else:
                size += 1
        yield (*sizes, size)


def allowed(sizes: tuple[int, ...], rate: float, waste: float, limit: float) -> bool:
    workers = sum(sizes)
    small = len(sizes) > 1 and any(2 * waste * size < 1 - 1e-9 for size in sizes)
    fast = any(rate * size / workers > limit * (1 + 1e-9) for size in sizes)
    return not small and not fast


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 11),
    st.integers(0, 60),
    st.sampled_from([0.05, 0.1, 0.125, 0.25, 0.5, 1.0]),
    st.integers(1, 30),
)
def test_the_fewest_groups_that_eq_8_allows(
    workers: int, rate: int, waste: float, limit: int
) -> None:
    possible = [each for each in divisions(workers) if allowed(each, rate, waste, limit)]
    if not possible:
        with pytest.raises(PlanInfeasible):
            divide(workers, rate, waste, limit)
        return
    grouping = divide(workers, rate, waste, limit)
    sizes = tuple(group.workers for group in grouping.groups)
    assert allowed(sizes, rate, waste, limit)
    assert len(sizes) == min(map(len, possible))
    assert sum(sizes) == workers
    assert max(sizes) - min(sizes) <= 1
    assert math.isclose(sum(g.arrivals_per_s for g in grouping.groups), rate, abs_tol=1e-9)


def test_a_waste_of_ten_percent_needs_five_workers_a_group() -> None:
    grouping = divide(40, 100.0, 0.1, 13.0)
    assert [group.workers for group in grouping.groups] == [5] * 8
    assert grouping.least_workers == 5
    assert grouping.waste_ratio == pytest.approx(0.1)
    with pytest.raises(PlanInfeasible, match="fewer than 5"):
        divide(40, 100.0, 0.1, 12.0)


def test_one_scheduler_that_keeps_up_leads_any_number_and_wastes_nothing() -> None:
    grouping = divide(3, 100.0, 0.1, 100.0)
    assert [(g.workers, g.arrivals_per_s) for g in grouping.groups] == [(3, 100.0)]
    assert grouping.wasted_workers == 0.0
    assert len(divide(7, 0.0, 0.1, 1e-6).groups) == 1


def test_the_rate_within_a_latency_is_that_of_a_queue_of_constant_service_times() -> None:
    decision_s, latency_s = 1e-4, 5e-3
    rate = rate_within(decision_s, latency_s)
    load = rate * decision_s
    assert load < 1
    latency = decision_s + load * decision_s / (2 * (1 - load))
    assert latency == pytest.approx(latency_s)
    assert rate_within(5e-3, 5e-3) == 0.0
    assert rate_within(1e-4, 1e3) == pytest.approx(1e4, rel=1e-3)


@pytest.mark.parametrize(
    "figures", [(0, 1.0, 0.1, 1.0), (1, -1.0, 0.1, 1.0), (1, 1.0, 0.0, 1.0), (1, 1.0, 0.1, 0.0)]
)
def test_figures_out_of_range_are_refused(figures: tuple[int, float, float, float]) -> None:
    with pytest.raises(InvalidInput):
        divide(*figures)
