"""A seed means the same faults, victims and moments everywhere."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import pytest

from faults.all_faults import REGISTRY
from faults.schedule import PAIRS, Step, schedule


def drawn(seed: int, steps: int = 200, **options: object) -> list[Step]:
    return list(islice(schedule(seed, **options), steps))  # type: ignore[arg-type]


def test_a_seed_determines_the_schedule() -> None:
    assert list(map(str, drawn(7))) == list(map(str, drawn(7)))


def test_other_seeds_draw_other_schedules() -> None:
    assert len({tuple(map(str, drawn(seed, 5))) for seed in range(20)}) == 20


def test_every_fault_comes_once_before_any_comes_again() -> None:
    steps = drawn(3, len(REGISTRY))
    assert sorted(step.fault.name for step in steps) == sorted(REGISTRY)


def test_a_third_come_in_pairs_of_other_victims() -> None:
    steps = [step for seed in range(5) for step in drawn(seed)]
    pairs = [step for step in steps if step.second is not None]
    assert len(pairs) / len(steps) == pytest.approx(PAIRS, abs=0.06)
    for step in pairs:
        assert step.second is not None
        assert not set(step.fault.victims) & set(step.second.victims)
        assert step.fault.name != step.second.name


def test_the_second_begins_while_the_first_is_in_force() -> None:
    for step in drawn(11, 500):
        if step.second is not None:
            assert 0 < step.offset_s <= max(0.4, step.hold_s)


def test_only_named_faults_are_drawn() -> None:
    names = ("kill-agent", "cut")
    found = Counter(fault.name for step in drawn(5, names=names) for fault in step.faults)
    assert set(found) == set(names)


def test_every_kind_of_process_is_killed_frozen_and_stopped() -> None:
    kinds = ("gateway", "leader", "standby", "agent", "redis")
    wanted = {f"{way}-{kind}" for way in ("kill", "freeze", "stop") for kind in kinds}
    assert wanted <= set(REGISTRY)
    assert len(REGISTRY) >= 30


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_a_fault_says_what_it_is_and_promises_something(name: str) -> None:
    kind = REGISTRY[name]
    assert kind.about
    assert 0 < kind.promise.recovered_s <= 45
    low, high = kind.hold_s
    assert 0 < low <= high
