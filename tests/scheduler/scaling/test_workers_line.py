"""Workers by rate: least squares, a prior in closed form, and R."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import nnls

from catenary_scheduler.scaling import ModelScaling
from catenary_scheduler.scaling.workers.workers_line import (
    SessionLengths,
    WorkersLine,
    capability,
    least_rate,
    prior_pairs,
    staffed,
)
from catenary_services.domain.ids import ModelKey
from catenary_services.domain.latency import LatencyLines, TokenObjectives
from scheduling_cases import virtual_load
from scheduling_cases.virtual_load import VirtualLoad

MS = 10**6
MODEL = ModelKey("llm", "1")
LINES = LatencyLines(
    prefill_token_ns=0.12 * MS,
    prefill_ns=14 * MS,
    decode_context_token_ns=600.0,
    decode_session_ns=0.26 * MS,
    decode_ns=14 * MS,
    decode_lone_ns=14.5 * MS,
)
OBJECTIVES = TokenObjectives(600 * MS, 30 * MS)
LENGTHS = SessionLengths(228.0, 471.0)
PAIRS = st.lists(st.tuples(st.floats(0.1, 50.0), st.floats(0.1, 40.0)), min_size=2, max_size=12)


@given(PAIRS)
def test_the_fit_is_the_non_negative_least_squares_fit(pairs: list[tuple[float, float]]) -> None:
    line = WorkersLine(prior_weight=float(len(pairs)))
    line.set_prior(pairs)
    rates = np.array([rate for rate, _ in pairs])
    if np.ptp(rates) < 1e-3:
        return
    workers = np.array([number for _, number in pairs])
    best, _ = nnls(np.stack([rates, np.ones_like(rates)], axis=1), workers)
    assert line.k5 >= 0.0 <= line.c5

    def error(k5: float, c5: float) -> float:
        return float(np.sum((k5 * rates + c5 - workers) ** 2))

    assert error(line.k5, line.c5) <= error(*best) + 1e-6 * (1 + error(*best))


def test_needed_workers_are_rounded_up() -> None:
    line = WorkersLine()
    line.set_prior([(0.0, 1.0), (10.0, 6.0)])
    assert (line.k5, line.c5) == pytest.approx((0.5, 1.0))
    assert [line.needed(rate) for rate in (0.0, 1.0, 2.0, 10.0, 10.1)] == [1, 2, 2, 6, 7]


def test_history_outweighs_the_prior_and_can_be_forgotten() -> None:
    line = WorkersLine(prior_weight=8.0)
    line.set_prior([(rate, 0.5 * rate + 1) for rate in (1.0, 5.0, 10.0)])
    for _ in range(40):
        line.learn(10.0, 9.0)
    assert line.workers(10.0) == pytest.approx(9.0, abs=0.6)
    line.forget()
    assert line.workers(10.0) == pytest.approx(6.0)


def test_a_record_goes_through_json_and_is_checked() -> None:
    line, other = WorkersLine(), WorkersLine()
    line.set_prior([(1.0, 2.0), (4.0, 3.0)])
    line.learn(3.0, 5.0)
    other.restore(json.loads(json.dumps(line.to_record())))
    assert (other.k5, other.c5) == pytest.approx((line.k5, line.c5))
    with pytest.raises(ValueError, match="five sums"):
        other.restore({"prior": [1.0]})


def test_the_closed_form_is_a_steady_state_that_just_meets_the_objective() -> None:
    worker = capability(LINES, OBJECTIVES, LENGTHS, 0, 1.0)
    prompts = worker.rate_per_s * LINES.prefill(LENGTHS.prompt_tokens) / 1e9
    per_token_ns = OBJECTIVES.per_token_ns
    sessions = worker.rate_per_s * LENGTHS.answer_tokens * per_token_ns / 1e9  # Little's law
    context = sessions * (LENGTHS.prompt_tokens + LENGTHS.answer_tokens / 2)
    step = (
        LINES.decode_context_token_ns * context
        + LINES.decode_session_ns * sessions
        + LINES.decode_ns
    )
    assert per_token_ns * (1 - prompts) == pytest.approx(step, rel=1e-6)


def test_the_prior_for_13b_is_near_the_line_simulations_gave() -> None:
    # Aladdin with the measured coefficients of 13b: about 0.83 r + 1.2 (specification, section 3).
    line = WorkersLine()
    line.set_prior(prior_pairs(capability(LINES, OBJECTIVES, LENGTHS, 0, 0.75), 2.0))
    for rate in (5.0, 10.0, 15.0, 20.0, 25.0):
        assert line.workers(rate) == pytest.approx(0.83 * rate + 1.2, rel=0.25)


@pytest.mark.parametrize("rate", [2.0, 6.0])
def test_the_prior_is_within_a_worker_of_what_a_simulation_finds(rate: float) -> None:
    def attainment(workers: int) -> float:
        load = VirtualLoad(
            ModelScaling(MODEL), lambda _: rate, least=workers, most=workers, workers=workers
        )
        load.run(80)
        return load.met / load.finished

    worker = capability(virtual_load.LINES, virtual_load.OBJECTIVES, virtual_load.LENGTHS, 32, 0.9)
    line = WorkersLine()
    line.set_prior(prior_pairs(worker, 1.0))
    needed = line.needed(rate)
    assert attainment(needed + 1) >= 0.95
    assert attainment(needed - 1) < 0.95  # two fewer than is surely enough are too few


def test_slots_bind_where_there_are_few() -> None:
    free = capability(LINES, OBJECTIVES, LENGTHS, 0, 0.9)
    bound = capability(LINES, OBJECTIVES, LENGTHS, 4, 0.9)
    assert bound.rate_per_s < free.rate_per_s
    assert bound.sessions <= 4
    assert capability(LINES, OBJECTIVES, LENGTHS, 1000, 0.9) == free


@given(st.floats(1.0, 4000.0), st.floats(1.0, 2000.0), st.integers(0, 64), st.floats(0.1, 1.0))
def test_a_worker_always_sustains_something(
    prompt: float, answer: float, slots: int, theta: float
) -> None:
    for objectives in (None, OBJECTIVES, TokenObjectives(0, 1), TokenObjectives(1, 0)):
        worker = capability(LINES, objectives, SessionLengths(prompt, answer), slots, theta)
        assert worker.rate_per_s > 0.0
        assert worker.sessions >= 1.0


def test_longer_answers_and_tighter_objectives_need_more_workers() -> None:
    usual = capability(LINES, OBJECTIVES, LENGTHS, 0, 0.9).rate_per_s
    longer = capability(LINES, OBJECTIVES, SessionLengths(228.0, 900.0), 0, 0.9).rate_per_s
    tighter = capability(LINES, replace(OBJECTIVES, per_token_ns=20 * MS), LENGTHS, 0, 0.9)
    assert longer < usual
    assert tighter.rate_per_s < usual


def test_larger_workers_need_less_headroom() -> None:
    assert staffed(4.0, 100.0, 1.0) < staffed(4.0, 4.0, 1.0) == 5.0


def test_a_rate_stands_for_the_lengths_if_its_standard_error_is_small() -> None:
    # SEM = sigma / sqrt(n) <= error * mean, n = rate * window
    rate = least_rate(variation=1.0, window_s=40.0, error=0.25)
    assert rate * 40.0 == pytest.approx(16.0)
