"""A rise is foreseen, chance is not."""

from __future__ import annotations

import random

import pytest

from catenary_scheduler.scaling.workers.trend import ArrivalTrend
from scheduling_cases.virtual_load import poisson

S = 10**9


def fed(rates: list[float], seed: int = 1) -> tuple[ArrivalTrend, int]:
    source, trend = random.Random(seed), ArrivalTrend()
    for second, rate in enumerate(rates):
        for _ in range(poisson(source, rate)):
            trend.arrived(second * S + S // 2)
    return trend, len(rates) * S


def test_a_steady_rise_is_expected_to_go_on() -> None:
    trend, now = fed([2.0 + 0.5 * second for second in range(30)])
    assert trend.ahead(15.0, 10 * S, now) == pytest.approx(22.0, rel=0.25)


def test_no_more_than_twice_the_rate_is_expected() -> None:
    trend, now = fed([1.0 + second for second in range(20)])
    assert trend.ahead(20.0, 100 * S, now) == 40.0


def test_chance_and_a_fall_change_nothing() -> None:
    told = [
        trend.ahead(4.0, 20 * S, now) != 4.0
        for trend, now in (fed([4.0] * 30, seed) for seed in range(200))
    ]
    assert sum(told) <= 2
    falling, now = fed([20.0 - 0.5 * second for second in range(30)])
    assert falling.ahead(5.0, 20 * S, now) == 5.0


def test_what_was_before_a_change_is_forgotten() -> None:
    trend, now = fed([1.0 + second for second in range(20)])
    trend.restart(now)
    assert trend.ahead(20.0, 10 * S, now + 3 * S) == 20.0
