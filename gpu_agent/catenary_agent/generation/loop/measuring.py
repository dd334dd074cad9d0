"""Measurement of a decoder partition's cost without delaying running sessions.

Every single run is a separate call on the generation thread, between two steps, and their total
time is bounded. The sizes that are measured and the lines fitted through them are those of
`catenary_agent.decoders.timing`.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial

from catenary_agent.decoders.base import DecoderCost, DecoderExecutor
from catenary_agent.decoders.emulated import EmulatedDecoder
from catenary_agent.decoders.timing import (
    DECODE_SESSIONS,
    DEEP_SESSIONS,
    DEEP_TOKENS,
    FILL_TOKENS,
    PREFILL_TOKENS,
    RUNS,
    StepTimer,
    context_slope,
    floored_line,
    line,
)
from catenary_services.domain.decoder import CACHE_BLOCK_TOKENS

OnThread = Callable[[Callable[[], int]], Awaitable[int]]


async def measure_between_steps(
    executor: DecoderExecutor, on_thread: OnThread, chunk_tokens: int = 64, budget_s: float = 10.0
) -> DecoderCost:
    """Returns the cost of one pass through all blocks of a partition.

    Args:
        executor: A loaded executor that only the generation thread uses.
        on_thread: Runs a function on that thread and returns its result.
        chunk_tokens: The most prompt tokens that will ever be run at once.
        budget_s: Seconds after which no further size is begun; missing values follow from the
            others.

    Returns:
        The cost; all times are 0 if there are not enough block slots for a single session.
    """
    if isinstance(executor, EmulatedDecoder):  # its cost is a given, so nothing is run
        return replace(executor.cost, prefill_chunk_tokens=chunk_tokens)
    probe = StepTimer(executor)
    if probe.most_sessions < 1:
        return DecoderCost(0, 0, 0, 0, prefill_chunk_tokens=chunk_tokens)
    return await _Measurement(probe, on_thread, chunk_tokens, time.monotonic() + budget_s).run()


class _Measurement:
    """The measurement of one partition."""

    def __init__(
        self, probe: StepTimer, on_thread: OnThread, chunk_tokens: int, deadline_s: float
    ) -> None:
        self._probe = probe
        self._on_thread = on_thread
        self._chunk_tokens = chunk_tokens
        self._deadline_s = deadline_s

    async def run(self) -> DecoderCost:
        probe = self._probe
        # One row first: all other times are compared with a step of one session.
        batches = [count for count in DECODE_SESSIONS if count <= probe.most_sessions]
        shallow = await self._points(batches, probe.decode)
        longest = min(self._chunk_tokens, probe.most_tokens)
        lengths = sorted({*(n for n in PREFILL_TOKENS if n <= longest), longest})
        prompts = await self._points(lengths, probe.prefill)
        deep = await self._deep()
        constant, slope, floor = floored_line(*zip(*prompts, strict=True))
        context_ns = context_slope(shallow, deep)
        lone = [ns for sessions, ns in shallow if sessions == 1]
        lone += [ns for sessions, _, ns in deep if sessions == 1]
        # Eq. 3 holds for more than one session. The line needs two points, if need be the lone one.
        shared = [point for point in shallow if point[0] > 1]
        decode = line(*zip(*(shared if len(shared) > 1 else shallow), strict=True))
        return DecoderCost(
            prefill_ns=round(constant),
            prefill_token_ns=round(slope),
            decode_ns=round(decode[0]),
            decode_session_ns=round(decode[1]),
            decode_context_token_ns=context_ns,
            decode_lone_ns=round(sum(lone) / len(lone)),
            prefill_floor_ns=round(floor),
            prefill_chunk_tokens=self._chunk_tokens,
        )

    async def _points(
        self, sizes: Sequence[int], run: Callable[[int], int]
    ) -> list[tuple[int, float]]:
        """Returns the shortest time in nanoseconds at each size; at least the first is measured."""
        points: list[tuple[int, float]] = []
        for size in sizes:
            if points and self._is_late:
                break
            points.append((size, await self._least(partial(run, size))))
        return points

    async def _deep(self) -> list[tuple[int, int, float]]:
        """Returns (sessions, context tokens, shortest nanoseconds) of steps with long contexts.

        There are fewer points, or none, when the time is over.
        """
        probe = self._probe
        counts = [count for count in DEEP_SESSIONS if count <= probe.most_sessions]
        chunk = min(FILL_TOKENS, self._chunk_tokens)
        points: list[tuple[int, int, float]] = []
        while counts and (depth := _depth(probe, counts)) < chunk:
            counts.pop()
        if not counts:
            return points
        try:
            for count in counts:
                for _ in range(depth // chunk):
                    if self._is_late:
                        return points
                    await self._on_thread(partial(probe.fill, count - 1, chunk))
                contexts: list[int] = []
                ns = await self._least(partial(_deep_step, probe, count, contexts))
                points.append((count, contexts[0], ns))
        finally:
            await self._on_thread(partial(_closed, probe))
        return points

    async def _least(self, run: Callable[[], int]) -> float:
        taken = [await self._on_thread(run)]
        while len(taken) < RUNS and not self._is_late:
            taken.append(await self._on_thread(run))
        return float(min(taken))

    @property
    def _is_late(self) -> bool:
        return time.monotonic() >= self._deadline_s


def _depth(probe: StepTimer, counts: Sequence[int]) -> int:
    """Returns how many tokens each of so many sessions can have before the steps that are timed."""
    each = probe.cache_tokens // counts[-1] // CACHE_BLOCK_TOKENS * CACHE_BLOCK_TOKENS
    return min(DEEP_TOKENS, min(probe.most_tokens, each) - RUNS * len(counts))


def _deep_step(probe: StepTimer, sessions: int, contexts: list[int]) -> int:
    context, taken_ns = probe.decode_deep(sessions)
    contexts.append(context)
    return taken_ns


def _closed(probe: StepTimer) -> int:
    probe.close()
    return 0
