"""A task in whole numbers, so that every floor, sum and comparison of the algorithms is exact.

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
"""Per second: times of links are rounded to them."""
NO_LINK = -1
NO_PATH = 2**61
"""More than any cost of a path over links; the sum of two stays within 63 bits."""
FINEST_UNIT = 10**18
"""Parts of a second. Times that no power of ten up to this expresses are rounded to it."""
_INT64 = 2**62

Blocks = npt.NDArray[np.int64]
"""Shape (servers,): m_j, blocks per server."""


@dataclass(frozen=True, slots=True)
class LinkTimes:
    """Peer-to-peer times in nanoseconds."""

    times: npt.NDArray[np.int64]
    """Shape (servers + 1, servers + 1), from row to column; the last of each is the orchestrator.

    `NO_LINK` where there is none, but for returns to the orchestrator: those take no time then.
    """
    compute: npt.NDArray[np.int64]
    """Per block, shape (servers,)."""


@dataclass(frozen=True, slots=True)
class TaskSizes:
    """The numbers of a task as integers."""

    blocks: int
    memory: list[int]
    block_memory: list[int]
    """s_m per server."""
    cache_memory: list[int]
    """s_c per server."""
    unit: int
    """Time units per second."""
    communication: list[int]
    compute: list[int]
    """Per block."""
    memory_arrays: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]] | None
    """`memory`, `block_memory` and `cache_memory` again, if all fits into 64 bits."""
    seconds_arrays: tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]
    """Communication and compute again, in seconds and rounded."""
    links: LinkTimes | None

    def max_blocks(self, c: int) -> Blocks:
        """Returns m_j(c): blocks that fit with c caches each (eq. 8)."""
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
        """Returns the caches of one block that fit beside so many blocks (eq. 3)."""
        if not blocks:
            return 0
        left = self.memory[server] - self.block_memory[server] * blocks
        return left // self.cache_memory[server]

    def service(self, server: int, blocks: int) -> int:
        """Returns t_j in time units (eq. 9)."""
        return self.communication[server] + self.compute[server] * blocks

    def seconds(self, time: int) -> float:
        """Returns a time in seconds, correctly rounded."""
        return time / self.unit


def sizes_of(task: ChainTask) -> TaskSizes:
    """Returns the task in whole numbers.

    Raises:
        InvalidInput: If times of links are too long for 64 bits.
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
