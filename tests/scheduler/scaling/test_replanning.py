from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from catenary_scheduler.scaling import ArrivalRates, LoadReplanning, ReplanPolicy, objective_at
from catenary_scheduler.scaling.replanning import distance
from catenary_services.domain.ids import ModelKey

A, B, C = (ModelKey(name, "1") for name in "abc")
S = 1_000_000_000
POLICY = ReplanPolicy(
    moved_share=0.2, lasting_ns=5 * S, interval_ns=10 * S, time_constant_ns=10 * S, least_rows=20.0
)


class Traffic:
    """Steady arrivals on a clock that only this test moves."""

    def __init__(self, policy: ReplanPolicy = POLICY) -> None:
        self.replanning = LoadReplanning(policy)
        self.now = 0
        self.reasons: list[str] = []

    def run(self, seconds: int, **rates: int) -> str:
        """Sends so many rows per second and model; returns the first reason to plan anew."""
        for _ in range(seconds):
            self.now += S
            for name, rate in rates.items():
                self.replanning.rates.arrived(ModelKey(name, "1"), rate, self.now)
            if reason := self.replanning.decide(self.now):
                return reason
        return ""

    def plan(self) -> None:
        self.replanning.planned(self.replanning.shares([A, B], self.now), self.now)


def test_a_rate_forgets_what_is_long_ago() -> None:
    rates = ArrivalRates(10 * S)
    assert rates.rate(A, 5) == 0.0
    for second in range(1, 101):
        rates.arrived(A, 7, second * S)
    assert rates.rate(A, 100 * S) == pytest.approx(7, rel=0.06)
    assert rates.rate(A, 110 * S) == pytest.approx(7 / 2.718, rel=0.06)
    assert rates.observed_rows(A, 100 * S) == pytest.approx(70, rel=0.06)


def test_a_rate_is_right_before_one_time_constant_is_over() -> None:
    rates = ArrivalRates(100 * S)
    for tenth in range(51):
        rates.arrived(A, 1, tenth * S // 10)
    assert rates.rate(A, 5 * S) == pytest.approx(10, rel=0.05)


def test_shares_that_moved_and_stay_moved_are_a_reason() -> None:
    traffic = Traffic()
    traffic.run(30, a=50, b=50)
    traffic.plan()
    assert traffic.run(60, a=50, b=50) == ""
    moved_at = traffic.now
    reason = traffic.run(60, a=90, b=10)
    assert "moved between models: a:1" in reason
    assert traffic.now - moved_at >= POLICY.lasting_ns


def test_a_short_burst_is_no_reason() -> None:
    traffic = Traffic(replace(POLICY, time_constant_ns=2 * S, lasting_ns=12 * S))
    traffic.run(30, a=50, b=50)
    traffic.plan()
    traffic.run(20, a=50, b=50)
    assert traffic.run(4, a=300, b=50) == ""
    burst = traffic.replanning.shares([A, B], traffic.now)
    assert burst[A] > 0.8
    assert traffic.run(30, a=50, b=50) == ""


def test_a_change_that_wavers_about_the_threshold_counts_from_when_it_began() -> None:
    traffic = Traffic(replace(POLICY, time_constant_ns=S))
    traffic.run(30, a=50, b=50)
    traffic.plan()
    traffic.run(12, a=50, b=50)
    traffic.run(2, a=80, b=20)
    # 0.16 of the load has moved: less than the threshold of 0.2, more than 0.6 of it.
    assert traffic.run(2, a=66, b=34) == ""
    assert traffic.run(3, a=80, b=20)


def test_plans_are_some_time_apart() -> None:
    traffic = Traffic(replace(POLICY, interval_ns=100 * S))
    traffic.run(30, a=50, b=50)
    traffic.plan()
    planned = traffic.now
    assert traffic.run(200, a=90, b=10)
    assert traffic.now - planned == 100 * S


def test_a_handful_of_rows_says_nothing() -> None:
    traffic = Traffic()
    traffic.plan()
    assert traffic.run(60, a=1, b=0) == ""
    assert traffic.replanning.shares([A, B], traffic.now) == {A: 0.5, B: 0.5}


def test_without_a_plan_nothing_is_due() -> None:
    assert Traffic().run(60, a=100, b=1) == ""


def test_the_schedule_is_a_reason_of_its_own() -> None:
    traffic = Traffic(replace(POLICY, every_ns=40 * S))
    traffic.run(3, a=50, b=50)
    traffic.plan()
    assert traffic.run(39, a=50, b=50) == ""
    assert traffic.run(1, a=50, b=50) == "the schedule says so"


def test_a_silent_model_keeps_a_share_and_a_new_one_gets_the_usual() -> None:
    traffic = Traffic()
    traffic.run(60, a=100)
    shares = traffic.replanning.shares([A, B], traffic.now)
    assert shares[B] == pytest.approx(0.05 / 1.05)
    fresh = LoadReplanning(POLICY)
    fresh.planned({A: 0.7, B: 0.3}, 0)
    assert fresh.shares([A, B, C], 1) == pytest.approx({A: 0.7 / 1.5, B: 0.3 / 1.5, C: 0.5 / 1.5})
    assert fresh.shares([], 1) == {}


@given(
    st.dictionaries(st.sampled_from([A, B, C]), st.integers(0, 1000), min_size=1),
    st.dictionaries(st.sampled_from([A, B, C]), st.integers(0, 1000), min_size=1),
)
def test_shares_are_shares_and_distances_are_distances(
    one: dict[ModelKey, int], other: dict[ModelKey, int]
) -> None:
    found = []
    for rows in (one, other):
        replanning = LoadReplanning(replace(POLICY, least_rows=1.0))
        for model, count in rows.items():
            replanning.rates.arrived(model, count, 0)
        shares = replanning.shares(rows, 0)
        assert sum(shares.values()) == pytest.approx(1.0)
        assert min(shares.values()) > 0
        found.append(shares)
    assert 0.0 <= distance(*found) <= 1.0 + 1e-9
    assert distance(found[0], found[0]) == 0.0


def test_what_a_plan_is_worth_at_other_shares() -> None:
    assert objective_at({A: 100.0, B: 50.0}, {A: 0.5, B: 0.5}) == 100.0
    assert objective_at({A: 100.0}, {A: 0.5, B: 0.5}) == 0.0
    assert objective_at({}, {}) == 0.0
