"""How early a gateway answers, so that its reason is there before its client gives up."""

from __future__ import annotations

import asyncio
import time

import pytest

from catenary_gateway.admission.request_pipeline import LoopLag, answer_within_ns

MS = 1_000_000


@pytest.mark.parametrize(
    ("left_s", "lag_s", "margin_ms"),
    [
        (1.0, 0.0, 50),
        (0.2, 0.0, 20),  # of little time, little
        (30.0, 0.0, 300),
        (30.0, 0.2, 600),
        (1.0, 0.2, 100),  # never more than a tenth
        (30.0, 20.0, 3_000),
        (0.0, 1.0, 0),
    ],
)
def test_an_answer_is_early_by_what_its_way_may_take(
    left_s: float, lag_s: float, margin_ms: int
) -> None:
    within_ns = answer_within_ns(left_s, lag_s)
    assert within_ns == pytest.approx(left_s * 1e9 - margin_ms * MS, abs=10)


def test_more_lag_never_lengthens_anything() -> None:
    for left_s in (0.01, 1.0, 11.0, 30.0, 1e5):
        found = [answer_within_ns(left_s, lag_s) for lag_s in (0.0, 0.01, 0.1, 1.0, 60.0)]
        assert found == sorted(found, reverse=True)
        assert found[0] < left_s * 1e9


def test_the_worst_is_remembered_for_a_while_and_then_forgotten() -> None:
    lag = LoopLag()
    lag.note(0.4)
    for _ in range(49):
        lag.note(0.001)
        assert lag.worst_s == 0.4
    for _ in range(49):
        lag.note(0.002)
    assert lag.worst_s == 0.4
    for _ in range(2):
        lag.note(0.002)
    assert lag.worst_s == 0.002


async def test_a_loop_that_is_held_up_is_noticed() -> None:
    lag = LoopLag()
    lag.start()
    await asyncio.sleep(0)
    time.sleep(0.5)
    async with asyncio.timeout(20):
        while lag.worst_s < 0.3:
            await asyncio.sleep(0.01)
    lag.stop()
