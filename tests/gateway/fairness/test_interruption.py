"""What waited while nobody scheduled says nothing about how much can be answered."""

from __future__ import annotations

import math

from catenary_gateway.fairness.limit import AdaptiveLimit

SECOND = 1_000_000_000


def usual(limit: AdaptiveLimit, began: int, took: float, count: int = 20) -> None:
    for n in range(count):
        start = began + n * SECOND // 10
        limit.answered(start, 8 * SECOND, 1.0, start + int(took * SECOND))


def test_requests_that_waited_for_a_new_leader_set_no_limit() -> None:
    limit = AdaptiveLimit(0)
    usual(limit, 0, 0.05)
    back = 10 * SECOND
    limit.interrupted(back)
    for n in range(20):  # came in the last five seconds, all answered now
        limit.answered(back - 5 * SECOND + n * SECOND // 4, 8 * SECOND, 1.0, back + n)
    assert math.isinf(limit.value)


def test_without_an_interruption_the_same_wait_sets_one() -> None:
    limit = AdaptiveLimit(0)
    usual(limit, 0, 0.05, count=200)
    for n in range(200):  # each waits as long, while others are answered all the time
        now = 20 * SECOND + n * SECOND // 10
        limit.answered(now - 5 * SECOND, 8 * SECOND, 1.0, now)
    assert not math.isinf(limit.value)
