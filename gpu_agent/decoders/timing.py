"""What a partition costs: a line per prompt length, a line per number of sessions."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from gpu_agent.decoders.base import CacheLayout, DecoderExecutor, StepItem, Want
from services.domain.ids import ModelKey, PartitionKey
from services.model_repository import ModelRepository

PREFILL_TOKENS = (8, 24, 64)
DECODE_SESSIONS = (1, 2, 4, 8)
RUNS = 3
"""Runs of each point; the least counts."""
_MEASURED_SESSION = -1
"""Sessions of the platform have positive numbers."""


def time_blocks(repository: ModelRepository, key: ModelKey) -> tuple[int, ...]:
    """Returns the time of one decode token in each block of a model on this CPU, one thread.

    All blocks are alike; the last has the head, by its share of the weights.
    """
    from gpu_agent.decoders.onnx_executor import OnnxDecoder

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
        self._want: Want = "logits" if key.last_block == table.blocks else "hidden"
        self._random = np.random.default_rng(0)

    def prefill(self, tokens: int) -> int:
        """Returns the nanoseconds of one prompt."""
        return self._step([tokens])

    def decode(self, sessions: int) -> int:
        """Returns the nanoseconds of one step of so many sessions."""
        return self._step([1] * sessions)

    def _step(self, lengths: Sequence[int]) -> int:
        executor = self._executor
        names = range(_MEASURED_SESSION, _MEASURED_SESSION - len(lengths), -1)
        items = []
        try:
            for name, length in zip(names, lengths, strict=True):
                executor.open_session(name, executor.key.first_block)
                items.append(StepItem(name, 0, self._rows(length), self._want))
            started = time.perf_counter_ns()
            executor.step(items)
            return time.perf_counter_ns() - started
        finally:
            for name in names:
                executor.close_session(name)

    def _rows(self, count: int) -> np.ndarray:
        table = self._executor.table
        if self._executor.key.first_block == 0:
            return self._random.integers(0, table.vocabulary_size, count)
        return self._random.standard_normal((count, table.hidden_size)).astype(np.float32)


def _least(run: Callable[[], int]) -> int:
    return min(run() for _ in range(RUNS))


def line(sizes: Sequence[int], times: Sequence[int]) -> tuple[int, int]:
    """Returns (constant, slope) of the least-squares line, neither negative."""
    if len(sizes) == 1:
        return 0, round(times[0] / sizes[0])
    slope, constant = np.polyfit(sizes, times, 1)
    slope = max(0.0, float(slope))
    if constant < 0:
        constant, slope = 0.0, sum(times) / sum(sizes)
    return round(float(constant)), round(slope)
