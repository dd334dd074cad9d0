"""The last minutes of a model: shares, percentiles, what is forgotten."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from catenary_gateway.observability.outcome_kinds import OutcomeKind
from catenary_gateway.observability.outcomes import BUCKET_S, BUCKETS, RecentOutcomes

SECOND = 1_000_000_000
MILLISECOND = 1_000_000


def test_the_share_in_time_is_of_all_that_arrived_but_not_of_clients_own_mistakes() -> None:
    outcomes = RecentOutcomes()
    for kind in (OutcomeKind.GOOD, OutcomeKind.GOOD, OutcomeKind.GOOD, OutcomeKind.LATE):
        outcomes.add("net:1", 0, kind, MILLISECOND, 2)
    outcomes.add_error("net:1", 0, OutcomeKind.LATE, "DEADLINE_EXCEEDED")
    outcomes.add_error("net:1", 0, OutcomeKind.REFUSED, "OVERLOADED")
    outcomes.add_error("net:1", 0, OutcomeKind.CLIENT, "CANCELLED")
    outcomes.add_error("net:1", 0, OutcomeKind.CLIENT, "INVALID_INPUT")
    found = outcomes.of("net:1", 0)
    assert (found.good, found.late, found.refused, found.client) == (3, 2, 1, 2)
    assert (found.arrived, found.rows) == (6, 8)
    assert found.attainment_ratio == pytest.approx(3 / 6)
    assert found.errors == {"DEADLINE_EXCEEDED": 1, "OVERLOADED": 1}
    assert found.client_errors == {"CANCELLED": 1, "INVALID_INPUT": 1}


def test_of_a_model_that_only_had_wrong_requests_nothing_is_claimed() -> None:
    outcomes = RecentOutcomes()
    outcomes.add_error("net:1", 0, OutcomeKind.CLIENT, "INVALID_INPUT")
    assert outcomes.of("net:1", 0).attainment_ratio == -1


def test_of_a_model_without_requests_nothing_is_claimed() -> None:
    found = RecentOutcomes().of("net:1", 7 * SECOND)
    assert found.attainment_ratio == -1
    assert found.p99_ns == 0
    assert found.history == ()


def test_what_is_older_than_the_window_is_forgotten() -> None:
    outcomes = RecentOutcomes()
    outcomes.add("net:1", 0, OutcomeKind.LATE, MILLISECOND, 1)
    last = (BUCKETS - 1) * BUCKET_S * SECOND
    outcomes.add("net:1", last, OutcomeKind.GOOD, MILLISECOND, 1)
    assert outcomes.of("net:1", last).arrived == 2
    assert outcomes.of("net:1", last + BUCKET_S * SECOND).arrived == 1
    assert outcomes.of("net:1", last * 3).history == ()


def test_the_history_says_how_long_ago_each_bucket_was() -> None:
    outcomes = RecentOutcomes()
    for second in (0, 1, 6, 20):
        kind = OutcomeKind.LATE if second == 6 else OutcomeKind.GOOD
        outcomes.add("net:1", second * SECOND, kind, 1, 1)
    outcomes.add_error("net:1", 20 * SECOND, OutcomeKind.REFUSED, "OVERLOADED")
    expected = ((20, 2, 0, 0), (15, 0, 1, 0), (0, 1, 0, 1))
    assert outcomes.of("net:1", 21 * SECOND).history == expected


def test_memory_is_bounded() -> None:
    outcomes = RecentOutcomes()
    for second in range(0, 10_000, BUCKET_S):
        outcomes.add("net:1", second * SECOND, OutcomeKind.GOOD, second + 1, 1)
    assert len(outcomes._models["net:1"]) == BUCKETS


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(100_000, 150 * SECOND), min_size=1, max_size=60),
    st.sampled_from([0.5, 0.99]),
)
def test_percentiles_are_within_five_percent(durations: list[int], share: float) -> None:
    outcomes = RecentOutcomes()
    for duration_ns in durations:
        outcomes.add("net:1", 0, OutcomeKind.GOOD, duration_ns, 1)
    found = outcomes.of("net:1", 0)
    exact = sorted(durations)[math.ceil(len(durations) * share) - 1]
    assert (found.p50_ns if share == 0.5 else found.p99_ns) == pytest.approx(exact, rel=0.05)
