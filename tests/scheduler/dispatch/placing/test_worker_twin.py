"""Running sums against the literal constraints, whatever happened to a worker before."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from catenary_scheduler.dispatch.placing.adaptation import Adaptation, AdaptationConfig
from catenary_scheduler.dispatch.placing.constraints import PaperReadings, examine
from catenary_scheduler.dispatch.placing.jobs import Job, WorkerLimits
from catenary_scheduler.dispatch.placing.occupancy import RunningSequence
from catenary_scheduler.dispatch.placing.worker import Worker
from catenary_services.domain.latency import LatencyLines
from scheduling_cases.pipelines import request

MS = 1_000_000
T_PRE, T_DEC = 600 * MS, 30 * MS
LINES = LatencyLines(0.124e6, 13.9e6, 451.0, 0.0756e6, 22.5e6, 23.1e6, cache_session=2.0)
STEP = st.tuples(
    st.sampled_from(["add", "progress", "repredict", "remove"]),
    st.integers(0, 5),
    st.integers(1, 300),
    st.integers(1, 400),
)


def applied(worker: Worker, steps: list[tuple[str, int, int, int]], now: int) -> None:
    """Makes a worker that has seen adds, reports and ends, all placed and heard of just now."""
    for what, number, tokens, more in steps:
        running = worker.running_sequences.get(request(number))
        if what == "add":
            worker.add(
                RunningSequence(request(number), tokens, float(more), T_DEC, now + T_PRE, now)
            )
        elif running is None:
            continue
        elif what == "progress":
            generated = running.generated_tokens + tokens
            spent = (generated - 1) * 27.0 * MS
            worker.progressed(running, generated, spent, now, 0)
        elif what == "repredict":
            worker.repredict(running, float(more))
        else:
            worker.remove(request(number))


@settings(max_examples=150)
@given(
    st.lists(STEP, max_size=25),
    st.integers(1, 500),
    st.integers(1, 500),
    st.sampled_from([math.inf, 300.0, 900.0]),
    st.sampled_from([0.6, 0.9, 1.0]),
)
def test_the_fast_path_agrees_with_the_definitions(
    steps: list[tuple[str, int, int, int]],
    prompt: int,
    predicted: int,
    capacity: float,
    theta: float,
) -> None:
    now = 10**12
    limits = WorkerLimits(T_PRE, T_DEC, capacity, 0.5, theta)
    worker = Worker(LINES, limits)
    applied(worker, steps, now)
    worker.look(now)
    jobs = [running.job() for running in worker.running_sequences.values()]
    verdict = examine(LINES, limits, jobs, Job(prompt, predicted), PaperReadings(strict_slack=True))
    assert worker.has_context(prompt, predicted, T_DEC, theta) == verdict.context.ok
    assert worker.has_cache(prompt, predicted) == verdict.cache.ok
    stall = worker.stall_ns(prompt)
    assert verdict.prompts.used == pytest.approx(stall)
    if verdict.slack.allowed is None:
        assert worker.least_saved_ns == math.inf
    else:
        assert theta * worker.least_saved_ns == pytest.approx(verdict.slack.allowed, abs=1.0)


def test_prompts_run_in_one_pass_until_the_next_step_then_nobody_joins_them() -> None:
    worker = Worker(LINES, WorkerLimits(T_PRE, T_DEC, math.inf))
    old = RunningSequence(request(1), 100, 500.0, T_DEC, T_PRE, 0)
    worker.add(old)
    worker.progressed(old, 200, 199 * 25.0 * MS, 6000 * MS, 100 * MS)
    worker.look(6000 * MS)
    worker.add(RunningSequence(request(2), 100, 50.0, T_DEC, 7000 * MS, 6000 * MS))
    worker.look(6001 * MS)
    assert worker.joining == 1
    assert worker.least_saved_ns > 0
    worker.look(6040 * MS)  # its first token may be there, and nobody shall delay its second
    assert worker.joining == 0
    assert worker.least_saved_ns == 0.0


def test_a_prompt_on_an_idle_worker_runs_at_once_so_nobody_joins_it() -> None:
    worker = Worker(LINES, WorkerLimits(T_PRE, T_DEC, math.inf))
    worker.add(RunningSequence(request(1), 100, 50.0, T_DEC, T_PRE, 0))
    worker.look(0)
    assert worker.joining == 1
    worker.look(1 * MS)
    assert worker.joining == 0
    assert worker.least_saved_ns == 0.0


def test_a_gateway_that_never_reports_does_not_close_a_worker_for_good() -> None:
    worker = Worker(LINES, WorkerLimits(T_PRE, T_DEC, math.inf))
    worker.add(RunningSequence(request(1), 100, 5000.0, T_DEC, T_PRE, 0))
    worker.look(1 * MS)
    assert worker.least_saved_ns == 0.0
    worker.look(6000 * MS)
    assert worker.least_saved_ns == math.inf
    assert worker.pending_ns == 0.0


def test_what_is_saved_grows_between_reports_and_a_prompt_of_others_is_not_forgotten() -> None:
    worker = Worker(LINES, WorkerLimits(T_PRE, T_DEC, math.inf))
    old = RunningSequence(request(1), 100, 50.0, T_DEC, T_PRE, 0)
    worker.add(old)
    worker.progressed(old, 21, 20 * 25.0 * MS, 600 * MS, 100 * MS)
    worker.look(600 * MS)
    assert worker.least_saved_ns == pytest.approx(20 * 5 * MS)
    worker.look(650 * MS)
    assert worker.least_saved_ns > 20 * 5 * MS
    new = RunningSequence(request(2), 300, 50.0, T_DEC, 0, 650 * MS)
    worker.add(new)
    worker.progressed(new, 1, 0.0, 700 * MS, 700 * MS)  # ran after the old one was heard of
    worker.look(700 * MS)
    assert old.saved_ns <= 20 * 5 * MS - 100 * MS


def test_harm_is_a_share_of_those_who_would_fall_behind_and_none_of_the_others() -> None:
    worker = Worker(LINES, WorkerLimits(T_PRE, T_DEC, math.inf))
    for number, generated in ((1, 2), (2, 400)):
        running = RunningSequence(request(number), 100, 500.0, T_DEC, T_PRE, 0)
        worker.add(running)
        worker.progressed(running, generated, (generated - 1) * 25.0 * MS, 10**10, 0)
    worker.look(10**10)
    assert worker.harm(1.0 * MS, 0.0) == 0.0
    assert 0.0 < worker.harm(60.0 * MS, 0.0) < 1.0
    assert worker.harm(500.0 * MS, 0.0) > worker.harm(60.0 * MS, 0.0)
    assert 1.0 < worker.harm(50_000_000.0 * MS, 0.0) < 2.0


def test_prompts_in_chunks_hold_nobody_up_for_the_whole_of_them() -> None:
    chunked = LatencyLines(0.124e6, 13.9e6, 451.0, 0.0756e6, 22.5e6, prefill_chunk_tokens=512)
    stalls = []
    for lines in (LINES, chunked):
        worker = Worker(lines, WorkerLimits(T_PRE, T_DEC, math.inf))
        running = RunningSequence(request(1), 100, 500.0, T_DEC, T_PRE, 0)
        worker.add(running)
        worker.progressed(running, 400, 399 * 25.0 * MS, 10**10, 0)
        worker.look(10**10)
        stalls.append(worker.stall_ns(2048) - 3 * (lines is chunked) * lines.prefill_ns)
    assert stalls[1] < stalls[0]


def test_in_chunks_nobody_joins_who_would_have_its_token_before_and_first_tokens_take_steps() -> (
    None
):
    chunked = LatencyLines(0.124e6, 13.9e6, 451.0, 0.0756e6, 22.5e6, prefill_chunk_tokens=512)
    worker = Worker(chunked, WorkerLimits(T_PRE, T_DEC, math.inf))
    worker.add(RunningSequence(request(1), 400, 50.0, T_DEC, T_PRE, 0))
    worker.look(0)
    assert worker.may_join(112)
    assert not worker.may_join(113)
    one, three = worker.prompt_ns(512, 20.0 * MS), worker.prompt_ns(1536, 20.0 * MS)
    assert three == pytest.approx(3 * one)
    assert one == pytest.approx(512 * 0.124e6 + 13.9e6 + 20.0 * MS)


def ends(adaptation: Adaptation, count: int, *, attained: bool, forced: bool = False) -> None:
    for _ in range(count):
        adaptation.ended(attained=attained, forced=forced)


def test_theta_falls_while_too_many_miss_and_comes_back_when_few_do() -> None:
    adaptation = Adaptation(AdaptationConfig(window=200, interval=50))
    for _ in range(40):
        ends(adaptation, 5, attained=False)
        ends(adaptation, 45, attained=True)
    assert adaptation.theta == adaptation.config.least_theta
    ends(adaptation, 1000, attained=True)
    assert adaptation.theta == adaptation.config.theta
    assert adaptation.is_safe


def test_theta_does_not_fall_when_the_cluster_is_full() -> None:
    adaptation = Adaptation(AdaptationConfig(window=200, interval=50))
    for _ in range(20):
        ends(adaptation, 5, attained=False, forced=True)
        ends(adaptation, 45, attained=True)
    assert adaptation.theta == adaptation.config.theta
    assert not adaptation.is_safe


def test_one_change_of_theta_waits_for_enough_sessions_after_the_last() -> None:
    adaptation = Adaptation(AdaptationConfig(window=200, interval=50, step=0.1))
    ends(adaptation, 50, attained=False)
    assert adaptation.theta == pytest.approx(0.9)
    ends(adaptation, 49, attained=False)
    assert adaptation.theta == pytest.approx(0.9)
    ends(adaptation, 1, attained=False)
    assert adaptation.theta == pytest.approx(0.8)
