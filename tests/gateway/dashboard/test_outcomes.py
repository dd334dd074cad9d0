"""The last minutes of a model: shares, percentiles, what is forgotten."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from catenary_gateway.observability.outcomes import BUCKET_S, BUCKETS, RecentOutcomes

SECOND = 1_000_000_000
MILLISECOND = 1_000_000


def test_the_share_in_time_counts_failures_but_not_those_who_went_away() -> None:
    outcomes = RecentOutcomes()
    for met in (True, True, True, False):
        outcomes.add("net:1", 0, met=met, duration_ns=MILLISECOND, rows=2)
    outcomes.add_error("net:1", 0, "DEADLINE_EXCEEDED", counts=True)
    outcomes.add_error("net:1", 0, "CANCELLED", counts=False)
    found = outcomes.of("net:1", 0)
    assert (found.finished, found.met, found.rows) == (5, 3, 8)
    assert found.attainment_ratio == pytest.approx(3 / 5)
    assert found.errors == {"DEADLINE_EXCEEDED": 1, "CANCELLED": 1}


def test_of_a_model_without_requests_nothing_is_claimed() -> None:
    found = RecentOutcomes().of("net:1", 7 * SECOND)
    assert found.attainment_ratio == -1
    assert found.p99_ns == 0
    assert found.history == ()


def test_what_is_older_than_the_window_is_forgotten() -> None:
    outcomes = RecentOutcomes()
    outcomes.add("net:1", 0, met=False, duration_ns=MILLISECOND, rows=1)
    last = (BUCKETS - 1) * BUCKET_S * SECOND
    outcomes.add("net:1", last, met=True, duration_ns=MILLISECOND, rows=1)
    assert outcomes.of("net:1", last).finished == 2
    assert outcomes.of("net:1", last + BUCKET_S * SECOND).finished == 1
    assert outcomes.of("net:1", last * 3).history == ()


def test_the_history_says_how_long_ago_each_bucket_was() -> None:
    outcomes = RecentOutcomes()
    for second in (0, 1, 6, 20):
        outcomes.add("net:1", second * SECOND, met=second != 6, duration_ns=1, rows=1)
    assert outcomes.of("net:1", 21 * SECOND).history == ((20, 2, 2), (15, 1, 0), (0, 1, 1))


def test_memory_is_bounded() -> None:
    outcomes = RecentOutcomes()
    for second in range(0, 10_000, BUCKET_S):
        outcomes.add("net:1", second * SECOND, met=True, duration_ns=second + 1, rows=1)
    assert len(outcomes._models["net:1"]) == BUCKETS


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(100_000, 150 * SECOND), min_size=1, max_size=60),
    st.sampled_from([0.5, 0.99]),
)
def test_percentiles_are_within_five_percent(durations: list[int], share: float) -> None:
    outcomes = RecentOutcomes()
    for duration_ns in durations:
        outcomes.add("net:1", 0, met=True, duration_ns=duration_ns, rows=1)
    found = outcomes.of("net:1", 0)
    exact = sorted(durations)[math.ceil(len(durations) * share) - 1]
    assert (found.p50_ns if share == 0.5 else found.p99_ns) == pytest.approx(exact, rel=0.05)
