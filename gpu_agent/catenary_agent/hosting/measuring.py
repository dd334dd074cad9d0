"""Measurement of a partition's time at each batch size without delaying batches.

Every single run is a separate job on the compute thread, between two batches, and their total time
is bounded. Sizes that could not be measured continue the line of the last two.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from catenary_agent.executors.emulated import EmulatedPart
from catenary_services.errors import InvalidInput

if TYPE_CHECKING:
    from catenary_agent.engine.batch import Array
    from catenary_agent.executors.base import Executor

_EXACT_UP_TO = 4
"""Every size up to this one is measured, larger ones at every doubling."""
_RUNS = 3
_MOST_SIZES = 4_096
"""The most times that are told of a partition."""

OnComputeThread = Callable[[Callable[[], int]], Awaitable[int]]


async def measure_between_batches(
    executor: Executor, max_batch: int, on_compute_thread: OnComputeThread, budget_s: float = 10.0
) -> tuple[int, ...]:
    """Returns nanoseconds at batch 1, 2, .. as many as `max_batch` rows are; one if not batched.

    Where batches are counted in units, a size takes the longer of the times of few long rows and
    many short ones. Whatever is in a batch, it takes no longer.

    Args:
        executor: A loaded executor that only the compute thread uses.
        max_batch: The largest batch it will be given, in rows, or in texts of full length.
        on_compute_thread: Runs a function on that thread and returns its result.
        budget_s: Seconds after which no further size is begun.
    """
    largest = max_batch if executor.batched else 1
    units = executor.ends.units
    if units is not None:
        largest = min(largest * units.per_text, _MOST_SIZES)
    if isinstance(executor, EmulatedPart):
        return executor.times(largest)
    deadline = time.monotonic() + budget_s
    sizes: list[int] = []
    times: list[int] = []
    for size in _sizes(largest):
        if times and time.monotonic() >= deadline:
            break
        run = partial(_timed, executor, _examples(executor, size))
        # The first run warms caches and settles shapes; it counts only if there is no time left.
        taken = await on_compute_thread(run)
        for _ in range(_RUNS):
            if time.monotonic() >= deadline:
                break
            taken = min(taken, await on_compute_thread(run))
        sizes.append(size)
        times.append(max(taken, times[-1] if times else 1))
    return interpolate(sizes, times, largest)


def interpolate(sizes: Sequence[int], times: Sequence[int], largest: int) -> tuple[int, ...]:
    """Returns a time for every size up to `largest`, never less for a larger size.

    Beyond the last measured size the step of the last two continues. A single one is extended
    proportionally, which never promises too much.
    """
    known = np.interp(range(1, sizes[-1] + 1), sizes, times)
    if len(sizes) > 1:
        step = (times[-1] - times[-2]) / (sizes[-1] - sizes[-2])
    else:
        step = times[0] / sizes[0]
    beyond = [times[-1] + step * (size - sizes[-1]) for size in range(sizes[-1] + 1, largest + 1)]
    return tuple(round(value) for value in (*known, *beyond))


def _sizes(largest: int) -> list[int]:
    sizes = list(range(1, min(largest, _EXACT_UP_TO) + 1))
    while sizes[-1] < largest:
        sizes.append(min(2 * sizes[-1], largest))
    return sizes


def _examples(executor: Executor, size: int) -> list[list[Array]]:
    """Returns the batches of a size of which the slowest counts."""
    ends = executor.ends
    if ends.units is None:
        return [ends.example_arrays(size)]
    return [ends.example_arrays(rows, tokens) for rows, tokens in ends.units.extremes(size)]


def _timed(executor: Executor, batches: Sequence[Sequence[Array]]) -> int:
    """Returns the time of the slowest of some batches.

    Raises:
        InvalidInput: The model refuses all of these sizes.
    """
    slowest = 0
    refused: InvalidInput | None = None
    for inputs in batches:
        started = time.perf_counter_ns()
        try:
            executor.run(inputs)
        except InvalidInput as error:  # of a size that is not served either
            refused = error
            continue
        slowest = max(slowest, time.perf_counter_ns() - started)
    if refused is not None and not slowest:
        raise refused
    return slowest
