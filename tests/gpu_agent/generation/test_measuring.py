"""What measuring finds: the very coefficients of a device whose steps follow them exactly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from catenary_agent.decoders import timing
from catenary_agent.decoders.base import CacheLayout, DecoderCost, StepItem
from catenary_agent.decoders.timing import context_slope, floored_line, line
from catenary_agent.generation.loop import measuring
from catenary_agent.generation.loop.measuring import measure_between_steps
from catenary_agent.generation.state.partition_batcher import BatcherWork, StepSize
from catenary_services.domain.ids import PartitionKey
from ring_harness import BLOCKS, MODEL, ToyDecoder

TRUE = DecoderCost(9_000_000, 2_000_000, 50_000_000, 6_000_000, 4_000.0, 52_000_000, 30_000_000)


class Clock:
    """Advances only by what steps take."""

    def __init__(self) -> None:
        self.ns = 0


class ExactDecoder(ToyDecoder):
    """Takes exactly what `TRUE` says."""

    def __init__(self, clock: Clock, sessions: int = 8, tokens: int = 512) -> None:
        layout = CacheLayout(sessions * BLOCKS, tokens, (0,))
        super().__init__(PartitionKey(MODEL, 0, BLOCKS), layout)
        self._clock = clock
        self.longest_call_ns = 0

    def step(self, items: Sequence[StepItem]) -> list[np.ndarray | None]:
        results = super().step(items)
        rows = [item for item in items if len(item.inputs) == 1]
        taken = TRUE.decode(len(rows), sum(item.position for item in rows)) if rows else 0.0
        for item in items:
            if len(item.inputs) > 1:
                line_ns = TRUE.prefill_ns + len(item.inputs) * TRUE.prefill_token_ns
                taken += max(TRUE.prefill_floor_ns, line_ns)
        self._clock.ns += round(taken)
        self.longest_call_ns = max(self.longest_call_ns, round(taken))
        return results


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter_ns=lambda: made.ns))
    fake = SimpleNamespace(monotonic=lambda: made.ns / 1e9)
    monkeypatch.setattr(measuring, "time", fake)
    return made


async def at_once(work: Callable[[], Any]) -> Any:
    return work()


async def test_a_device_that_follows_the_lines_is_found_out(clock: Clock) -> None:
    decoder = ExactDecoder(clock)
    cost = await measure_between_steps(decoder, at_once, chunk_tokens=64, budget_s=60.0)
    assert cost.prefill_chunk_tokens == 64
    assert cost.decode_context_token_ns == pytest.approx(4_000.0, rel=0.01)
    assert cost.decode(4, 0) == pytest.approx(TRUE.decode(4, 0), rel=1e-3)
    assert cost.decode(8, 2000) == pytest.approx(TRUE.decode(8, 2000), rel=1e-2)
    assert cost.decode_lone_ns == TRUE.decode_lone_ns
    assert cost.prefill_floor_ns == pytest.approx(30_000_000, rel=1e-3)
    assert cost.prefill_token_ns == pytest.approx(2_000_000, rel=1e-3)
    assert cost.prefill_ns == pytest.approx(9_000_000, rel=0.01)
    assert decoder.sessions == 0


async def test_no_run_holds_up_others_for_longer_than_a_chunk(clock: Clock) -> None:
    decoder = ExactDecoder(clock)
    await measure_between_steps(decoder, at_once, chunk_tokens=64, budget_s=60.0)
    assert decoder.longest_call_ns <= max(9_000_000 + 64 * 2_000_000, round(TRUE.decode(8, 8)))


async def test_long_chunks_are_timed_as_far_as_they_go(clock: Clock) -> None:
    """A line through short prompts would be a guess for the 512 tokens a GPU runs at once."""
    decoder = ExactDecoder(clock)
    await measure_between_steps(decoder, at_once, chunk_tokens=512, budget_s=60.0)
    assert max(tokens for step in decoder.steps for _, _, tokens in step) == 512


async def test_what_is_not_measured_in_time_follows_from_the_rest(clock: Clock) -> None:
    decoder = ExactDecoder(clock)
    cost = await measure_between_steps(decoder, at_once, chunk_tokens=64, budget_s=0.01)
    assert cost.decode_lone_ns == TRUE.decode_lone_ns
    assert cost.decode_context_token_ns == 0.0
    assert cost.decode(1, 0) > 0
    assert decoder.sessions == 0


async def test_room_for_one_session_is_enough(clock: Clock) -> None:
    decoder = ExactDecoder(clock, sessions=1, tokens=16)
    cost = await measure_between_steps(decoder, at_once, chunk_tokens=64, budget_s=60.0)
    assert cost.decode_lone_ns == TRUE.decode_lone_ns
    assert cost.prefill_token_ns >= 0
    nothing = await measure_between_steps(ExactDecoder(clock, sessions=0), at_once)
    assert (nothing.decode_ns, nothing.decode_lone_ns, nothing.prefill_token_ns) == (0, 0, 0)


def test_lines_are_never_negative_and_weigh_relative_errors() -> None:
    assert line([4], [20.0]) == (0.0, 5.0)
    assert line([1, 2, 4], [30.0, 20.0, 10.0])[1] == 0.0
    constant, slope = line([1, 2, 3], [1.0, 4.0, 9.0])
    assert constant == 0.0
    assert slope > 0
    assert floored_line([2, 8, 24, 64], [30.0, 30.0, 57.0, 137.0]) == pytest.approx(
        (9.0, 2.0, 30.0)
    )
    assert floored_line([2, 8, 24, 64], [14.0, 26.0, 58.0, 138.0])[2] == 0.0


def test_the_slope_of_context_compares_like_with_like() -> None:
    assert context_slope([(1, 10.0), (2, 20.0)], [(2, 100, 25.0)]) == pytest.approx(0.05)
    assert context_slope([(1, 10.0)], [(2, 100, 25.0)]) == 0.0
    assert context_slope([(2, 30.0)], [(2, 100, 25.0)]) == 0.0


def test_lone_steps_are_counted_apart() -> None:
    work = BatcherWork()
    work.add(StepSize(2, 30), (0, 100), TRUE)
    work.add(StepSize(1, 30), (0, 60), TRUE)
    assert (work.decode_steps, work.decode_rows, work.decode_context_tokens) == (2, 3, 60)
    assert (work.lone_steps, work.lone_context_tokens, work.lone_ns) == (1, 30, 60)
    assert work.decode_ns == 160


def test_mixed_steps_are_split_by_cost_at_the_pace_of_late_steps() -> None:
    work = BatcherWork()
    alone_ns = round(TRUE.decode(2, 30))
    for _ in range(200):  # a device that is half as fast today
        work.add(StepSize(2, 30), (0, 2 * alone_ns), TRUE)
    before = work.decode_ns
    work.add(StepSize(2, 30, (5,)), (0, 2 * alone_ns + 77), TRUE)
    assert work.decode_ns - before == pytest.approx(2 * alone_ns, rel=1e-3)
    assert BatcherWork(work.pace).pace == work.pace
    # A step that was interrupted says little of the pace.
    work.add(StepSize(2, 30), (0, 1000 * alone_ns), TRUE)
    assert work.pace < 2.5


def test_without_a_cost_mixed_steps_are_split_by_tokens() -> None:
    work = BatcherWork()
    assert work.add(StepSize(1, 10, (3,)), (0, 400), None) == 3
    assert (work.decode_ns, work.prefill_ns) == (100, 300)


@pytest.mark.parametrize("cache_tokens", [16, 96, 512, 4_096])
async def test_measuring_never_caches_more_than_there_is_memory_for(
    clock: Clock, cache_tokens: int
) -> None:
    decoder = ExactDecoder(clock)
    most, step = 0, decoder.step
    decoder.book.layout = CacheLayout(8 * BLOCKS, 512, (0,), cache_tokens * BLOCKS)

    def counted(items: Sequence[StepItem]) -> list[np.ndarray | None]:
        nonlocal most
        results = step(items)
        most = max(most, decoder.cached_block_tokens)
        return results

    decoder.step = counted  # type: ignore[method-assign]
    cost = await measure_between_steps(decoder, at_once, chunk_tokens=64, budget_s=60.0)
    assert 0 < most <= cache_tokens * BLOCKS
    assert cost.decode_lone_ns == TRUE.decode_lone_ns
    assert decoder.cached_block_tokens == 0
