"""Measurement of a partition's cost: a line over prompt lengths, a plane over sessions and context.

Prompts are timed up to the length of a chunk, since longer ones never run at once. Steps are timed
with empty caches for several numbers of sessions, then for a few sessions with a context, which
gives the cost of a cached token (k2 of eq. 3 in "Aladdin"). All fits minimise the relative error
and have no negative coefficients.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from catenary_agent.decoders.base import CacheLayout, DecoderExecutor, StepItem, Want
from catenary_agent.decoders.sampling.sampling import SessionSampler
from catenary_services.domain.decoder import CACHE_BLOCK_TOKENS
from catenary_services.domain.ids import ModelKey, PartitionKey
from catenary_services.domain.sampling import SamplingParameters
from catenary_services.models.model_repository import ModelRepository

PREFILL_TOKENS = (2, 8, 24, 64, 128, 256, 512)
"""Prompt lengths in tokens; those longer than a chunk are left out."""
DECODE_SESSIONS = (1, 2, 3, 5, 8)
"""Numbers of sessions. Some are odd: products of an odd number of rows may take a tenth longer."""
DEEP_SESSIONS = (1, 2)
"""Numbers of sessions with context; at most this many caches are filled."""
DEEP_TOKENS = 256
"""Context of each such session in tokens, if sessions may be so long."""
FILL_TOKENS = 64
"""Tokens cached at a time to fill caches, so that running sessions wait no longer than for a
chunk."""
RUNS = 3
"""Number of runs of each point; the shortest counts."""
_MEASURED_SESSION = -1
"""The first number of a measured session, counted downwards; those of the platform are positive."""
_WORTH_A_FLOOR = 0.9
"""A floor is used only if it reduces the squared relative error below this share."""
_EXACT = 1e-8
"""A squared relative error below this counts as zero."""


def time_blocks(repository: ModelRepository, key: ModelKey) -> tuple[int, ...]:
    """Returns the nanoseconds of one decode token in each block of a model on one thread.

    All blocks are alike, and the last one includes the head, in proportion to its weights.
    """
    from catenary_agent.decoders.onnx.onnx_executor import OnnxDecoder

    table = repository.decoder_table(key)
    partition = PartitionKey(key, 0, table.blocks)
    tokens = min(64, table.context_tokens)
    executor = OnnxDecoder(repository, partition, CacheLayout(table.blocks, tokens, (0,)))
    try:
        probe = StepTimer(executor)
        whole = _least(partial(probe.decode, 1))
    finally:
        executor.close()
    weights = [table.block_bytes] * table.blocks
    weights[-1] += table.head_bytes
    return tuple(round(whole * share / sum(weights)) for share in weights)


class StepTimer:
    """Runs steps of random rows through an executor, with sessions that it opens for them."""

    def __init__(self, executor: DecoderExecutor) -> None:
        self._executor = executor
        key, table = executor.key, executor.table
        self._blocks = key.last_block - key.first_block
        left = executor.layout.memory_tokens - executor.cached_block_tokens
        self.cache_tokens = left // self._blocks
        """The most tokens of all sessions together, which count in whole cache blocks."""
        slots = executor.free_block_slots // self._blocks
        self.most_sessions = min(slots, max(1, self.cache_tokens // CACHE_BLOCK_TOKENS))
        self.most_tokens = min(executor.layout.session_tokens, max(1, self.cache_tokens))
        self._want: Want = "token" if key.last_block == table.blocks else "hidden"
        self._sampler = SessionSampler(SamplingParameters(), (), 0, ())  # greedy
        self._random = np.random.default_rng(0)
        self._depths: dict[int, int] = {}
        """Number of cached tokens of each filled session."""

    def prefill(self, tokens: int) -> int:
        """Returns the nanoseconds of one prompt."""
        return self._step([tokens])

    def decode(self, sessions: int) -> int:
        """Returns the nanoseconds of one decode step of some sessions without context."""
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

    # The following sessions stay open from one call to the next, until `close`.

    def fill(self, session: int, tokens: int) -> int:
        """Caches more tokens for session 0, 1, ...; returns the nanoseconds it took."""
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
        """Closes every session of the timer."""
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
    """Returns constant and slope of the line with the least relative error, neither negative."""
    if len(sizes) == 1:
        return 0.0, times[0] / sizes[0]
    slope, constant = np.polyfit(sizes, times, 1, w=1.0 / np.maximum(1.0, times))
    if slope < 0:
        return _weighted_mean(times), 0.0
    if constant < 0:
        return 0.0, _weighted_mean([time / size for size, time in zip(sizes, times, strict=True)])
    return float(constant), float(slope)


def floored_line(sizes: Sequence[int], times: Sequence[float]) -> tuple[float, float, float]:
    """Returns constant, slope and floor of prompt times: short prompts may take equally long.

    Every number of shortest sizes is tried as the flat part, and the fit with the least relative
    error is used.
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
    """Returns the nanoseconds a token of context adds to a step; 0 if they are unknown.

    Args:
        shallow: Sessions and nanoseconds of steps without context.
        deep: Sessions, context tokens of all of them and nanoseconds of steps with context.
    """
    without = dict(shallow)
    # Eq. 3 holds for more than one session; a single one is used if there is no room for two.
    shared = [each for each in deep if each[0] > 1 and each[0] in without]
    known = shared or [each for each in deep if each[0] in without]
    pairs = [(ctx, ns - without[sessions]) for sessions, ctx, ns in known]
    squares = sum(ctx * ctx for ctx, _ in pairs)
    return max(0.0, sum(ctx * more for ctx, more in pairs) / squares) if squares else 0.0


def _weighted_mean(times: Sequence[float]) -> float:
    """Returns the constant with the least relative error."""
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
