from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from catenary_scheduler.planning.latency import DeviceShape, WorkerDemand, throughput
from catenary_scheduler.planning.latency.steady_state import (
    ChainWork,
    LoadLimit,
    chain_work,
    shared_rates,
)
from catenary_services.domain.latency import LatencyLines, TokenObjectives

LINES = LatencyLines(10.0, 100.0, 0.1, 1.0, 20.0)
GRID = 4_000

works = st.builds(
    ChainWork,
    prompt_ns=st.floats(1.0, 1e4),
    steps=st.floats(1.0, 500.0),
    session_ns=st.floats(0.0, 50.0),
    step_ns=st.floats(1.0, 1e3),
    lone_ns=st.floats(1.0, 1e3),
    slots=st.floats(1.0, 64.0),
    chunks=st.sampled_from([1.0, 4.0]),
)
limits = st.builds(
    TokenObjectives, st.sampled_from([0, 500, 5_000, 50_000]), st.sampled_from([0, 10, 200, 2_000])
)


@settings(max_examples=200, deadline=None)
@given(works, limits)
def test_the_rate_is_the_largest_of_a_fine_grid_that_keeps_every_limit(
    work: ChainWork, objectives: TokenObjectives
) -> None:
    """Twin: every rate of a grid up to that of a chain that does nothing else is tried."""
    rate, limit = work.sustained(objectives)
    if rate:
        assert work.exceeded(rate, objectives) is None
    most = 1.0 / work.prompt_ns
    kept = [
        each
        for number in range(GRID + 1)
        if work.exceeded(each := number * most / GRID, objectives) is None
    ]
    best = max(kept, default=0.0)
    assert best * (1 - 1e-9) <= rate <= best + most / GRID * (1 + 1e-9)
    if rate and rate < 0.999 * most:
        assert limit is work.exceeded(rate * (1 + 1e-9), objectives)


@settings(max_examples=100, deadline=None)
@given(works, st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_more_sessions_never_make_any_of_them_faster(
    work: ChainWork, one: float, other: float
) -> None:
    most = 1.0 / (work.prompt_ns + work.session_ns * work.steps)
    few, many = (share * most for share in sorted((one, other)))
    assert work.per_token_ns(few) <= work.per_token_ns(many)
    assert work.first_token_ns(few) <= work.first_token_ns(many) * (1 + 1e-9)
    assert work.sessions(few) <= work.sessions(many) * (1 + 1e-9)


@pytest.mark.parametrize("per_token_ns", [25.0, 30.0, 100.0])
def test_without_prompts_it_is_the_throughput_of_eq_6(per_token_ns: float) -> None:
    demand = WorkerDemand(100.0, 50.0, 5.0, 10.0, per_token_ns)
    expected = throughput(demand, DeviceShape(1, replace(LINES, prefill_token_ns=0.0)))
    # 10 slots of 5 bytes in what the weights leave; a context of 10 tokens, as in the demand.
    work = replace(chain_work(LINES, "decode", (5.0, 10.0), 10.0), lone_ns=0.0)
    rate, limit = work.sustained(TokenObjectives(0, int(per_token_ns)), share=1.0)
    assert rate * work.steps == pytest.approx(expected, rel=1e-6)
    assert limit is (LoadLimit.PER_TOKEN if per_token_ns < 40.0 else LoadLimit.SLOTS)


def test_a_session_that_is_alone_may_use_all_of_its_objective_but_no_more() -> None:
    work = chain_work(LINES, "mixed", (10.0, 10.0), 4.0)
    alone = int(work.lone_ns) + 1
    assert work.sustained(TokenObjectives(0, alone))[0] > 0.0
    assert work.sustained(TokenObjectives(0, int(work.lone_ns) - 1)) == (0.0, LoadLimit.PER_TOKEN)
    assert work.sustained(TokenObjectives(int(work.prompt_ns) - 1, 0)) == (
        0.0,
        LoadLimit.FIRST_TOKEN,
    )


def test_roles_do_their_part_of_the_work() -> None:
    lengths = (10.0, 11.0)
    both = chain_work(LINES, "mixed", lengths, 4.0)
    prompts, rest = (chain_work(LINES, role, lengths, 4.0) for role in ("prefill", "decode"))
    assert (prompts.prompt_ns, prompts.steps) == (both.prompt_ns, 0.0)
    assert (rest.prompt_ns, rest.steps) == (0.0, both.steps)
    assert prompts.per_token_ns(0.001) == rest.first_token_ns(0.001) == 0.0


def test_a_load_is_shared_by_what_each_sustains_and_no_further() -> None:
    assert shared_rates([1.0, 3.0], 2.0) == [0.5, 1.5]
    assert shared_rates([1.0, 3.0], 8.0) == [1.0, 3.0]
    assert shared_rates([0.0, 0.0], 8.0) == [0.0, 0.0]
