"""CUSUM on rates and lengths: false alarms are rare, changes are found soon."""

from __future__ import annotations

import random

import pytest

from catenary_scheduler.scaling.workers.change_points import ArrivalWatch, LengthWatch

S = 10**9


def poisson(watch: ArrivalWatch, source: random.Random, rate: float, since: int, s: float) -> int:
    """Feeds arrivals for `s` seconds and returns the moment of the last one."""
    now = since
    while True:
        step = int(source.expovariate(rate) * S)
        if now + step > since + int(s * S):
            return now
        now += step
        watch.arrived(now)


@pytest.mark.parametrize("rate", [0.2, 2.0, 20.0])
def test_false_alarms_are_thousands_of_arrivals_apart(rate: float) -> None:
    source, arrivals = random.Random(7), 30_000
    watch, now = ArrivalWatch(), 0
    for _ in range(arrivals):
        now += int(source.expovariate(rate) * S)
        watch.arrived(now)
    assert watch.changes <= arrivals / 7500


@pytest.mark.parametrize(
    ("factor", "median_s"), [(2.0, 25.0), (3.0, 10.0), (5.0, 5.0), (0.5, 50.0), (0.2, 30.0)]
)
def test_a_step_is_found_within_seconds(factor: float, median_s: float) -> None:
    delays = []
    for seed in range(21):
        source, watch = random.Random(seed), ArrivalWatch()
        step = now = poisson(watch, source, 2.0, 0, 200.0)
        before = watch.changes
        while watch.changes == before and now < step + 300 * S:
            now += int(source.expovariate(2.0 * factor) * S)
            watch.arrived(now)
        delays.append((now - step) / S)
    assert sorted(delays)[10] <= median_s


def test_the_rate_after_a_change_is_that_after_the_change() -> None:
    source, watch = random.Random(3), ArrivalWatch()
    step = poisson(watch, source, 2.0, 0, 300.0)
    now = poisson(watch, source, 8.0, step, 30.0)
    assert watch.changes >= 1
    assert watch.rate(now) == pytest.approx(8.0, rel=0.2)


def test_silence_alone_raises_the_alarm() -> None:
    source, watch = random.Random(4), ArrivalWatch()
    now = poisson(watch, source, 2.0, 0, 100.0)
    before = watch.changes
    alarm = next(s for s in range(1, 60) if watch.passed(now + s * S))
    assert watch.changes == before + 1
    assert alarm <= 20
    assert watch.rate(now + 40 * S) < 0.2


def test_the_first_arrivals_are_not_taken_for_a_flood() -> None:
    watch = ArrivalWatch()
    for number in range(3):
        watch.arrived(S + number * S // 100)
    assert watch.rate(S + S // 10) <= 0.6


def test_nothing_seen_is_a_rate_of_nothing() -> None:
    watch = ArrivalWatch()
    assert watch.rate(5 * S) == 0.0
    assert not watch.passed(6 * S)


def test_lengths_that_stay_alike_hardly_ever_raise_an_alarm() -> None:
    source, watch = random.Random(5), LengthWatch()
    for _ in range(30_000):
        watch.observed(1 + int(source.lognormvariate(5, 1)))
    assert watch.changes <= 8
    assert watch.variation == pytest.approx(1.3, abs=0.5)


@pytest.mark.parametrize("to", [6.0, 4.0])
def test_lengths_that_change_are_noticed_and_the_mean_is_the_new_one(to: float) -> None:
    source, watch = random.Random(6), LengthWatch()
    for _ in range(300):
        watch.observed(1 + int(source.lognormvariate(5, 0.7)))
    before = watch.changes
    seen = next(n for n in range(300) if watch.observed(1 + int(source.lognormvariate(to, 0.7))))
    assert watch.changes == before + 1
    assert seen <= 40
    for _ in range(300):
        watch.observed(1 + int(source.lognormvariate(to, 0.7)))
    expected = 2.718281828 ** (to + 0.7**2 / 2)
    assert watch.mean == pytest.approx(expected, rel=0.25)
