"""What a decoder partition costs, measured without keeping running sessions waiting.

Every single run is a call of its own on the thread, between two steps, and all of them together
are bounded; the points and the lines through them are those of `gpu_agent.decoders.timing`.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from gpu_agent.decoders.base import DecoderCost, DecoderExecutor
from gpu_agent.decoders.emulated import EmulatedDecoder
from gpu_agent.decoders.timing import DECODE_SESSIONS, PREFILL_TOKENS, RUNS, Probe, line

OnThread = Callable[[Callable[[], int]], Awaitable[int]]


async def measure_between_steps(
    executor: DecoderExecutor, on_thread: OnThread, budget_s: float = 10.0
) -> DecoderCost:
    """Returns the cost of one pass through all blocks of a partition.

    Args:
        executor: Loaded, and used by nobody but the thread.
        on_thread: Runs a function there and returns its result.
        budget_s: After this long no further point is begun; what is missing follows from the rest.

    Returns:
        The cost; all of it is 0 if there are not enough block slots for a single session.
    """
    if isinstance(executor, EmulatedDecoder):
        return executor.cost  # looked up, not run
    probe = Probe(executor)
    if probe.most_sessions < 1:
        return DecoderCost(0, 0, 0, 0)
    deadline = time.monotonic() + budget_s
    # One row first: a step of one session is what every other time is compared with.
    batches = [count for count in DECODE_SESSIONS if count <= probe.most_sessions]
    decode = await _line(on_thread, batches, probe.decode, deadline)
    lengths = [count for count in PREFILL_TOKENS if count <= probe.most_tokens] or [1]
    prefill = await _line(on_thread, lengths, probe.prefill, deadline)
    return DecoderCost(prefill[0], prefill[1], decode[0], decode[1])


async def _line(
    on_thread: OnThread, sizes: Sequence[int], run: Callable[[int], int], deadline: float
) -> tuple[int, int]:
    """Returns constant and slope of the time over `sizes`; at least the first is measured."""
    times: list[int] = []
    for size in sizes:
        if times and time.monotonic() >= deadline:
            break
        taken = [await on_thread(partial(run, size))]
        while len(taken) < RUNS and time.monotonic() < deadline:
            taken.append(await on_thread(partial(run, size)))
        times.append(min(taken))
    return line(sizes[: len(times)], times)
