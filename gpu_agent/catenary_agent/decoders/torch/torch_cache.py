"""Key-value caches of the PyTorch executor: one pool of block slots for all blocks of a partition.

A slot is a contiguous range of `tokens` rows and holds the cache of one session in one block. Any
slot can serve any block, so sessions that enter at different blocks share the pool without loss,
and the number of block slots is exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from catenary_agent.kv.arrays import CacheArray, to_bfloat16, to_float32
from catenary_agent.kv.span import CacheSpan
from catenary_services.errors import Overloaded


@dataclass(frozen=True, slots=True)
class TokenCacheShape:
    """The shape and format of one token's cache in one block."""

    heads: int
    head_size: int
    dtype: torch.dtype
    device: torch.device


@dataclass(slots=True, eq=False)
class SessionCache:
    """The slots of one session."""

    first_layer: int
    """Layer of the partition, counted from 0, at which the session enters."""
    slots: NDArray[np.int64]
    """Slot of each of its layers: [layers - first_layer]."""
    starts: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    """First pool row of its slots: [layers]; 0 for layers it does not run through."""


class SlotPool:
    """Keys and values of all slots.

    Slots are not cleared between sessions: readers never look at rows after a session's length.
    """

    def __init__(self, slots: int, tokens: int, layers: int, shape: TokenCacheShape) -> None:
        """Allocates the pool. Pages of slots that are never used are not committed on a CPU.

        Args:
            slots: Number of block slots.
            tokens: Number of rows of a slot.
            layers: Number of layers of the partition.
            shape: Shape and format of one token in one block.

        Raises:
            Overloaded: The device has too little memory.
        """
        self.slots, self.tokens, self.layers, self.shape = slots, tokens, layers, shape
        rows = slots * tokens + 1  # padding of CUDA graphs writes to the last row
        size = (rows, shape.heads, shape.head_size)
        try:
            self.keys = torch.empty(size, dtype=shape.dtype, device=shape.device)
            self.values = torch.empty(size, dtype=shape.dtype, device=shape.device)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            text = str(error).splitlines()[0][:200]
            raise Overloaded(f"no memory for {slots} block slots of {tokens} tokens: {text}") from (
                error
            )
        self._free = list(range(slots - 1, -1, -1))

    @property
    def spare_bytes(self) -> int:
        """The bytes of the scratch row, which the pool takes beside its slots."""
        return self.keys[self.scratch].nbytes + self.values[self.scratch].nbytes

    @property
    def scratch(self) -> int:
        """Index of a row that is written but never read."""
        return self.slots * self.tokens

    def open(self, first_layer: int) -> SessionCache:
        """Takes a slot for every layer from `first_layer` on; the caller has counted them."""
        taken = [self._free.pop() for _ in range(self.layers - first_layer)]
        cache = SessionCache(first_layer, np.array(taken, np.int64))
        self._place(cache)
        return cache

    def close(self, cache: SessionCache) -> None:
        self._free.extend(reversed(cache.slots.tolist()))

    def write(self, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Stores keys and values `[n, heads, head_size]` at pool rows int64 `[n]`."""
        self.keys.index_copy_(0, rows, keys)
        self.values.index_copy_(0, rows, values)

    def read(self, cache: SessionCache, span: CacheSpan, first_block: int) -> CacheArray:
        """Returns a copy of a part of a session's cache on the host.

        Args:
            cache: The session's slots.
            span: The blocks and tokens to copy.
            first_block: The first block of the partition.

        Returns:
            `[blocks, 2, tokens, heads, head_size]`: float32, float16, or uint16 with the bits of
                bfloat16.
        """
        parts = []
        for block in range(span.first_block, span.last_block):
            rows = _rows_of(cache, block - first_block, span)
            parts += [self.keys[rows], self.values[rows]]
        stacked = torch.stack(parts)
        whole = stacked.view(span.blocks, 2, *stacked.shape[1:])
        if whole.dtype == torch.bfloat16:
            bits: CacheArray = whole.view(torch.int16).cpu().numpy().view(np.uint16)
            return bits
        host: CacheArray = whole.cpu().numpy()
        return host

    def write_part(
        self, cache: SessionCache, span: CacheSpan, first_block: int, rows: CacheArray
    ) -> None:
        """Overwrites a part of a session's cache with an array that `read` of any pool returned."""
        if self.shape.dtype == torch.bfloat16:
            whole = torch.from_numpy(np.array(to_bfloat16(rows)).view(np.int16))
            whole = whole.to(self.shape.device).view(torch.bfloat16)
        else:
            exact = rows if self.shape.dtype == torch.float16 else to_float32(rows)
            if exact.dtype == np.uint16:
                exact = to_float32(exact)
            whole = torch.from_numpy(np.array(exact)).to(self.shape.device)
        for index, block in enumerate(range(span.first_block, span.last_block)):
            target = _rows_of(cache, block - first_block, span)
            self.keys[target].copy_(whole[index, 0])
            self.values[target].copy_(whole[index, 1])

    def adopt(
        self, old: SlotPool, sessions: Mapping[int, SessionCache], cached: Mapping[int, int]
    ) -> None:
        """Copies sessions from an older pool into this empty one.

        Args:
            old: The pool they are in, with the same layers and shape.
            sessions: Their slots, changed in place.
            cached: Number of cached tokens of each; at most what a slot here holds.
        """
        for session, cache in sessions.items():
            before = cache.starts
            moved = self.open(cache.first_layer)
            count = cached[session]
            for layer in range(cache.first_layer, self.layers):
                source = slice(before[layer], before[layer] + count)
                target = slice(moved.starts[layer], moved.starts[layer] + count)
                self.keys[target].copy_(old.keys[source])
                self.values[target].copy_(old.values[source])
            cache.slots, cache.starts = moved.slots, moved.starts

    def _place(self, cache: SessionCache) -> None:
        starts = np.zeros(self.layers, np.int64)
        starts[cache.first_layer :] = cache.slots * self.tokens
        cache.starts = starts


def _rows_of(cache: SessionCache, layer: int, span: CacheSpan) -> slice:
    """Returns the pool rows of a span's tokens in one layer of the partition."""
    start = int(cache.starts[layer])
    return slice(start + span.first_token, start + span.last_token)
