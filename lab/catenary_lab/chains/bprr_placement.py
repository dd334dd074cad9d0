"""The baseline BPRR: conservative greedy block placement (CG-BP) for a guessed concurrency.

Sun, He, Ji, Parag, "Optimizing resource allocation for geographically-distributed inference by
large language models" (Performance Evaluation 170, 2025). Servers are placed in the order of their
time per block, where blocks still lack capacity and are slowest.

Times are in milliseconds, as in the authors' program: the constant 1 that it adds to the longest
time is one of them. Sums are exact; the first of several equal windows is taken.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import ceil, sqrt

from catenary_lab.chains.windows import (
    EMPTY,
    Window,
    common_integers,
    least_sorted,
    window_sums,
)
from catenary_scheduler.planning.chains.problem import Number, exact
from catenary_services.errors import InvalidInput

_BLOCKS_PER_GUESSED_SERVER = 50
_FEWEST_GUESSED, _MOST_GUESSED = 2, 3
_SHARE_FAST, _SHARE_SLOW = 0.7, 0.3


@dataclass(frozen=True, slots=True)
class BprrServer:
    """A server as the placement sees it."""

    memory: Number
    """Memory, in the unit of `BprrTask.block_memory`."""
    rtt_ms: float
    """Round trip to the orchestrator, which is the communication time per output token."""
    block_ms: float
    """Computation time of a whole job per block, tau_p."""


@dataclass(frozen=True, slots=True)
class BprrTask:
    """The model, load and servers of a placement task."""

    servers: tuple[BprrServer, ...]
    blocks: int
    block_memory: Number
    cache_memory: Number
    """Cache of one job in one block, in the unit of `block_memory`."""
    rate_per_s: float
    output_tokens: float
    """Mean number of output tokens of a job."""


@dataclass(frozen=True, slots=True)
class BprrPlacement:
    """The blocks and block slots of every server."""

    concurrency: int
    """Number of simultaneous jobs that the placement is made for, R."""
    windows: tuple[Window, ...]
    slots: tuple[int, ...]
    """Block slots of each server."""


def target_concurrency(task: BprrTask) -> int:
    """Returns R, the concurrency by a square-root rule: at least 1, at most what fits in memory."""
    guessed = min(
        max(ceil(task.blocks / _BLOCKS_PER_GUESSED_SERVER), _FEWEST_GUESSED), _MOST_GUESSED
    )
    times = [server.block_ms for server in task.servers]
    rtt = sum(server.rtt_ms for server in task.servers) / len(task.servers)
    computing = (_SHARE_FAST * min(times) + _SHARE_SLOW * max(times)) * task.blocks / guessed
    job_s = (guessed * task.output_tokens * rtt + computing) / 1000
    busy = task.rate_per_s * job_s
    spread = task.blocks + len(task.servers)
    room = sum(exact(server.memory) for server in task.servers) - spread * exact(task.block_memory)
    most = room // (spread * exact(task.cache_memory))
    return max(1, min(ceil(busy + sqrt(max(busy, 1.0))), int(most)))


def bprr_placement(task: BprrTask, concurrency: int | None = None) -> BprrPlacement:
    """Returns the placement of CG-BP.

    Args:
        task: The model, load and servers.
        concurrency: Number of simultaneous jobs to place for; None: `target_concurrency`.

    Raises:
        InvalidInput: There is no server.
    """
    if not task.servers:
        raise InvalidInput("servers", "must not be empty")
    wanted = target_concurrency(task) if concurrency is None else concurrency
    memory, cache = exact(task.block_memory), exact(task.cache_memory)
    counts = [
        min(int(exact(server.memory) / (memory + cache * wanted)), task.blocks)
        for server in task.servers
    ]
    slots = [
        int((exact(server.memory) - memory * count) / cache) if count else 0
        for server, count in zip(task.servers, counts, strict=True)
    ]
    windows = _place(task, counts, slots, wanted)
    return BprrPlacement(wanted, tuple(windows), tuple(slots))


def _place(task: BprrTask, counts: list[int], slots: list[int], wanted: int) -> list[Window]:
    used = [index for index, count in enumerate(counts) if count]
    windows = [EMPTY] * len(counts)
    if not used:
        return windows
    times = {index: _time_per_block(task, index, counts[index]) for index in used}
    above = max(times.values()) + 1
    # Scaled to integers together: gains[i] = max t + 1 - t_i, and the last one is max t + 1 itself.
    *scaled, start = common_integers([*(above - times[index] for index in used), above])
    gains = dict(zip(used, scaled, strict=True))
    capacity, lacking_time = [0] * task.blocks, [wanted * start] * task.blocks
    for index in sorted(used, key=lambda each: (times[each], each)):
        count, sessions = counts[index], slots[index] // counts[index]
        first = _window(capacity, lacking_time, count, wanted)
        windows[index] = Window(first, first + count)
        for block in range(first, first + count):
            lacking_time[block] -= gains[index] * min(max(wanted - capacity[block], 0), sessions)
            capacity[block] += sessions
    return windows


def _time_per_block(task: BprrTask, index: int, count: int) -> Fraction:
    server = task.servers[index]
    token = exact(server.block_ms) * count / exact(task.output_tokens)
    return (exact(server.rtt_ms) + token) / count


def _window(capacity: list[int], times: list[int], count: int, wanted: int) -> int:
    """Returns the first block of the window that a server with `count` blocks takes."""
    lacking = [int(each < wanted) for each in capacity]
    if not any(lacking):
        return least_sorted(capacity, count)
    short, sums = window_sums(lacking, count), window_sums(times, count)
    candidates = [first for first, number in enumerate(short) if number]
    return max(candidates, key=lambda first: (sums[first], -first))
