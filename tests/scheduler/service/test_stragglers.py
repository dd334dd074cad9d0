"""Who is too slow to get anything, for how long, and what a plan looks like without it."""

from __future__ import annotations

import pytest

from scheduler.stragglers import Stragglers
from services.domain.ids import (
    NANOSECONDS_PER_SECOND,
    AgentId,
    ModelKey,
    PartitionKey,
    PlanId,
)
from services.domain.plan import ModelPlan, Pipeline, Plan, Stage

SECOND = NANOSECONDS_PER_SECOND
A, B, C = AgentId("a"), AgentId("b"), AgentId("c")
MODEL = ModelKey("m", "1")


def report(stragglers: Stragglers, now: int, **ratios: float) -> bool:
    for agent, ratio in ratios.items():
        stragglers.reported(AgentId(agent), round(ratio * 1000), 1000, now)
    return stragglers.look(now)


def plan(*pools: tuple[AgentId, ...]) -> Plan:
    stages = tuple(
        Stage(PartitionKey(MODEL, n, n + 1), pool, (1000,), 10) for n, pool in enumerate(pools)
    )
    return Plan(PlanId("p"), (ModelPlan(MODEL, SECOND, (Pipeline("x", 1, stages),)),))


def pools_of(found: Plan) -> list[tuple[AgentId, ...]]:
    return [stage.agents for stage in found.models[0].pipelines[0].stages]


def test_an_agent_five_times_slower_is_set_aside_after_three_reports() -> None:
    stragglers = Stragglers(2.5)
    for n in range(10):
        report(stragglers, n, a=1.0, b=1.0)
    changes = [report(stragglers, n, a=1.0, b=5.0) for n in range(10, 13)]
    assert changes == [False, False, True]
    assert stragglers.aside == {B}


def test_one_late_batch_or_two_are_noise() -> None:
    stragglers = Stragglers(2.5)
    for n in range(40):
        assert not report(stragglers, n, a=1.0, b=20.0 if n % 5 < 2 else 1.0)


def test_if_all_are_slow_nobody_is_set_aside() -> None:
    stragglers = Stragglers(2.5)
    for n in range(10):
        assert not report(stragglers, n, a=5.0, b=5.0, c=6.0)


def test_the_only_agent_that_reports_is_not_set_aside() -> None:
    stragglers = Stragglers(2.5)
    assert not any(report(stragglers, n, b=9.0) for n in range(10))


def test_it_is_tried_again_and_left_alone_for_twice_as_long_if_it_is_still_slow() -> None:
    stragglers = Stragglers(2.5)
    now, aside_s = 0, []
    for _ in range(7):
        while not report(stragglers, now, a=1.0, b=5.0):
            now += SECOND // 10
        since = now
        while stragglers.aside:
            now += SECOND // 10
            report(stragglers, now, a=1.0)
        aside_s.append(round((now - since) / SECOND))
    assert aside_s == [5, 10, 20, 40, 60, 60, 60]


def test_one_that_was_itself_again_begins_anew() -> None:
    stragglers = Stragglers(2.5)
    now = 0
    while not report(stragglers, now, a=1.0, b=5.0):
        now += 1
    now += 5 * SECOND
    for _ in range(20):
        now += SECOND // 10
        report(stragglers, now, a=1.0, b=1.0)
    assert not stragglers.aside
    while not report(stragglers, now, a=1.0, b=5.0):
        now += 1
    assert not stragglers.look(now + 5 * SECOND - 1)
    assert stragglers.look(now + 5 * SECOND)


def test_reports_of_long_ago_say_nothing() -> None:
    stragglers = Stragglers(2.5)
    for n in range(4):
        report(stragglers, n, a=1.0, b=5.0)
    assert not report(stragglers, 60 * SECOND, a=1.0, b=5.0)


def test_a_lost_agent_is_forgotten() -> None:
    stragglers = Stragglers(2.5)
    for n in range(5):
        report(stragglers, n, a=1.0, b=5.0)
    stragglers.forget(B)
    assert not stragglers.aside


def test_it_is_in_no_pool_that_has_others() -> None:
    stragglers = Stragglers(2.5)
    whole = plan((A, B), (B,), (C, B, A))
    assert stragglers.without(whole) is whole
    for n in range(5):
        report(stragglers, n, a=1.0, b=5.0, c=1.0)
    assert pools_of(stragglers.without(whole)) == [(A,), (B,), (C, A)]
    assert stragglers.without(whole).plan_id == whole.plan_id


@pytest.mark.parametrize("ratio", [5.0, 1000.0])
def test_a_factor_of_zero_sets_nobody_aside(ratio: float) -> None:
    stragglers = Stragglers(0.0)
    assert not any(report(stragglers, n, a=1.0, b=ratio) for n in range(10))


def test_who_was_not_heard_of_gets_nothing_new_until_it_is() -> None:
    stragglers = Stragglers(0.0)
    assert stragglers.look(0, frozenset({B}))
    assert not stragglers.look(1, frozenset({B}))
    assert pools_of(stragglers.without(plan((A, B), (B,)))) == [(A,), (B,)]
    assert stragglers.slow == frozenset()
    assert stragglers.look(2)
    assert stragglers.aside == frozenset()
