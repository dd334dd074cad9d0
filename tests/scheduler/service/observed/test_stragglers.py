"""Who is a straggler, and who is merely on a noisy host or slower than planned."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from catenary_scheduler.observed.stragglers import Straggler, StragglerDetector
from catenary_services.domain.ids import NANOSECONDS_PER_SECOND, AgentId, ModelKey, PartitionKey

SECOND = NANOSECONDS_PER_SECOND
MS = SECOND // 1000
A, B = AgentId("a"), AgentId("b")
WHOLE = PartitionKey(ModelKey("m", "1"), 0, 4)
HALF = PartitionKey(ModelKey("m", "1"), 4, 8)
PLANNED_NS = 20 * MS


class Host:
    """Two agents on one machine that computes with heavy-tailed noise, and pauses as a whole."""

    def __init__(self, seed: int, *, sigma: float = 0.5, pauses_per_s: float = 0.2) -> None:
        self.random = random.Random(seed)
        self.sigma, self.pauses_per_s = sigma, pauses_per_s
        self.stragglers = StragglerDetector(2.5)
        self.now = 0
        self.found: list[tuple[float, Straggler]] = []

    def run(
        self, seconds: float, slowness: Callable[[AgentId, float], float], period_ms: int = 100
    ) -> None:
        """Both agents report each period, give or take; pauses hit whatever both compute then."""
        end = self.now + round(seconds * SECOND)
        while self.now < end:
            self.now += round(period_ms * MS * self.random.uniform(0.5, 1.5))
            pause = 0
            if self.random.random() < self.pauses_per_s * period_ms / 1000:
                pause = self.random.randint(100, 500) * MS
                self.now += pause
            for agent in (A, B):
                noise = self.random.lognormvariate(0, self.sigma)
                rows = self.random.choice((1, 1, 4))
                base = PLANNED_NS * rows * slowness(agent, self.now / SECOND) * noise
                found = self.stragglers.reported(agent, WHOLE, rows, round(base) + pause, self.now)
                if found is not None:
                    self.found.append((self.now / SECOND, found))
            self.stragglers.look(self.now)


def same(agent: AgentId, at_s: float) -> float:
    return 1.0


@pytest.mark.parametrize("seed", range(20))
def test_an_hour_on_a_noisy_host_makes_nobody_a_straggler(seed: int) -> None:
    host = Host(seed)
    host.run(3600, same, period_ms=200)
    assert host.found == []


@pytest.mark.parametrize("seed", range(5))
def test_an_hour_of_worse_noise_makes_nobody_a_straggler(seed: int) -> None:
    host = Host(seed, sigma=1.0, pauses_per_s=1.0)
    host.run(3600, same, period_ms=200)
    assert host.found == []


@pytest.mark.parametrize("seed", range(20))
def test_a_device_that_becomes_three_times_slower_is_found_in_some_three_seconds(seed: int) -> None:
    host = Host(seed, sigma=0.3)
    host.run(60, same, period_ms=50)
    host.run(5, lambda agent, at_s: 3.0 if agent == B and at_s >= 60 else 1.0, period_ms=50)
    assert {each.agent for _, each in host.found} == {B}
    at_s, found = host.found[0]
    assert at_s <= 64.0
    assert found.ratio > 2.5


def test_a_device_that_was_always_slower_than_planned_is_none() -> None:
    host = Host(1)
    host.run(600, lambda agent, at_s: 4.0 if agent == B else 1.0)
    assert host.found == []


def test_a_slow_start_does_not_hide_what_comes_later() -> None:
    host = Host(3, sigma=0.2)
    host.run(1.5, lambda agent, at_s: 4.0)
    host.run(20, same)
    host.run(10, lambda agent, at_s: 5.0 if agent == B else 1.0)
    assert {each.agent for _, each in host.found} == {B}


def test_if_all_become_slow_nobody_is_a_straggler() -> None:
    host = Host(2, sigma=0.2)
    host.run(60, same)
    host.run(60, lambda agent, at_s: 4.0 if at_s >= 60 else 1.0)
    assert host.found == []


def steady(
    stragglers: StragglerDetector, now: int, seconds: float, **ratios: float
) -> tuple[int, bool]:
    """Reports every 50 ms until the time is over, or somebody is found."""
    end = now + round(seconds * SECOND)
    while now < end:
        now += 50 * MS
        stragglers.look(now)
        for agent, ratio in ratios.items():
            partition = HALF if agent == "c" else WHOLE
            real_ns = round(ratio * PLANNED_NS)
            if stragglers.reported(AgentId(agent), partition, 1, real_ns, now) is not None:
                return now, True
    return now, False


def watched() -> tuple[StragglerDetector, int]:
    """Returns a detector that has seen both be as fast as planned for a while, and the time."""
    stragglers = StragglerDetector(2.5)
    return stragglers, steady(stragglers, 0, 10, a=1.0, b=1.0)[0]


def test_it_is_tried_again_and_left_alone_for_twice_as_long_if_it_is_still_slow() -> None:
    stragglers, now = watched()
    aside_s = []
    for _ in range(6):
        now, found = steady(stragglers, now, 30, a=1.0, b=5.0)
        assert found
        since = now
        while stragglers.slow:
            now, _ = steady(stragglers, now, 0.1, a=1.0)
        aside_s.append(round((now - since) / SECOND))
    assert aside_s == [5, 10, 20, 40, 60, 60]


def test_who_is_still_slow_when_tried_again_is_set_aside_twice_as_quickly() -> None:
    stragglers, now = watched()
    took_s = []
    for _ in range(3):
        before = now
        now, found = steady(stragglers, now, 30, a=1.0, b=5.0)
        assert found
        took_s.append((now - before) / SECOND)
        while stragglers.slow:
            now, _ = steady(stragglers, now, 0.1, a=1.0)
    assert 1.9 <= took_s[0] <= 2.6
    assert max(took_s[1:]) <= 1.3


def test_who_was_itself_when_tried_again_is_not_called_slow_so_quickly_the_next_time() -> None:
    stragglers, now = watched()
    took_s = []
    for _ in range(3):
        before = now
        now, found = steady(stragglers, now, 30, a=1.0, b=5.0)
        assert found
        took_s.append((now - before) / SECOND)
        now, _ = steady(stragglers, now, 6, a=1.0)
        now, _ = steady(stragglers, now, 6, a=1.0, b=1.0)
    assert took_s[0] <= 2.6
    assert took_s[0] < took_s[1] < took_s[2]


def test_without_others_of_its_pools_nobody_is_a_straggler() -> None:
    stragglers = StragglerDetector(2.5)
    now, _ = steady(stragglers, 0, 10, b=1.0, c=1.0)
    assert not steady(stragglers, now, 30, b=9.0, c=1.0)[1]


def test_a_lost_agent_is_forgotten() -> None:
    stragglers, now = watched()
    assert steady(stragglers, now, 10, a=1.0, b=5.0)[1]
    stragglers.forget(B)
    assert not stragglers.slow


def test_a_factor_of_zero_finds_nobody() -> None:
    stragglers = StragglerDetector(0.0)
    now, _ = steady(stragglers, 0, 10, a=1.0, b=1.0)
    assert not steady(stragglers, now, 30, a=1.0, b=1000.0)[1]
