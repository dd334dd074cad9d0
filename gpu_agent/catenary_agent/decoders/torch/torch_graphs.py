"""CUDA graphs of steps: replaying a graph replaces the hundreds of launches of a step.

There is a graph for each bucket of rows, of two kinds: steps in which every session decodes, and
steps with prompt chunks. Sessions that enter behind the partition's first layer run eagerly, and so
do steps that no bucket holds. The head is not part of a graph: it is computed for those rows only
whose logits are wanted, and launched while the graph still runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from numpy.typing import NDArray

from catenary_agent.decoders.torch.torch_attention import (
    AttentionKernel,
    AttentionMetadata,
)
from catenary_agent.decoders.torch.torch_cache import SlotPool
from catenary_agent.decoders.torch.torch_model import BlockModel
from catenary_agent.decoders.torch.torch_static import StaticStep, StepBucket, StepBuffers
from catenary_agent.devices.cuda_graphs import GraphRecorder
from catenary_services.log import get_logger

DECODE_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
"""Rows of decode steps. On an H200, 64 more rows of an 8B model cost 2 to 3 ms of 12 to 20."""
MIXED_ROWS = (16, 32, 64, 96, *range(128, 1024 + 1, 64))
"""Rows of steps with prompt chunks. An eager step of up to 512 takes as long as its launches."""
_MOST_CHUNKS = 32
"""The most sessions with chunks: each has a part of the attention's grid, with work or without."""
_MET_BEFORE_CAPTURE = 4
"""The time of a capture is about that of four eager steps, less that of their replays."""

_log = get_logger("catenary_agent.decoders")


@dataclass(frozen=True, slots=True)
class GraphLimits:
    """The largest steps that are captured."""

    sessions: int
    chunk_tokens: int
    """The most tokens of prompts in one step; 0 if only decode steps are captured."""

    def buckets(self) -> list[StepBucket]:
        """Returns the buckets by ascending rows, those of decode steps first."""
        sessions = max(1, min(self.sessions, DECODE_ROWS[-1]))
        decoding = [StepBucket(rows, rows) for rows in _stairs(DECODE_ROWS, sessions)]
        if not self.chunk_tokens:
            return decoding
        most = min(sessions + self.chunk_tokens, MIXED_ROWS[-1])
        return decoding + [
            StepBucket(rows, min(rows, sessions), min(_MOST_CHUNKS, -(-rows // 2)))
            for rows in _stairs(MIXED_ROWS, most)
        ]


@dataclass(slots=True)
class _Captured:
    """The graph of a bucket, or how often it would have been replayed."""

    replay: Callable[[], object] | None = None
    static: StaticStep | None = None
    """The step that is replayed, whose tensors the graph knows by address only."""
    met: int = 0


@dataclass(slots=True)
class StepOutput:
    """The states behind the last layer, valid until the next step."""

    hidden: torch.Tensor
    """The states of all rows: float32 [rows, hidden size]."""
    last: torch.Tensor | None = field(default=None)
    """The states of the rows that were asked for; None if none were."""


class StepGraphs:
    """The CUDA graphs of one executor over one pool; a new pool needs new ones."""

    def __init__(
        self,
        model: BlockModel,
        pool: SlotPool,
        hidden_size: int,
        limits: GraphLimits,
        kernel: AttentionKernel = AttentionKernel.FLASH,
    ) -> None:
        """Allocates the buffers of steps; nothing is captured yet."""
        self.buckets = limits.buckets()
        most = StepBucket(*(max(each) for each in zip(*map(_sizes, self.buckets), strict=True)))
        self.buffers = StepBuffers(model, pool, most, hidden_size, kernel)
        self._graphs = {bucket: _Captured() for bucket in self.buckets}
        self._recorder = GraphRecorder(pool.shape.device)
        self._broken = False

    def bucket_of(self, plan: AttentionMetadata) -> StepBucket | None:
        """Returns the smallest bucket that holds a step; None if none does."""
        if plan.entries[-1] > 0:
            return None
        singles = plan.counts.count(1)
        counts = plan.bounds[-1], singles, len(plan.counts) - singles
        # Whatever is captured for a prompt would also do for decode rows, at a higher price.
        return next(
            (
                each
                for each in self.buckets
                if bool(each.chunks) == bool(counts[2]) and each.holds(*counts)
            ),
            None,
        )

    def run(
        self, plan: AttentionMetadata, inputs: Sequence[NDArray[Any]], ends: Sequence[int]
    ) -> StepOutput | None:
        """Replays the graph of a step's bucket, which is captured if that is worth its while.

        Args:
            plan: A step. Sessions with one new token come first.
            inputs: The inputs of each session.
            ends: The rows whose states are wanted by themselves.

        Returns:
            The states; None if the step has to run eagerly.
        """
        bucket = None if self._broken else self.bucket_of(plan)
        # Guessed tokens may want more rows by themselves than there are sessions.
        if bucket is None or len(ends) > self.buffers.most_ends:
            return None
        graph = self._graphs[bucket]
        graph.met += 1
        if graph.replay is None and graph.met < _MET_BEFORE_CAPTURE:
            return None
        # Before a capture, because that begins with a run: of this step, not of an earlier one.
        self.buffers.fill(bucket, plan, inputs, ends)
        if graph.replay is None:
            self._capture(bucket)
        if graph.replay is None:
            return None
        graph.replay()
        rows = plan.bounds[-1]
        hidden = self.buffers.leaving[:rows]
        if len(ends) == rows:
            return StepOutput(hidden, hidden)
        return StepOutput(hidden, self.buffers.last(len(ends)) if ends else None)

    def capture(self) -> None:
        """Captures all graphs, before any session is open.

        The largest comes first: the memory of one serves all that are smaller.
        """
        self.buffers.clear()
        for bucket in sorted(self.buckets, key=lambda each: -each.rows):
            if not self._broken and self._graphs[bucket].replay is None:
                self._capture(bucket)

    def _capture(self, bucket: StepBucket) -> None:
        graph, static = self._graphs[bucket], StaticStep(self.buffers, bucket)
        try:
            graph.replay = self._recorder.record(static.run)
            graph.static = static
        except (RuntimeError, torch.OutOfMemoryError) as error:
            self._broken = True
            reason = str(error).splitlines()[0][:200]
            _log.warning("step_graphs_unavailable", rows=bucket.rows, reason=reason)


def _stairs(steps: Sequence[int], most: int) -> list[int]:
    return [*(step for step in steps if step < most), most]


def _sizes(bucket: StepBucket) -> tuple[int, int, int]:
    return bucket.rows, bucket.singles, bucket.chunks
