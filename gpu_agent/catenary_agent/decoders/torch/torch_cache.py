"""Key-value caches of the PyTorch executor: one pool of rows for all blocks of a partition.

A row holds the key and the value of one token in one block. A session has a contiguous range of
rows in every block it runs through, which grows with it (`extents`), so the pool holds as many
tokens as it has rows, however long sessions are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from catenary_agent.decoders.cache.extents import Extent, ExtentMove, ExtentTable
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
_MOVED_BYTES = 16 << 20
"""The size of the buffer by way of which rows of a session move within the pool."""
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
    """The rows of one session."""

    first_layer: int
    """Layer of the partition, counted from 0, at which the session enters."""
    extent: Extent
    starts: NDArray[np.int64]
    """First pool row of its tokens: [layers]; 0 for layers it does not run through. It is another
    array after rows have moved."""


class CachePool:
    """Keys and values of all sessions.

    Rows are not cleared between sessions: readers never look at rows after a session's length.
    """

    def __init__(self, rows: int, tokens: int, layers: int, shape: TokenCacheShape) -> None:
        """Allocates the pool. Pages of rows that are never used are not committed on a CPU.

        Args:
            rows: Number of rows: of tokens, counted once per block.
            tokens: The most tokens of a session.
            layers: Number of layers of the partition.
            shape: Shape and format of one token in one block.

        Raises:
            Overloaded: The device has too little memory.
        """
        self.rows, self.tokens, self.layers, self.shape = rows, tokens, layers, shape
        # Padding of CUDA graphs writes to the last row.
        size = (2, rows + 1, shape.heads, shape.head_size)
        try:
            self._rows = torch.empty(size, dtype=shape.dtype, device=shape.device)
            # There from the beginning: rows that cannot be copied any more would be lost.
            size_bytes = max(_MOVED_BYTES, self._rows[:, 0].nbytes)
            self._buffer = torch.empty(size_bytes, dtype=torch.uint8, device=shape.device)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            text = str(error).splitlines()[0][:200]
            raise Overloaded(f"no memory for caches of {rows} tokens: {text}") from error
        self.keys, self.values = self._rows.unbind()
        self.moves = 0
        """The number of times that rows of some session have got another place."""
        self._extents = ExtentTable(rows)
        self._caches: dict[Extent, SessionCache] = {}
        self._staging: torch.Tensor | None = None
        """Host memory on the way to a device; None until something is imported."""

    @property
    def spare_bytes(self) -> int:
        """The bytes of the scratch row, which the pool takes beside those of sessions."""
        return self.keys[self.scratch].nbytes + self.values[self.scratch].nbytes

    @property
    def scratch(self) -> int:
        """Index of a row that is written but never read."""
        return self.rows

    def open(self, first_layer: int, most: int | None = None) -> SessionCache:
        """Returns the cache of a new session, which has no rows yet.

        Args:
            first_layer: The layer at which it enters.
            most: The most tokens it will have; None: `tokens`.
        """
        extent = Extent(self.layers - first_layer, most or self.tokens)
        cache = SessionCache(first_layer, extent, np.zeros(self.layers, np.int64))
        self._caches[extent] = cache
        return cache

    def opened(self, tokens: Sequence[int]) -> list[SessionCache]:
        """Returns sessions of all layers with room for so many tokens each."""
        caches = [self.open(0) for _ in tokens]
        for cache, count in zip(caches, tokens, strict=True):
            self.grow(cache, count)
        return caches

    def close(self, cache: SessionCache) -> None:
        """Frees the rows of a session."""
        del self._caches[cache.extent]
        self._extents.release(cache.extent)

    def grow(self, cache: SessionCache, tokens: int) -> None:
        """Gives a session room for so many tokens; those it has keep their values.

        Rows of all sessions may move.

        Raises:
            Overloaded: All sessions together need more rows than there are.
        """
        extent = cache.extent
        before = extent.first, extent.length
        moves = self._extents.grow(extent, tokens)
        if before == (extent.first, extent.length):
            return  # others move only to make room for it
        for move in moves:
            self._copy(move)
        for each in {extent, *(move.extent for move in moves)}:
            self._place(self._caches[each])

    def truncate(self, cache: SessionCache, tokens: int) -> None:
        """Lets others have the rows behind a session's first `tokens`, if they need them."""
        self._extents.shrink(cache.extent, tokens)

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
            cache: The session's rows.
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
            cache: The session's rows, which `grow` has given it.
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
            self._part(cache, part, first_block).copy_(arrived)

    def lend(
        self, cache: SessionCache, span: CacheSpan, first_block: int, memory: torch.Tensor
    ) -> str:
        """Copies a part of a session's cache to the beginning of memory of the same device.

        Args:
            cache: The session's rows.
            span: The blocks and tokens to copy.
            first_block: The first block of the partition.
            memory: Bytes, at least as many as the part has.

        Returns:
            The name of its datatype.
        """
        target = _rows_in(memory, span, self.shape, self.shape.dtype)
        target.copy_(self._part(cache, span, first_block))
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
            cache: The session's rows, which `grow` has given it.
            span: The blocks and tokens to overwrite.
            first_block: The first block of the partition.
            memory: Bytes of this or another device, at least as many as the part has.
            datatype: What `lend` returned.
        """
        rows = _rows_in(memory, span, self.shape, _TYPES[TYPES[datatype]])
        self._part(cache, span, first_block).copy_(rows)
        wait_for(self.shape.device)

    def _read(self, cache: SessionCache, span: CacheSpan, first_block: int) -> CacheArray:
        host = gathered = self._part(cache, span, first_block).contiguous()
        if gathered.device.type != "cpu":
            host = host_memory(tuple(gathered.shape), gathered.dtype, gathered.device)
            host.copy_(gathered)
        elif gathered.untyped_storage().data_ptr() == self._rows.untyped_storage().data_ptr():
            host = gathered.clone()  # it was contiguous in the pool, which is written to again
        bits = host.view(torch.int16) if host.dtype == torch.bfloat16 else host
        made: CacheArray = bits.numpy().view(_HOST_TYPES[host.dtype])
        return made

    def _part(self, cache: SessionCache, span: CacheSpan, first_block: int) -> torch.Tensor:
        """Returns a view of a span's rows: [blocks, 2, tokens, heads, head size]."""
        extent, row = cache.extent, (self.shape.heads, self.shape.head_size)
        lines = self._rows[:, extent.first : extent.end].view(2, extent.lines, extent.length, *row)
        first = span.first_block - first_block - cache.first_layer
        tokens = slice(span.first_token, span.last_token)
        return lines[:, first : first + span.blocks, tokens].transpose(0, 1)

    def _staged(self, nbytes: int) -> torch.Tensor:
        if self._staging is None or len(self._staging) < nbytes:
            size = max(nbytes, _STAGED_BYTES)
            self._staging = host_memory((size,), torch.uint8, self.shape.device)
        return self._staging[:nbytes]

    def adopt(
        self, old: CachePool, sessions: Mapping[int, SessionCache], cached: Mapping[int, int]
    ) -> None:
        """Copies sessions from an older pool into this empty one.

        Args:
            old: The pool they are in, with the same layers and shape.
            sessions: Their rows, changed in place.
            cached: Number of cached tokens of each.
        """
        for session, cache in sessions.items():
            before, count = cache.starts, cached[session]
            cache.extent = Extent(cache.extent.lines, cache.extent.most)
            cache.starts = np.zeros(self.layers, np.int64)
            self._caches[cache.extent] = cache
            self.grow(cache, count)
            for layer in range(cache.first_layer, self.layers):
                source = slice(before[layer], before[layer] + count)
                target = slice(cache.starts[layer], cache.starts[layer] + count)
                self._rows[:, target].copy_(old._rows[:, source])

    def _place(self, cache: SessionCache) -> None:
        extent, starts = cache.extent, np.zeros(self.layers, np.int64)
        starts[cache.first_layer :] = extent.first + extent.length * np.arange(extent.lines)
        cache.starts = starts
        self.moves += 1

    def _copy(self, move: ExtentMove) -> None:
        """Copies rows that may lie where they are to be.

        Some lines at a time are copied by way of a buffer, in the order in which nothing is
        overwritten that was not copied.
        """
        most = len(self._buffer) // self._rows[:, 0].nbytes
        lines, tokens = max(1, most // move.tokens), min(move.tokens, most)
        parts = [
            (line, min(line + lines, move.extent.lines), token, min(token + tokens, move.tokens))
            for line in range(0, move.extent.lines, lines)
            for token in range(0, move.tokens, tokens)
        ]
        source = self._lines(move.source, move.source_length, move.extent.lines)
        target = self._lines(move.target, move.target_length, move.extent.lines)
        for first, last, begin, end in parts if move.is_down else reversed(parts):
            rows = source[:, first:last, begin:end]
            held = self._buffer[: rows.nbytes].view(rows.dtype).view(rows.shape)
            target[:, first:last, begin:end].copy_(held.copy_(rows))

    def _lines(self, first: int, length: int, lines: int) -> torch.Tensor:
        """Returns a view of lines: [2, lines, length, heads, head size]."""
        row = (self.shape.heads, self.shape.head_size)
        return self._rows[:, first : first + lines * length].view(2, lines, length, *row)


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
