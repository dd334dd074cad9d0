"""What is booked follows what is reported, robustly and within bounds."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from catenary_scheduler.dispatch.pooled.booked_times import BookedTimes
from catenary_services.domain.ids import NANOSECONDS_PER_SECOND, AgentId, ModelKey, PartitionKey

SECOND = NANOSECONDS_PER_SECOND
A, B = AgentId("a"), AgentId("b")
KEY = PartitionKey(ModelKey("m", "1"), 0, 4)
PLANNED = (10_000_000, 18_000_000, 25_000_000, 32_000_000)


def tell(times: BookedTimes, agent: AgentId, rows: int, factor: float, reports: int = 40) -> None:
    for n in range(reports):
        times.reported(agent, KEY, rows, round(factor * PLANNED[rows - 1]), n * SECOND // 10)


def test_what_nobody_reported_is_booked_as_planned() -> None:
    assert BookedTimes().booked((A, B), KEY, PLANNED) == PLANNED


def test_a_device_that_is_half_as_slow_again_is_booked_at_its_true_speed() -> None:
    times = BookedTimes()
    for rows in (1, 4):
        tell(times, A, rows, 1.5)
    booked = times.booked((A,), KEY, PLANNED)
    assert all(abs(b / p - 1.5) < 0.05 for b, p in zip(booked, PLANNED, strict=True))
    assert times.version > 0


def test_a_pool_is_booked_at_the_pace_of_its_slowest_member() -> None:
    times = BookedTimes()
    tell(times, A, 2, 1.0)
    tell(times, B, 2, 2.0)
    assert times.booked((A, B), KEY, PLANNED) == times.booked((B,), KEY, PLANNED)
    assert times.booked((A,), KEY, PLANNED)[1] < 1.1 * PLANNED[1]


def test_pauses_of_the_host_are_hardly_noticed() -> None:
    times, draw = BookedTimes(), random.Random(3)
    for n in range(2000):
        pause = 300_000_000 if draw.random() < 0.05 else 0
        real = round(PLANNED[0] * draw.lognormvariate(0, 0.3)) + pause
        times.reported(A, KEY, 1, real, n * SECOND // 20)
    assert 0.8 < times.scale(A, KEY, PLANNED) < 1.3


def test_without_reports_the_plan_counts_again_until_the_first_report() -> None:
    times = BookedTimes()
    tell(times, A, 1, 4.0, reports=200)
    slow = times.booked((A,), KEY, PLANNED)
    assert slow[0] > 3 * PLANNED[0]
    now = 20 * SECOND
    while times.booked((A,), KEY, PLANNED) != PLANNED:
        now += SECOND
        times.fade(now)
        assert now < 40 * SECOND
    times.reported(A, KEY, 1, 4 * PLANNED[0], now + SECOND)
    assert times.booked((A,), KEY, PLANNED)[0] > 3 * PLANNED[0]


def test_a_lost_agent_is_forgotten() -> None:
    times = BookedTimes()
    tell(times, A, 1, 3.0)
    times.forget(A)
    assert times.booked((A,), KEY, PLANNED) == PLANNED


@given(
    reports=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 10**12)), max_size=60),
    planned=st.lists(st.integers(0, 10**9), min_size=1, max_size=4),
)
def test_booked_times_are_positive_bounded_and_grow_with_the_batch(
    reports: list[tuple[int, int]], planned: list[int]
) -> None:
    times, table = BookedTimes(), tuple(sorted(planned))
    for n, (rows, real_ns) in enumerate(reports):
        times.reported(A, KEY, rows, real_ns, n * SECOND)
    booked = times.booked((A,), KEY, table)
    assert len(booked) == len(table)
    assert list(booked) == sorted(booked)
    assert all(1 <= b <= max(1, 8 * max(table)) for b in booked)
