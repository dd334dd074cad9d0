"""Key-value caches of the PyTorch executor: one pool of block slots for all blocks of a partition.

A slot is a contiguous range of `tokens` rows and holds the cache of one session in one block. Any
slot can serve any block, so sessions that enter at different blocks share the pool without loss,
and the number of block slots is exact.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from catenary_agent.decoders.transfers.lent_memory import wait_for
from catenary_agent.decoders.transfers.pinned import host_memory
from catenary_agent.kv.arrays import NAMES, TYPES, CacheArray
from catenary_agent.kv.span import CacheSpan, pieces
from catenary_services.errors import Overloaded

_PINNED_BYTES = 8 << 20
"""The most bytes of an exported array that is pinned memory itself. Larger ones are put together of
such pieces. Agents export as much at a time (`CacheLimits.export_bytes`)."""
_STAGED_BYTES = 4 << 20
"""The bytes of imported arrays that are copied to a device at a time."""
_TYPES: dict[np.dtype[Any], torch.dtype] = {
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float16): torch.float16,
    np.dtype(np.uint16): torch.bfloat16,
}
"""The number formats of the dtypes of a `CacheArray`."""
_HOST_TYPES = {number: dtype for dtype, number in _TYPES.items()}


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
        size = (2, rows, shape.heads, shape.head_size)
        try:
            self._rows = torch.empty(size, dtype=shape.dtype, device=shape.device)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            text = str(error).splitlines()[0][:200]
            raise Overloaded(f"no memory for {slots} block slots of {tokens} tokens: {text}") from (
                error
            )
        self.keys, self.values = self._rows.unbind()
        self._free = list(range(slots - 1, -1, -1))
        self._staging: torch.Tensor | None = None
        """Host memory on the way to a device; None until something is imported."""

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

    def read(
        self,
        cache: SessionCache,
        span: CacheSpan,
        first_block: int,
        most_bytes: int | None = None,
    ) -> CacheArray:
        """Returns a copy of a part of a session's cache on the host.

        Args:
            cache: The session's slots.
            span: The blocks and tokens to copy.
            first_block: The first block of the partition.
            most_bytes: The most bytes that leave the device at a time; None if that is for the
                device to say.

        Returns:
            `[blocks, 2, tokens, heads, head_size]`: float32, float16, or uint16 with the bits of
                bfloat16. An array from a CUDA device is pinned memory unless it is large.
        """
        row_bytes = 2 * self.keys[self.scratch].nbytes
        if most_bytes is None:
            is_cuda = self.shape.device.type == "cuda"
            most_bytes = _PINNED_BYTES if is_cuda else row_bytes * span.blocks * span.tokens
        parts = list(pieces(span, row_bytes, most_bytes))
        if len(parts) == 1:
            return self._read(cache, span, first_block)
        row = (self.shape.heads, self.shape.head_size)
        made: CacheArray = np.empty(
            (span.blocks, 2, span.tokens, *row), _HOST_TYPES[self.shape.dtype]
        )
        for part in parts:
            _part_of(made, span, part)[:] = self._read(cache, part, first_block)
        return made

    def write_part(
        self,
        cache: SessionCache,
        span: CacheSpan,
        first_block: int,
        rows: CacheArray,
        most_bytes: int = _STAGED_BYTES,
    ) -> None:
        """Overwrites a part of a session's cache with an array that `read` of any pool returned.

        Args:
            cache: The session's slots.
            span: The blocks and tokens to overwrite.
            first_block: The first block of the partition.
            rows: The array, in any of the formats of `read`.
            most_bytes: The most bytes that go to the device at a time.
        """
        row_bytes = 2 * rows[0, 0, 0].nbytes
        for part in pieces(span, row_bytes, most_bytes):
            piece = _part_of(rows, span, part)
            staging = self._staged(piece.nbytes)
            staging.numpy().view(rows.dtype).reshape(piece.shape)[:] = piece
            # It waits for the copy, so the staging memory is free again afterwards.
            arrived = staging.to(self.shape.device).view(_TYPES[rows.dtype]).view(piece.shape)
            self._put(cache, part, first_block, arrived)

    def lend(
        self, cache: SessionCache, span: CacheSpan, first_block: int, memory: torch.Tensor
    ) -> str:
        """Copies a part of a session's cache to the beginning of memory of the same device.

        Args:
            cache: The session's slots.
            span: The blocks and tokens to copy.
            first_block: The first block of the partition.
            memory: Bytes, at least as many as the part has.

        Returns:
            The name of its datatype.
        """
        source, slots = self._slots_of(cache, span, first_block)
        target = _rows_in(memory, span, self.shape, self.shape.dtype)
        torch.index_select(source, 0, slots, out=target)
        wait_for(self.shape.device)
        return NAMES[_HOST_TYPES[self.shape.dtype]]

    def borrow(
        self,
        cache: SessionCache,
        span: CacheSpan,
        first_block: int,
        memory: torch.Tensor,
        datatype: str,
    ) -> None:
        """Overwrites a part of a session's cache with what `lend` of any pool has copied.

        Args:
            cache: The session's slots.
            span: The blocks and tokens to overwrite.
            first_block: The first block of the partition.
            memory: Bytes of this or another device, at least as many as the part has.
            datatype: What `lend` returned.
        """
        rows = _rows_in(memory, span, self.shape, _TYPES[TYPES[datatype]])
        self._put(cache, span, first_block, rows.to(self.shape.device))
        wait_for(self.shape.device)

    def _put(
        self, cache: SessionCache, span: CacheSpan, first_block: int, rows: torch.Tensor
    ) -> None:
        target, slots = self._slots_of(cache, span, first_block)
        target.index_copy_(0, slots, rows.to(self.shape.dtype))

    def _read(self, cache: SessionCache, span: CacheSpan, first_block: int) -> CacheArray:
        source, slots = self._slots_of(cache, span, first_block)
        host = gathered = source.index_select(0, slots)
        if gathered.device.type != "cpu":
            host = host_memory(tuple(gathered.shape), gathered.dtype, gathered.device)
            host.copy_(gathered)
        bits = host.view(torch.int16) if host.dtype == torch.bfloat16 else host
        made: CacheArray = bits.numpy().view(_HOST_TYPES[host.dtype])
        return made

    def _slots_of(
        self, cache: SessionCache, span: CacheSpan, first_block: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns a span's tokens in all slots, and the slots of the session in its blocks.

        The first is a view `[slots, 2, tokens, heads, head size]` of the pool, the second int64
        `[blocks]` on the device.
        """
        row = (self.shape.heads, self.shape.head_size)
        by_slot = self._rows[:, : self.scratch].view(2, self.slots, self.tokens, *row)
        first = span.first_block - first_block - cache.first_layer
        slots = torch.from_numpy(cache.slots[first : first + span.blocks])
        tokens = by_slot[:, :, span.first_token : span.last_token].transpose(0, 1)
        return tokens, slots.to(self.shape.device, non_blocking=True)

    def _staged(self, nbytes: int) -> torch.Tensor:
        if self._staging is None or len(self._staging) < nbytes:
            size = max(nbytes, _STAGED_BYTES)
            self._staging = host_memory((size,), torch.uint8, self.shape.device)
        return self._staging[:nbytes]

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


def _rows_in(
    memory: torch.Tensor, span: CacheSpan, shape: TokenCacheShape, dtype: torch.dtype
) -> torch.Tensor:
    """Returns the beginning of some bytes as keys and values of a span."""
    size = (span.blocks, 2, span.tokens, shape.heads, shape.head_size)
    nbytes = math.prod(size) * dtype.itemsize
    return memory[:nbytes].view(dtype).view(size)


def _part_of(rows: CacheArray, whole: CacheSpan, part: CacheSpan) -> CacheArray:
    """Returns the view of a part in an array of a whole span."""
    blocks = slice(part.first_block - whole.first_block, part.last_block - whole.first_block)
    tokens = slice(part.first_token - whole.first_token, part.last_token - whole.first_token)
    return rows[blocks, :, tokens]
