"""CUDA graphs of decode steps: replaying a graph replaces the hundreds of launches of a step.

There is one graph per batch bucket. A smaller batch is padded with rows that write to the pool's
scratch row and that nobody reads. Only steps in which every session decodes one token and enters at
the partition's first block are captured; all others run eagerly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from catenary_agent.decoders.torch.torch_attention import (
    AttentionKernel,
    AttentionMetadata,
    StepTensors,
)
from catenary_agent.decoders.torch.torch_cache import SlotPool
from catenary_agent.decoders.torch.torch_model import BlockModel
from catenary_services.log import get_logger

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)

_log = get_logger("catenary_agent.decoders")
_WARM_RUNS = 2


def bucket_of(sessions: int) -> int | None:
    """Returns the smallest bucket for a number of sessions; None if there is none."""
    return next((size for size in BUCKETS if size >= sessions), None)


def graphable(plan: AttentionMetadata) -> bool:
    """Returns True if every session decodes one token and enters at the first layer."""
    return (
        max(plan.counts) == 1 and plan.entries[-1] == 0 and bucket_of(len(plan.counts)) is not None
    )


class StaticStep:
    """A decode step of a fixed number of sessions, whose tensors keep their addresses."""

    def __init__(self, model: BlockModel, pool: SlotPool, size: int, hidden_size: int) -> None:
        """Allocates a step of `size` rows, all of them padding."""
        blocks, device, layers = model.blocks, pool.shape.device, pool.layers
        self._model, self._scratch = model, pool.scratch
        self.size = size
        long, short = torch.int64, torch.int32
        if blocks.embedding is None:
            self.entering = torch.zeros((size, hidden_size), dtype=torch.float32, device=device)
        else:
            self.entering = torch.zeros(size, dtype=long, device=device)
        self.positions = torch.zeros(size, dtype=long, device=device)
        starts = (layers, size + 1)
        self.step = StepTensors(
            plan=None,
            pool=pool,
            kernel=AttentionKernel.FLASH,
            writes=torch.full((layers, size), pool.scratch, dtype=long, device=device),
            query_starts=torch.arange(size + 1, dtype=short, device=device),
            key_starts=torch.full(starts, pool.scratch, dtype=short, device=device),
            used=torch.ones(size, dtype=short, device=device),
            most_new=1,
            most_used=pool.tokens,
        )

    def run(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the hidden states and, where the last block is, the logits of all rows."""
        layers = len(self._model.blocks.layers)
        joining = {0: self.entering}
        hidden = self._model.forward(self.step, self.positions, joining, [self.size] * layers)
        head = self._model.blocks.head
        return hidden, self._model.logits(hidden) if head is not None else None

    def fill(self, plan: AttentionMetadata, entering: torch.Tensor) -> None:
        """Sets the first rows to those of a plan; all others become padding."""
        sessions = len(plan.counts)
        spare = self.size - sessions
        self.entering[:sessions].copy_(entering)
        self.positions[:sessions].copy_(torch.from_numpy(plan.positions))
        writes = np.pad(plan.writes, ((0, 0), (0, spare)), constant_values=self._scratch)
        self.step.writes.copy_(torch.from_numpy(writes))
        starts = np.pad(plan.starts, ((0, 0), (0, spare + 1)), constant_values=self._scratch)
        self.step.key_starts.copy_(torch.from_numpy(starts.astype(np.int32)))
        used = np.array([*plan.used, *[1] * spare], np.int32)
        self.step.used.copy_(torch.from_numpy(used))


@dataclass(slots=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    static: StaticStep
    hidden: torch.Tensor
    logits: torch.Tensor | None


class DecodeGraphs:
    """The CUDA graphs of one executor over one pool; a new pool needs new ones."""

    def __init__(self, model: BlockModel, pool: SlotPool, hidden_size: int) -> None:
        """Begins without graphs; each is captured when its bucket is first used."""
        self._model = model
        self._pool = pool
        self._hidden_size = hidden_size
        self._graphs: dict[int, _Graph] = {}
        self._memory: Any = None
        self._broken = False

    def run(
        self, plan: AttentionMetadata, entering: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Replays the graph of a step's bucket, which is captured first if necessary.

        Args:
            plan: A step for which `graphable` is true.
            entering: The inputs of the first layer, on the host or the device.

        Returns:
            Hidden states [sessions, hidden size] and, where the last block is, logits [sessions,
                vocabulary], valid until the next run; None if no graph can be captured.
        """
        sessions = len(plan.counts)
        size = bucket_of(sessions)
        if self._broken or size is None:
            return None
        if size not in self._graphs and not self._capture(size):
            return None
        graph = self._graphs[size]
        graph.static.fill(plan, entering)
        graph.graph.replay()
        logits = None if graph.logits is None else graph.logits[:sessions]
        return graph.hidden[:sessions], logits

    def capture(self, most_sessions: int) -> None:
        """Captures the graphs of every bucket up to that of `most_sessions`."""
        for size in BUCKETS:
            if size > (bucket_of(most_sessions) or BUCKETS[-1]) or not self._capture(size):
                return

    def _capture(self, size: int) -> bool:
        try:
            self._graphs[size] = self._captured(size)
        except (RuntimeError, torch.OutOfMemoryError) as error:
            self._broken = True
            reason = str(error).splitlines()[0][:200]
            _log.warning("decode_graphs_unavailable", sessions=size, reason=reason)
            return False
        return True

    def _captured(self, size: int) -> _Graph:
        device = self._pool.shape.device
        static = StaticStep(self._model, self._pool, size, self._hidden_size)
        side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for _ in range(_WARM_RUNS):
                static.run()
        torch.cuda.current_stream(device).wait_stream(side)
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        # Graphs of one executor never run at the same time, so they can share memory.
        with torch.cuda.graph(
            graph, pool=self._memory, stream=side, capture_error_mode="thread_local"
        ):
            hidden, logits = static.run()
        self._memory = graph.pool()
        return _Graph(graph, static, hidden, logits)
