"""What a partition costs: a line over prompt lengths, a plane over sessions and their context.

Prompts are timed up to the length of a chunk: longer ones never run at once. Steps are timed with
empty caches for several numbers of sessions, then for a few sessions with a real context behind
them, which says what a cached token adds (k2 of eq. 3 in "Aladdin"). All fits weigh by relative
error and give no negative coefficients.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from catenary_agent.decoders.base import CacheLayout, DecoderExecutor, StepItem, Want
from catenary_agent.decoders.sampling.sampling import Sampler
from catenary_services.domain.ids import ModelKey, PartitionKey
from catenary_services.domain.sampling import SamplingParameters
from catenary_services.models.model_repository import ModelRepository

PREFILL_TOKENS = (2, 8, 24, 64, 128, 256, 512)
"""As far as a chunk goes."""
DECODE_SESSIONS = (1, 2, 3, 5, 8)
"""Odd ones too: matrix products of odd numbers of rows may take a tenth longer."""
DEEP_SESSIONS = (1, 2)
"""With context; at most so many caches are filled."""
DEEP_TOKENS = 256
"""Context of each, if sessions may be so long."""
FILL_TOKENS = 64
"""Of a prompt at a time, to fill caches: nobody is held up for longer than by a chunk."""
RUNS = 3
"""Runs of each point; the least counts."""
_MEASURED_SESSION = -1
"""Sessions of the platform have positive numbers."""
_WORTH_A_FLOOR = 0.9
"""A floor must bring the squared relative error below this share of what it was without."""
_EXACT = 1e-8
"""A smaller squared relative error is none."""


def time_blocks(repository: ModelRepository, key: ModelKey) -> tuple[int, ...]:
    """Returns the time of one decode token in each block of a model on this CPU, one thread.

    All blocks are alike; the last has the head, by its share of the weights.
    """
    from catenary_agent.decoders.onnx.onnx_executor import OnnxDecoder

    table = repository.decoder_table(key)
    partition = PartitionKey(key, 0, table.blocks)
    tokens = min(64, table.context_tokens)
    executor = OnnxDecoder(repository, partition, CacheLayout(table.blocks, tokens, (0,)))
    try:
        probe = Probe(executor)
        whole = _least(partial(probe.decode, 1))
    finally:
        executor.close()
    weights = [table.block_bytes] * table.blocks
    weights[-1] += table.head_bytes
    return tuple(round(whole * share / sum(weights)) for share in weights)


class Probe:
    """Steps of random rows through an executor, each with sessions of its own."""

    def __init__(self, executor: DecoderExecutor) -> None:
        self._executor = executor
        key, table = executor.key, executor.table
        self._blocks = key.last_block - key.first_block
        self.most_sessions = executor.free_block_slots // self._blocks
        self.most_tokens = executor.layout.session_tokens
        self._want: Want = "token" if key.last_block == table.blocks else "hidden"
        self._sampler = Sampler(SamplingParameters(), (), 0, ())  # greedy
        self._random = np.random.default_rng(0)
        self._depths: dict[int, int] = {}
        """Filled sessions -> tokens they have cached."""

    def prefill(self, tokens: int) -> int:
        """Returns the nanoseconds of one prompt."""
        return self._step([tokens])

    def decode(self, sessions: int) -> int:
        """Returns the nanoseconds of one step of so many sessions."""
        return self._step([1] * sessions)

    def _step(self, lengths: Sequence[int]) -> int:
        names = self._names(len(lengths))
        try:
            items = []
            for name, length in zip(names, lengths, strict=True):
                self._executor.open_session(name, self._executor.key.first_block)
                items.append(self._item(name, 0, length))
            return self._timed(items)
        finally:
            self.close()

    # Of sessions that stay open from one call to the next, until `close`.

    def fill(self, session: int, tokens: int) -> int:
        """Caches so many tokens more for session 0, 1, ..; returns the nanoseconds it took."""
        name = self._names(session + 1)[session]
        at = self._depths.get(name)
        if at is None:
            self._executor.open_session(name, self._executor.key.first_block)
            at = 0
        self._depths[name] = at + tokens
        last = self._executor.key.last_block == self._executor.table.blocks
        want: Want = "nothing" if last else "hidden"
        return self._timed([StepItem(name, at, self._rows(tokens), want)])

    def decode_deep(self, sessions: int) -> tuple[int, int]:
        """Returns context tokens and nanoseconds of one step of the first filled sessions."""
        names = list(self._depths)[:sessions]
        items = [self._item(name, self._depths[name], 1) for name in names]
        context = sum(self._depths[name] for name in names)
        for name in names:
            self._depths[name] += 1
        return context, self._timed(items)

    def close(self) -> None:
        """Closes every session of the probe."""
        for name in self._names(max(*DECODE_SESSIONS, *DEEP_SESSIONS)):
            self._executor.close_session(name)
        self._depths.clear()

    def _names(self, count: int) -> range:
        return range(_MEASURED_SESSION, _MEASURED_SESSION - count, -1)

    def _item(self, session: int, position: int, tokens: int) -> StepItem:
        return StepItem(session, position, self._rows(tokens), self._want, self._sampler)

    def _timed(self, items: Sequence[StepItem]) -> int:
        started = time.perf_counter_ns()
        self._executor.step(items)
        return time.perf_counter_ns() - started

    def _rows(self, count: int) -> np.ndarray:
        table = self._executor.table
        if self._executor.key.first_block == 0:
            return self._random.integers(0, table.vocabulary_size, count)
        return self._random.standard_normal((count, table.hidden_size)).astype(np.float32)


def _least(run: Callable[[], int]) -> int:
    return min(run() for _ in range(RUNS))


def line(sizes: Sequence[int], times: Sequence[float]) -> tuple[float, float]:
    """Returns (constant, slope) of the line with the least relative error, neither negative."""
    if len(sizes) == 1:
        return 0.0, times[0] / sizes[0]
    slope, constant = np.polyfit(sizes, times, 1, w=1.0 / np.maximum(1.0, times))
    if slope < 0:
        return _weighted_mean(times), 0.0
    if constant < 0:
        return 0.0, _weighted_mean([time / size for size, time in zip(sizes, times, strict=True)])
    return float(constant), float(slope)


def floored_line(sizes: Sequence[int], times: Sequence[float]) -> tuple[float, float, float]:
    """Returns constant, slope and floor: the shortest prompts may all take the same.

    Every number of shortest sizes is tried as the flat part; what has the least relative error
    counts. The floor is never above what the shortest took.
    """
    best = (*line(sizes, times), 0.0)
    least = _squares(best, sizes, times) * _WORTH_A_FLOOR - _EXACT * len(times)
    for flat in range(1, len(sizes) - 1):
        floor = _weighted_mean(times[:flat])
        candidate = (*line(sizes[flat:], times[flat:]), floor)
        squares = _squares(candidate, sizes, times)
        if squares < least:
            best, least = candidate, squares
    return best


def context_slope(
    shallow: Sequence[tuple[int, float]], deep: Sequence[tuple[int, int, float]]
) -> float:
    """Returns what a token of context adds to a step; 0 if that is not known.

    Args:
        shallow: Sessions and nanoseconds of steps without context.
        deep: Sessions, context tokens of all of them and nanoseconds of steps with it.
    """
    without = dict(shallow)
    # Eq. 3 is for more than one session; a single one has to do where there is no room for two.
    shared = [each for each in deep if each[0] > 1 and each[0] in without]
    known = shared or [each for each in deep if each[0] in without]
    pairs = [(ctx, ns - without[sessions]) for sessions, ctx, ns in known]
    squares = sum(ctx * ctx for ctx, _ in pairs)
    return max(0.0, sum(ctx * more for ctx, more in pairs) / squares) if squares else 0.0


def _weighted_mean(times: Sequence[float]) -> float:
    """Returns the constant of least relative error."""
    weights = [1.0 / max(1.0, time) for time in times]
    return sum(weights) / sum(weight * weight for weight in weights)


def _squares(
    fit: tuple[float, float, float], sizes: Sequence[int], times: Sequence[float]
) -> float:
    constant, slope, floor = fit
    return sum(
        (max(floor, constant + slope * size) / max(1.0, time) - 1.0) ** 2
        for size, time in zip(sizes, times, strict=True)
    )
