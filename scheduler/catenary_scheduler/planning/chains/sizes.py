"""Integer sizes of a task, so that every floor, sum and comparison of the algorithms is exact.

`floor(0.3 / 0.1)` is 3, but 2 in floating point; one lost slot is one session less. Memory and
times are therefore scaled to integers once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from catenary_scheduler.planning.chains.problem import ChainTask, exact
from catenary_services.errors import InvalidInput

NANOSECONDS = 10**9
"""Nanoseconds per second, to which times of links are rounded."""
NO_LINK = -1
NO_PATH = 2**61
"""Cost of a missing path over links, greater than any real one. The sum of two stays within 63
bits."""
FINEST_UNIT = 10**18
"""Largest number of time units per second. Times that no power of ten up to this expresses are
rounded to it."""
_INT64 = 2**62

Blocks = npt.NDArray[np.int64]
"""Number m_j of blocks per server, shape (servers,)."""


@dataclass(frozen=True, slots=True)
class LinkTimes:
    """Peer-to-peer times and compute times, in nanoseconds."""

    times: npt.NDArray[np.int64]
    """Time from row to column, shape (servers + 1, servers + 1); the last row and column are the
    orchestrator. `NO_LINK` where there is no link, except that a missing return to the orchestrator
    takes no time."""
    compute: npt.NDArray[np.int64]
    """Compute time per block, shape (servers,)."""


@dataclass(frozen=True, slots=True)
class TaskSizes:
    """Memory and times of a task, scaled to integers."""

    blocks: int
    memory: list[int]
    block_memory: list[int]
    """Memory s_m of a block on each server."""
    cache_memory: list[int]
    """Memory s_c of a session's cache per block on each server."""
    unit: int
    """Number of time units per second."""
    communication: list[int]
    compute: list[int]
    """Compute time per block on each server, in time units."""
    memory_arrays: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]] | None
    """Arrays of `memory`, `block_memory` and `cache_memory`; None if they do not fit into 64
    bits."""
    seconds_arrays: tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]
    """Arrays of `communication` and `compute` in seconds, rounded."""
    links: LinkTimes | None

    def max_blocks(self, c: int) -> Blocks:
        """Returns m_j(c), the number of blocks that fit with c caches each (eq. 8)."""
        largest = max(self.block_memory, default=0) + max(self.cache_memory, default=0) * c
        if self.memory_arrays is not None and largest < _INT64:
            memory, block, cache = self.memory_arrays
            limits: Blocks = np.minimum(memory // (block + cache * c), self.blocks)
            return limits
        each = zip(self.memory, self.block_memory, self.cache_memory, strict=True)
        return np.array(
            [min(have // (block + cache * c), self.blocks) for have, block, cache in each],
            dtype=np.int64,
        )

    def cache_slots(self, server: int, blocks: int) -> int:
        """Returns the number of caches of one block that fit beside `blocks` blocks (eq. 3)."""
        if not blocks:
            return 0
        left = self.memory[server] - self.block_memory[server] * blocks
        return left // self.cache_memory[server]

    def service(self, server: int, blocks: int) -> int:
        """Returns the time t_j of `blocks` blocks on a server, in time units (eq. 9)."""
        return self.communication[server] + self.compute[server] * blocks

    def seconds(self, time: int) -> float:
        """Returns in seconds, correctly rounded, a time that is given in time units."""
        return time / self.unit


def sizes_of(task: ChainTask) -> TaskSizes:
    """Returns the sizes of a task as integers.

    Raises:
        InvalidInput: Times of links are too long for 64 bits.
    """
    memory = [exact(server.memory) for server in task.servers]
    pairs = [task.memory_at(server) for server in task.servers]
    block, cache = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    scale = _common_denominator([*memory, *block, *cache])
    amounts = [[int(each * scale) for each in column] for column in (memory, block, cache)]
    communication = [exact(server.communication_s) for server in task.servers]
    compute = [exact(server.block_s) for server in task.servers]
    unit = min(_common_denominator([*communication, *compute]), FINEST_UNIT)
    fits = max((each for column in amounts for each in column), default=0) < _INT64
    arrays = [np.array(column, dtype=np.int64) for column in amounts] if fits else []
    return TaskSizes(
        blocks=task.blocks,
        memory=amounts[0],
        block_memory=amounts[1],
        cache_memory=amounts[2],
        unit=unit,
        communication=[round(time * unit) for time in communication],
        compute=[round(time * unit) for time in compute],
        memory_arrays=(arrays[0], arrays[1], arrays[2]) if fits else None,
        seconds_arrays=(
            np.array([float(time) for time in communication]),
            np.array([float(time) for time in compute]),
        ),
        links=_link_times(task) if task.links is not None else None,
    )


def _link_times(task: ChainTask) -> LinkTimes:
    longest = max([0.0, *(task.links or {}).values()])
    slowest = max((float(server.block_s) for server in task.servers), default=0.0)
    if (task.blocks + 1) ** 2 * (longest + slowest) * NANOSECONDS >= NO_PATH / 2:
        raise InvalidInput("links", "with times as long as these no path can be compared")
    count = len(task.servers)
    times = np.full((count + 1, count + 1), NO_LINK, dtype=np.int64)
    times[:, count] = 0
    for (before, after), seconds in (task.links or {}).items():
        row = count if before is None else task.number_of[before]
        column = count if after is None else task.number_of[after]
        times[row, column] = round(seconds * NANOSECONDS)
    compute = [round(exact(server.block_s) * NANOSECONDS) for server in task.servers]
    return LinkTimes(times, np.array(compute, dtype=np.int64))


def _common_denominator(numbers: Iterable[Fraction]) -> int:
    return math.lcm(1, *{number.denominator for number in numbers})
