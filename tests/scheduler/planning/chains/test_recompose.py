"""Composing again: few blocks move, nothing that could be served is lost."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from catenary_scheduler.planning.chains import (
    ChainTask,
    Composition,
    HostedBlocks,
    Server,
    best_composition,
    recompose,
    response_bounds,
)
from catenary_scheduler.planning.chains.problem import exact
from catenary_services.errors import InvalidInput, PlanInfeasible
from scheduling_cases.literal_chains import chain_tasks


def _cluster(servers: int = 20, rate: float = 0.2) -> ChainTask:
    chance = random.Random(7)
    return ChainTask(
        tuple(
            Server(
                f"s{n}",
                40 if n % 5 == 0 else 20,
                round(chance.uniform(0.4, 1.6), 3),
                0.109 if n % 5 == 0 else 0.175,
            )
            for n in range(servers)
        ),
        70,
        1.32,
        0.11,
        rate,
    )


def _moved(before: Composition, after: Composition) -> int:
    """Counted block by block, from what is hosted."""
    held = {i.server: set(range(i.first_block, i.last_block)) for i in before.hosted}
    return sum(
        len(set(range(i.first_block, i.last_block)) - held[i.server])
        for i in after.hosted
        if i.server in held
    )


def _response(composition: Composition) -> float:
    bounds = response_bounds(
        [chain.capacity for chain in composition.chains],
        [chain.rate_per_s for chain in composition.chains],
        composition.arrivals_per_s,
    )
    assert bounds is not None
    return bounds.response_lower_s


def _without(task: ChainTask, *gone: int) -> ChainTask:
    return replace(task, servers=tuple(s for n, s in enumerate(task.servers) if n not in gone))


def test_nothing_moves_when_nothing_changed() -> None:
    task = _cluster()
    before = best_composition(task)
    again = recompose(task, before)
    assert again.hosted == before.hosted
    assert again.chains == before.chains
    assert (again.moved_blocks, again.loaded_blocks) == (0, 0)


@pytest.mark.parametrize("gone", [(0,), (3,), (5,), (19,), (0, 5), (1, 2, 3)])
def test_when_servers_leave_fewer_blocks_move_than_anew(gone: tuple[int, ...]) -> None:
    task = _cluster(rate=0.6)
    before = best_composition(task)
    smaller = _without(task, *gone)
    anew, again = best_composition(smaller), recompose(smaller, before)
    assert again.moved_blocks == _moved(before, again) < 0.7 * _moved(before, anew)
    assert _response(again) <= 1.05 * _response(anew)
    assert again.stable


def test_newcomers_are_used_and_nobody_else_moves() -> None:
    task = _cluster()
    before = best_composition(task)
    larger = replace(task, servers=(*task.servers, Server("new", 40, 0.5, 0.109)))
    again = recompose(larger, before)
    mine = next(item for item in again.hosted if item.server == "new")
    assert again.moved_blocks == 0
    assert again.loaded_blocks == mine.blocks
    assert any(hop.server == "new" for chain in again.chains for hop in chain.hops)
    assert _response(again) <= 1.05 * _response(best_composition(larger))


@pytest.mark.parametrize("factor", [0.1, 0.5, 2.0, 5.0])
def test_when_the_load_drifts_fewer_blocks_move_than_anew(factor: float) -> None:
    task = _cluster()
    before = best_composition(task)
    drifted = task.at_rate(0.2 * factor)
    anew, again = best_composition(drifted), recompose(drifted, before)
    assert again.moved_blocks == _moved(before, again) <= _moved(before, anew) / 2
    assert _response(again) <= 1.05 * _response(anew)


def test_tolerance_zero_gives_the_best_response_and_a_large_one_moves_nothing() -> None:
    task = _cluster(rate=0.6)
    before, smaller = best_composition(task), _without(task, 0)
    strict, loose = (
        recompose(smaller, before, tolerance=0.0),
        recompose(smaller, before, tolerance=9),
    )
    assert _response(strict) <= _response(best_composition(smaller)) * (1 + 1e-12)
    assert loose.moved_blocks == 0 <= strict.moved_blocks


def test_the_only_holder_of_a_block_is_replaced_by_moving_someone() -> None:
    servers = tuple(Server(name, 10, 0.1, 0.1) for name in "abc")
    task = ChainTask(servers, 12, 1, 0.25, 0.1)
    hosted = (HostedBlocks("a", 0, 6, 16), HostedBlocks("b", 6, 6, 16), HostedBlocks("c", 0, 6, 16))
    again = recompose(_without(task, 1), Composition(2, hosted, (), 0.1))
    assert again.stable
    assert again.moved_blocks == 6


@settings(deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(
    task=chain_tasks(),
    gone=st.sets(st.integers(0, 5), max_size=2),
    joined=st.integers(0, 2),
    factor=st.sampled_from((0.5, 1.0, 2.0)),
    tune=st.sampled_from(("lower", "upper", "surrogate")),
)
def test_feasibility_is_never_lost_and_memory_always_kept(
    task: ChainTask, gone: set[int], joined: int, factor: float, tune: str
) -> None:
    try:
        before = best_composition(task)
    except PlanInfeasible:
        assume(False)
    newcomers = tuple(Server(f"new{n}", 5, 0.3, 0.2) for n in range(joined))
    after = _without(task, *gone)
    after = replace(after, servers=after.servers + newcomers).at_rate(
        exact(task.rate_per_s) * exact(factor)
    )
    try:
        anew = best_composition(after)
    except PlanInfeasible:
        anew = None
    try:
        again = recompose(after, before, tune)  # type: ignore[arg-type]
    except PlanInfeasible:
        assert anew is None
        return
    assert again.chains
    if anew is not None:
        assert again.stable or not anew.stable
    assert again.moved_blocks == _moved(before, again)
    memory = {server.name: exact(server.memory) for server in after.servers}
    taken = dict.fromkeys(memory, 0)
    for chain in again.chains:
        for hop in chain.hops:
            taken[hop.server] += chain.capacity * hop.blocks
    for item in again.hosted:
        block, cache = task.memory_at(after.servers[after.number_of[item.server]])
        assert taken[item.server] <= item.slots
        assert block * item.blocks + cache * item.slots <= memory[item.server]


def test_an_evaluator_judges_what_may_be_kept() -> None:
    task = _cluster(rate=0.6)
    before, smaller = best_composition(task), _without(task, 0)
    calls = []

    def capacity_only(composition: Composition) -> float:
        calls.append(composition.c)
        return 1.0 / composition.capacity

    again = recompose(smaller, before, capacity_only)
    best = best_composition(smaller, capacity_only)
    assert again.capacity * 1.05 >= best.capacity
    assert calls


def test_without_enough_memory_left_it_is_infeasible() -> None:
    task = _cluster(6)
    before = best_composition(task.at_rate(0.01))
    with pytest.raises(PlanInfeasible):
        recompose(_without(task, 0, 1, 2), before)
    with pytest.raises(InvalidInput):
        recompose(task, before, tolerance=-0.1)
