"""Refits from sums: equal to a fit of all rows at once, forgetting, falling back to the prior."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from catenary_scheduler.planning.latency import (
    LineRefit,
    ObservedCost,
    RefitPolicy,
    WorkTotals,
    moved,
)
from catenary_scheduler.planning.latency.nnls import solve_nonnegative
from catenary_scheduler.planning.live import GenerationCost

MS = 1_000_000
COST = GenerationCost(10 * MS, 2 * MS, 50 * MS, 6 * MS, 4_000.0, 52 * MS, 11 * MS, 64)
POINTS = ((2.0, 2.0, 1.0), (4096.0, 8.0, 1.0))
ALL_REMEMBERED = RefitPolicy(memory_steps=0.0, prior_steps=0.0, surprise=0.0)


def steps(cost: GenerationCost, random: np.random.Generator, noise: float = 0.0) -> WorkTotals:
    """Returns a second's work as an agent of this cost would report it."""
    count, sessions = int(random.integers(5, 20)), int(random.integers(2, 9))
    rows, context = count * sessions, count * sessions * int(random.integers(20, 500))
    decode = (
        count * cost.decode_ns
        + rows * cost.decode_session_ns
        + context * cost.decode_context_token_ns
    )
    chunks, tokens = 3, int(random.integers(60, 190))
    lone = int(random.integers(1, 5))
    factors = 1 + random.normal(0, noise, 3) if noise else np.ones(3)
    lone_ns = round(lone * cost.decode_lone_ns * factors[1])
    return WorkTotals(
        decode_steps=count + lone,
        decode_rows=rows + lone,
        decode_context_tokens=context + lone * 100,
        decode_ns=round(decode * factors[0]) + lone_ns,
        prefill_chunks=chunks,
        prefill_tokens=tokens,
        prefill_ns=round((chunks * cost.prefill_ns + tokens * cost.prefill_token_ns) * factors[2]),
        lone_steps=lone,
        lone_context_tokens=lone * 100,
        lone_ns=lone_ns,
    )


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 12))
def test_without_forgetting_it_equals_the_fit_of_all_rows(seed: int, count: int) -> None:
    random = np.random.default_rng(seed)
    rows = random.uniform(1, 100, (count, 3))
    times = random.uniform(1e6, 1e9, count)
    weights = random.integers(1, 30, count)
    refit = LineRefit((1.0, 1.0, 1.0), POINTS, ALL_REMEMBERED)
    for row, time, weight in zip(rows, times, weights, strict=True):
        refit.add(int(weight), row.tolist(), float(time))
    scale = rows.sum(axis=1)  # what a prior of (1, 1, 1) predicts
    scaled, targets = rows / scale[:, None], times / scale
    gram = scaled.T @ (scaled * weights[:, None])
    at_once = solve_nonnegative(gram, scaled.T @ (weights * targets))

    def squares(coefficients: np.ndarray) -> float:
        return float(np.sum(weights * (scaled @ coefficients - targets) ** 2))

    assert np.all(refit.coefficients >= 0)
    assert squares(refit.coefficients) == pytest.approx(
        squares(at_once), rel=1e-6, abs=1e-6 * squares(np.zeros(3))
    )


def test_the_prior_holds_where_nothing_is_reported() -> None:
    """All reports of one load: there the line follows, elsewhere it stays near what was measured."""
    refit = LineRefit((4e3, 6e6, 50e6), POINTS)
    at_load = refit.predict((2 * 50, 2, 1))
    for _ in range(200):
        refit.add(15, (15 * 4 * 100, 15 * 4, 15), 15 * 1.2 * (4e3 * 400 + 6e6 * 4 + 50e6))
    assert refit.predict((400, 4, 1)) == pytest.approx(1.2 * (4e3 * 400 + 74e6), rel=0.02)
    assert refit.predict((2 * 50, 2, 1)) == pytest.approx(at_load, rel=0.25)


def test_the_prior_weighs_as_stated() -> None:
    policy = RefitPolicy(memory_steps=0.0, prior_steps=10.0)
    refit = LineRefit((100.0,), ((1.0,),), policy)
    refit.add(30, (30.0,), 6_000.0)
    # The mean of 10 steps of 100 and 30 of 200: all count by what was expected, 100.
    assert float(refit.coefficients[0]) == pytest.approx(175.0)


def test_neither_fast_nor_slow_reports_weigh_more() -> None:
    """The mean is what sessions experience; weights by what was measured would be 40 % below it."""
    refit = LineRefit((100.0,), ((1.0,),), RefitPolicy(memory_steps=0.0))
    for _ in range(300):
        refit.add(10, (10.0,), 500.0)
        refit.add(10, (10.0,), 2_500.0)
    assert float(refit.coefficients[0]) == pytest.approx(150.0, rel=0.02)


def test_a_pause_counts_for_little_and_what_lasts_is_followed() -> None:
    refit = LineRefit((100.0,), ((1.0,),))
    for _ in range(50):
        refit.add(10, (10.0,), 1_000.0)
    refit.add(10, (10.0,), 1_000_000.0)
    assert float(refit.coefficients[0]) < 110.0
    for _ in range(300):
        refit.add(10, (10.0,), 10_000.0)
    assert float(refit.coefficients[0]) == pytest.approx(1000.0, rel=0.05)


def test_what_was_long_ago_is_forgotten() -> None:
    refit = LineRefit((1e6,), ((1.0,),), RefitPolicy(memory_steps=100.0, prior_steps=1.0))
    for time in (5e6, 2e6):
        for _ in range(100):
            refit.add(20, (20.0,), 20 * time)
    assert refit.predict((1.0,)) == pytest.approx(2e6, rel=0.03)


def test_time_that_cannot_be_teaches_nothing() -> None:
    refit = LineRefit((1e6,), ((1.0,),))
    refit.add(0, (0.0,), 5e6)
    refit.add(3, (3.0,), 0.0)
    assert refit.steps == 0
    assert refit.predict((2.0,)) == 2e6


def test_intervals_of_a_refit_hold_most_steps() -> None:
    random = np.random.default_rng(5)
    refit = LineRefit((4e3, 6e6, 50e6), POINTS, RefitPolicy(memory_steps=0.0))
    inside = 0
    for turn in range(600):
        sessions, depth = int(random.integers(2, 10)), int(random.integers(10, 500))
        row = (sessions * depth, sessions, 1)
        time = (5e3 * row[0] + 7e6 * sessions + 45e6) * random.normal(1, 0.04)
        if turn >= 300:
            inside += time in refit.interval(row, 0.9)
        refit.add(1, row, time)
    assert inside / 300 == pytest.approx(0.9, abs=0.06)


def test_an_agent_that_grew_slower_is_noticed_until_it_is_known() -> None:
    random = np.random.default_rng(1)
    observed = ObservedCost(COST)
    for _ in range(20):
        observed.add(steps(COST, random, 0.004))
        assert not observed.take_change()
    slower = GenerationCost(13 * MS, 2_600_000, 65 * MS, 7_800_000, 5_200.0, 67 * MS, 0, 64)
    told = 0
    for _ in range(400):
        observed.add(steps(slower, random, 0.004))
        told += observed.take_change()
    assert 1 <= told <= 15  # in steps of 3 % until it has arrived
    for _ in range(50):
        observed.add(steps(slower, random, 0.004))
        assert not observed.take_change()
    cost = observed.cost
    assert cost.decode(4, 800) == pytest.approx(slower.decode(4, 800), rel=0.03)
    assert cost.decode(1) == pytest.approx(slower.decode(1), rel=0.03)
    assert cost.prefill(64) == pytest.approx(slower.prefill(64), rel=0.03)
    assert cost.prefill_floor_ns == pytest.approx(11 * MS * 1.3, rel=0.05)


def test_errors_are_of_what_was_predicted_before() -> None:
    observed = ObservedCost(COST)
    observed.add(WorkTotals(prefill_chunks=1, prefill_tokens=64, prefill_ns=round(138 * MS * 1.1)))
    assert observed.prefill_errors.mean == pytest.approx(0.1)
    assert observed.decode_errors.mean == -1.0
    observed.add(
        WorkTotals(
            decode_steps=2, decode_rows=2, decode_ns=130 * MS, lone_steps=2, lone_ns=130 * MS
        )
    )
    assert observed.decode_errors.mean == pytest.approx(0.25)


def test_agents_that_report_no_lone_steps_do_no_harm() -> None:
    """Older ones, and what is impossible: fewer rows than twice the steps that are left."""
    observed = ObservedCost(GenerationCost(10 * MS, 2 * MS, 50 * MS, 6 * MS))
    before = observed.cost
    observed.add(
        WorkTotals(decode_steps=10, decode_rows=10, decode_context_tokens=50, decode_ns=900 * MS)
    )
    assert observed.cost == before
    assert not observed.take_change()


def test_coefficients_that_trade_places_are_no_change() -> None:
    other = GenerationCost(
        10 * MS, 2 * MS, 50 * MS, 6 * MS + 512_000, 3_000.0, 52 * MS, 11 * MS, 64
    )
    assert not moved(COST, other)
    assert moved(COST, GenerationCost(10 * MS, 2 * MS, 60 * MS, 6 * MS, 4_000.0, 52 * MS))
