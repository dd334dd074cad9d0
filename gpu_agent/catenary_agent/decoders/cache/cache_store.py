"""Key-value caches in host memory: for each block one array of keys and one of values.

An array is float32 [rows, key-value heads, session tokens, head size]. Its address space is
reserved at once, its memory is committed page by page as tokens are written and given back when a
session leaves.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from catenary_agent.decoders.base import CacheLayout
from catenary_agent.decoders.cache.cache_rows import RowMove
from catenary_agent.kv.span import CacheSpan
from catenary_services.domain.decoder import DecoderTable
from catenary_services.domain.ids import PartitionKey

_FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The size of the arrays of a partition."""

    first_block: int
    rows: tuple[int, ...]
    """Number of rows of each block of the partition."""
    heads: int
    tokens: int
    head_size: int

    @staticmethod
    def of(
        key: PartitionKey,
        table: DecoderTable,
        layout: CacheLayout,
        least_rows: Sequence[int] = (),
    ) -> CacheShape:
        """Returns the shape that has room for whatever the layout's block slots allow.

        A block has the most sessions when all of them enter as late as possible. The shape only
        reserves address space; the slots that sessions hold bound the memory that is committed.

        Args:
            key: The partition.
            table: The table of its model.
            layout: The layout with the number of slots and the entry blocks.
            least_rows: For each block, the rows that running sessions need.
        """
        rows = []
        for index, block in enumerate(range(key.first_block, key.last_block)):
            entry = max(each for each in layout.entry_blocks if each <= block)
            most = layout.block_slots // (key.last_block - entry)
            rows.append(max(1, most, least_rows[index] if least_rows else 0))
        return CacheShape(
            first_block=key.first_block,
            rows=tuple(rows),
            heads=table.key_value_heads,
            tokens=layout.session_tokens,
            head_size=table.head_size,
        )


class CacheStore:
    """The cache arrays of a partition's blocks."""

    def __init__(self, shape: CacheShape) -> None:
        """Reserves the address space of all arrays; memory is committed when it is written."""
        self.shape = shape
        self._maps: list[mmap.mmap] = []
        self.arrays = [(self._reserve(rows), self._reserve(rows)) for rows in shape.rows]
        """The keys and the values of each block."""

    @property
    def row_bytes(self) -> int:
        """Size of one row of one array in bytes."""
        shape = self.shape
        return shape.heads * shape.tokens * shape.head_size * _FLOAT32_BYTES

    def move(self, move: RowMove, tokens: int) -> None:
        """Copies the first `tokens` tokens of a row to another, in the blocks of its session.

        The memory of the target beyond them is given back to the operating system.
        """
        for pair in self.arrays[move.entry_block - self.shape.first_block :]:
            for array in pair:
                array[move.target, :, :tokens] = array[move.source, :, :tokens]
        head_bytes = self.row_bytes // self.shape.heads
        used_bytes = tokens * self.shape.head_size * _FLOAT32_BYTES
        first = 2 * (move.entry_block - self.shape.first_block)
        for head in range(self.shape.heads):
            start = move.target * self.row_bytes + head * head_bytes
            for memory in self._maps[first:]:
                _give_back(memory, start + used_bytes, start + head_bytes)

    def copy_from(self, other: CacheStore, row: int, entry_block: int, tokens: int) -> None:
        """Copies the first `tokens` tokens of a row of another store, whatever its sizes."""
        start = entry_block - self.shape.first_block
        for mine, theirs in zip(self.arrays[start:], other.arrays[start:], strict=True):
            for new, old in zip(mine, theirs, strict=True):
                new[row, :, :tokens] = old[row, :, :tokens]

    def read(self, row: int, span: CacheSpan) -> NDArray[np.float32]:
        """Returns a copy of a part of a row: float32 `[blocks, 2, tokens, heads, head size]`."""
        shape = self.shape
        made = np.empty((span.blocks, 2, span.tokens, shape.heads, shape.head_size), np.float32)
        for block, pair in zip(made, self._of(span), strict=True):
            for out, array in zip(block, pair, strict=True):
                tokens = array[row, :, span.first_token : span.last_token]
                out[:] = tokens.transpose(1, 0, 2)
        return made

    def write(self, row: int, span: CacheSpan, rows: NDArray[np.float32]) -> None:
        """Overwrites a part of a row with an array that `read` of any store returned."""
        for block, pair in zip(rows, self._of(span), strict=True):
            for new, array in zip(block, pair, strict=True):
                tokens = array[row, :, span.first_token : span.last_token]
                tokens[:] = new.transpose(1, 0, 2)

    def _of(self, span: CacheSpan) -> list[tuple[np.ndarray, np.ndarray]]:
        start = span.first_block - self.shape.first_block
        return self.arrays[start : start + span.blocks]

    def release(self, block: int, row: int) -> None:
        """Gives the memory of a row of one block back to the operating system."""
        first = 2 * (block - self.shape.first_block)
        for memory in self._maps[first : first + 2]:
            _give_back(memory, row * self.row_bytes, (row + 1) * self.row_bytes)

    def _reserve(self, rows: int) -> np.ndarray:
        # A private mapping: pages of a shared one are freed only when its last mapping goes.
        size = max(mmap.PAGESIZE, rows * self.row_bytes)
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_NOHUGEPAGE"):  # memory is counted in tokens, not in 2 MiB pages
            memory.madvise(mmap.MADV_NOHUGEPAGE)
        self._maps.append(memory)
        shape = self.shape
        count = rows * self.row_bytes // _FLOAT32_BYTES
        flat = np.frombuffer(memory, np.float32, count)
        return flat.reshape(rows, shape.heads, shape.tokens, shape.head_size)


def _give_back(memory: mmap.mmap, start: int, end: int) -> None:
    """Gives the whole pages within bytes `[start, end)` back; neighbouring bytes stay."""
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    last = end // mmap.PAGESIZE * mmap.PAGESIZE
    if last > first:
        memory.madvise(mmap.MADV_DONTNEED, first, last - first)
