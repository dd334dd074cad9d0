"""Which c is chosen, against trying every single one."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from catenary_scheduler.planning.chains import (
    ChainTask,
    Composition,
    PeakRate,
    Server,
    best_composition,
    compose,
    gbp_cr,
    response_bounds,
    tune_by_bound,
    tune_by_evaluation,
)
from catenary_scheduler.planning.chains.search import candidates, least_surrogate
from catenary_scheduler.planning.chains.sizes import sizes_of
from catenary_services.errors import InvalidInput, PlanInfeasible
from scheduling_cases.literal_chains import chain_tasks


def _bounded(composition: Composition, *, upper: bool, arrivals: float | None = None) -> float:
    bounds = response_bounds(
        [chain.capacity for chain in composition.chains],
        [chain.rate_per_s for chain in composition.chains],
        arrivals or composition.arrivals_per_s,
    )
    if bounds is None or not composition.groups:
        return math.inf
    return bounds.response_upper_s if upper else bounds.response_lower_s


@settings(deadline=None)
@given(task=chain_tasks() | chain_tasks(4, linked=True), upper=st.booleans())
def test_tuned_c_is_the_best_of_every_c(task: ChainTask, upper: bool) -> None:
    every = {c: _bounded(compose(task, c), upper=upper) for c in range(1, task.largest_c + 1)}
    least = min(every.values(), default=math.inf)
    tuned = tune_by_bound(task, upper=upper)
    if tuned is None:
        assert least == math.inf
    else:
        assert tuned.response_s == pytest.approx(least, rel=1e-12)
        assert tuned.c == min(c for c, value in every.items() if value <= least * (1 + 1e-12))


@settings(deadline=None)
@given(task=chain_tasks())
def test_surrogate_is_the_least_of_every_c(task: ChainTask) -> None:
    every = []
    for c in range(1, task.largest_c + 1):
        needed = gbp_cr(task, c).groups_needed
        if needed is not None:
            every.append((c * needed, c, needed))
    least = least_surrogate(task, sizes_of(task))
    assert least == (min(every)[1:] if every else None)


@settings(deadline=None)
@given(task=chain_tasks())
def test_candidates_are_every_different_placement_once(task: ChainTask) -> None:
    different = {}
    for c in range(1, task.largest_c + 1):
        placed = gbp_cr(task, c)
        if placed.groups:
            different.setdefault((placed.first_block, placed.blocks), c)
    assert [found.c for found in candidates(task, sizes_of(task))] == list(different.values())


def _bursty() -> ChainTask:
    servers = tuple(
        Server(str(n), 40 if n % 4 == 0 else 20, 0.4 + 0.1 * n, 0.1 if n % 4 == 0 else 0.17)
        for n in range(12)
    )
    return ChainTask(servers, 70, 1.32, 0.11, 0.02)


def test_a_peak_rate_takes_the_c_of_that_rate_and_keeps_the_mean() -> None:
    task = _bursty()
    at_peak = best_composition(task, PeakRate(0.4))
    assert at_peak.c == best_composition(task.at_rate(0.4)).c > best_composition(task).c
    assert at_peak.arrivals_per_s == 0.02


def test_an_evaluator_is_asked_once_per_placement_and_obeyed() -> None:
    task, asked = _bursty(), []

    def evaluator(composition: Composition) -> float:
        asked.append(composition.c)
        return math.inf if composition.capacity < 8 else 1.0 / composition.total_rate_per_s

    chosen = best_composition(task, evaluator)
    every, bound = [each.c for each in candidates(task, sizes_of(task))], tune_by_bound(task)
    assert bound is not None
    assert asked == [bound.c, *(c for c in every if c != bound.c)]
    assert len(asked) < task.largest_c / 5
    assert chosen.total_rate_per_s == max(compose(task, c).total_rate_per_s for c in asked)
    assert tune_by_evaluation(task, lambda _: math.inf) is None
    assert tune_by_evaluation(task, lambda _: 1.0).c == bound.c  # type: ignore[union-attr]


@pytest.mark.parametrize("tune", ["lower", "upper", "surrogate"])
def test_every_way_of_tuning_gives_chains_that_carry_the_load(tune: str) -> None:
    composition = best_composition(_bursty(), tune)  # type: ignore[arg-type]
    assert composition.stable
    assert composition.feasible
    assert composition.moved_blocks == 0
    assert composition.loaded_blocks == sum(item.blocks for item in composition.hosted)


def test_too_much_load_gets_the_chains_with_the_greatest_rate() -> None:
    task = _bursty().at_rate(1000.0)
    composition = best_composition(task)
    assert not composition.stable
    greatest = max(compose(task, c).total_rate_per_s for c in range(1, task.largest_c + 1))
    assert composition.total_rate_per_s == pytest.approx(greatest)


@settings(deadline=None)
@given(task=chain_tasks())
def test_chains_are_found_wherever_there_are_any(task: ChainTask) -> None:
    task = replace(task, stop="all")
    feasible = any(compose(task, c).groups for c in range(1, task.largest_c + 1))
    if feasible:
        assert best_composition(task).chains
    else:
        with pytest.raises(PlanInfeasible):
            best_composition(task)


def test_too_little_memory_is_said_in_blocks() -> None:
    task = ChainTask((Server("a", 3, 0.1, 0.1), Server("b", 2, 0.1, 0.1)), 8, 1, 0.1, 0.2)
    with pytest.raises(PlanInfeasible, match="room for 3 of 8 blocks"):
        best_composition(task)


def test_nonsense_is_refused() -> None:
    with pytest.raises(InvalidInput):
        compose(_bursty(), 0)
    with pytest.raises(InvalidInput):
        gbp_cr(_bursty(), 0)
    with pytest.raises(InvalidInput):
        best_composition(_bursty(), "middle")  # type: ignore[arg-type]
