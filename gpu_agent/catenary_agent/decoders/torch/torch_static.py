"""Steps whose tensors keep their addresses, so that CUDA graphs can replay them.

Rows and sessions are padded to a bucket. A step's rows are those of its sessions with one new
token, then those of its prompt chunks, then padding, which writes to the pool's scratch row and
which nobody reads. All steps of an executor share one set of buffers, since one runs at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray

from catenary_agent.decoders.torch.torch_attention import (
    AttentionKernel,
    AttentionMetadata,
    StepTensors,
)
from catenary_agent.decoders.torch.torch_cache import CachePool, SessionCache
from catenary_agent.decoders.torch.torch_model import BlockModel


@dataclass(frozen=True, slots=True)
class StepBucket:
    """The room of a step."""

    rows: int
    singles: int
    """The most sessions with one new token."""
    chunks: int = 0
    """The most sessions with more; with 0, every row is a session."""

    def holds(self, rows: int, singles: int, chunks: int) -> bool:
        """Returns True if a step of so many rows and sessions has room."""
        return rows <= self.rows and singles <= self.singles and chunks <= self.chunks


class StepBuffers:
    """The inputs and the output of steps at fixed addresses.

    All integers of a step are one pinned array on the host and one on the device, so that a step
    begins with one copy. The places of sessions are the end of it, which is copied only if other
    sessions come, or their rows have moved.
    """

    def __init__(
        self,
        model: BlockModel,
        pool: CachePool,
        most: StepBucket,
        hidden: int,
        kernel: AttentionKernel = AttentionKernel.FLASH,
    ) -> None:
        """Allocates buffers.

        Args:
            model: The layers of the steps.
            pool: The caches of the sessions.
            most: The largest of everything that any bucket has.
            hidden: The hidden size.
            kernel: The way to compute attention.
        """
        self.model, self.pool, self.most, self.kernel = model, pool, most, kernel
        device, layers = pool.shape.device, pool.layers
        self.columns = most.singles + most.chunks + 2
        sizes = {
            "tokens": most.rows,
            "positions": most.rows,
            "column": most.rows,
            "singles": 1,
            "single_used": most.singles,
            "chunk_starts": most.chunks + 2,
            "chunk_used": most.chunks + 1,
            "ends": most.singles + most.chunks,
            "starts": layers * self.columns,
        }
        # Kernels are compiled for addresses that are multiples of four integers.
        firsts = [0, *accumulate(-(-size // 4) * 4 for size in sizes.values())]
        self._places = {
            name: (first, first + size)
            for (name, size), first in zip(sizes.items(), firsts, strict=False)
        }
        self._changing, count = self._places["starts"]
        pinned = device.type == "cuda"
        self._host = torch.zeros(count, dtype=torch.int32, pin_memory=pinned)
        self._device = torch.zeros(count, dtype=torch.int32, device=device)
        numbers = self._host.numpy()
        self._parts: dict[str, NDArray[np.int32]] = {
            name: numbers[slice(*place)] for name, place in self._places.items()
        }
        self._firsts = self._parts["starts"].reshape(layers, self.columns)
        self._known: tuple[list[SessionCache], list[SessionCache]] = [], []
        """The sessions whose places are set: those with one new token, and the others."""
        self._moves = pool.moves
        """The pool's count of moves when the places were set."""
        self._states: torch.Tensor | None = None
        shape = most.rows, hidden
        self.entering = self.part("tokens")
        """The inputs of the first layer: token ids int32 [rows], or states [rows, hidden]."""
        if model.blocks.embedding is None:
            self._states = torch.zeros(shape, dtype=torch.float32, pin_memory=pinned)
            self.entering = torch.zeros(shape, dtype=torch.float32, device=device)
        self.leaving = torch.zeros(shape, dtype=torch.float32, device=device)
        """Hidden states after the last layer: [rows, hidden]."""
        self._copied = torch.cuda.Event() if pinned else None  # type: ignore[no-untyped-call]
        self.clear()

    def part(self, name: str) -> torch.Tensor:
        """Returns a part of the integers on the device."""
        return self._device[slice(*self._places[name])]

    @property
    def on_device(self) -> list[torch.Tensor]:
        """All tensors on the device; some share memory."""
        return [self._device, self.entering, self.leaving]

    @property
    def starts(self) -> torch.Tensor:
        """First pool row of each session in each layer: int32 [layers, columns].

        Sessions with one new token come first, others behind the room for those. Columns without a
        session, such as the last one, have the scratch row.
        """
        return self.part("starts").view(self.pool.layers, self.columns)

    def clear(self) -> None:
        """Makes all rows padding."""
        self._firsts.fill(self.pool.scratch)
        self._known[0].clear()
        self._known[1].clear()
        for name, number in (("column", self.columns - 1), ("positions", 0), ("singles", 0)):
            self._parts[name].fill(number)
        for name in ("single_used", "chunk_used"):
            self._parts[name].fill(1)
        self._device.copy_(self._host)

    def fill(
        self,
        bucket: StepBucket,
        plan: AttentionMetadata,
        entering: Sequence[NDArray[np.generic]],
        ends: Sequence[int],
    ) -> None:
        """Sets the inputs of a step, without waiting for the device.

        Args:
            bucket: The room of the step.
            plan: Its layout. Sessions with one new token come first.
            entering: The inputs of each session.
            ends: Rows that `last` is to return.
        """
        if self._copied is not None:
            self._copied.synchronize()  # the copy of the step before reads the same memory
        parts, rows, singles = self._parts, plan.bounds[-1], plan.counts.count(1)
        chunks = len(plan.counts) - singles
        if self._states is None:
            np.concatenate(entering, out=parts["tokens"][:rows])
        else:
            np.concatenate(entering, out=self._states.numpy()[:rows])
        _put(parts["positions"], plan.positions, bucket.rows, 0)
        column = plan.session_of_row
        if chunks:
            column = np.where(column < singles, column, column + self.most.singles - singles)
        _put(parts["column"], column, bucket.rows, self.columns - 1)
        _put(parts["single_used"], plan.used[:singles], bucket.singles, 1)
        parts["ends"][: len(ends)] = ends
        if chunks:
            parts["singles"][0] = singles
            _put(parts["chunk_used"], plan.used[singles:], bucket.chunks + 1, 1)
            # Padding is a session of its own behind those of the bucket, which are empty.
            _put(parts["chunk_starts"], plan.bounds[singles:], bucket.chunks + 1, rows)
            parts["chunk_starts"][bucket.chunks + 1] = bucket.rows
        changed = self._set_starts(plan.caches, singles)
        self._send(self._device, self._host, None if changed else self._changing)
        if self._states is not None:
            self._send(self.entering, self._states, rows)
        if self._copied is not None:
            self._copied.record()

    @property
    def most_ends(self) -> int:
        """The most rows that `last` can return."""
        return self.most.singles + self.most.chunks

    def last(self, count: int) -> torch.Tensor:
        """Returns hidden states of the first `count` rows that were named as ends."""
        return self.leaving.index_select(0, self.part("ends")[:count])

    def _send(self, to: torch.Tensor, source: torch.Tensor, first: int | None) -> None:
        to[:first].copy_(source[:first], non_blocking=True)

    def _set_starts(self, caches: list[SessionCache], singles: int) -> bool:
        """Sets the places of sessions where these are others than before; returns whether."""
        changed, moved = False, self.pool.moves != self._moves
        self._moves = self.pool.moves
        if moved:
            self._known[0].clear()
            self._known[1].clear()
            self._firsts.fill(self.pool.scratch)
            changed = True
        firsts = 0, self.most.singles
        for first, group, known in zip(
            firsts, (caches[:singles], caches[singles:]), self._known, strict=True
        ):
            # Nobody looks at a group without sessions, which are the same when they come back.
            if group and group != known:
                end = first + len(group)
                self._firsts[:, first:end] = np.stack([cache.starts for cache in group], axis=1)
                self._firsts[:, end : first + len(known)] = self.pool.scratch
                known[:] = group
                changed = True
        return changed


class StaticStep:
    """A step of a bucket over shared buffers."""

    def __init__(self, buffers: StepBuffers, bucket: StepBucket) -> None:
        """Lays out a step; its numbers are those that `StepBuffers.fill` sets."""
        self._buffers, self.bucket = buffers, bucket
        pool, most = buffers.pool, buffers.most
        rows = bucket.rows
        self._positions = buffers.part("positions")[:rows]
        self._column = buffers.part("column")[:rows]
        starts, place = buffers.starts, torch.arange(bucket.singles + 1, dtype=torch.int32)
        place = place.to(pool.shape.device)
        self._place, self._singles = place[: bucket.singles, None, None], buffers.part("singles")
        none = torch.empty(0, dtype=torch.int64, device=pool.shape.device)
        self._alone = StepTensors(
            plan=None,
            pool=pool,
            kernel=buffers.kernel,
            writes=none,
            query_starts=place,
            key_starts=starts,
            used=buffers.part("single_used"),
            most_new=1,
            most_used=pool.tokens,
        )
        self._chunks = StepTensors(
            plan=None,
            pool=pool,
            kernel=buffers.kernel,
            writes=none,
            query_starts=buffers.part("chunk_starts"),
            key_starts=starts[:, most.singles :],
            used=buffers.part("chunk_used"),
            most_new=rows,
            most_used=pool.tokens,
        )

    def run(self) -> None:
        """Computes the hidden states that leave the last layer."""
        buffers, bucket = self._buffers, self.bucket
        positions = self._positions.long()
        step, sessions = self._alone, bucket.singles
        if bucket.chunks:
            step, sessions = self._chunks, bucket.chunks + 1
            step.singles, step.are_single = self._alone, self._place < self._singles
        step.writes = buffers.starts.index_select(1, self._column) + positions
        joining = {0: buffers.entering[: bucket.rows]}
        hidden = buffers.model.forward(step, positions, joining, [sessions] * buffers.pool.layers)
        buffers.leaving[: bucket.rows].copy_(hidden)


def _put(
    part: NDArray[np.int32], numbers: Sequence[int] | NDArray[np.int64], room: int, other: int
) -> None:
    """Writes numbers to a part of the integers, and another number behind them."""
    part[: len(numbers)] = numbers
    part[len(numbers) : room] = other
