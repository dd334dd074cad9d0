"""Caches in host memory take no more than what their sessions have cached."""

from __future__ import annotations

import os

import numpy as np

from benchmarks.generation.cache_growth import cache_memory_bytes
from catenary_agent.decoders.cache.cache_rows import Move
from catenary_agent.decoders.cache.cache_store import CacheShape, CacheStore
from catenary_agent.kv.span import CacheSpan

HEADS, HEAD_SIZE, TOKENS, BLOCKS = 3, 64, 512, 4
PER_TOKEN = 2 * HEADS * HEAD_SIZE * 4
"""Bytes of one token in one block."""


def taken() -> int:
    return cache_memory_bytes(os.getpid())


def written(store: CacheStore, row: int, tokens: int) -> np.ndarray:
    """Fills a row with numbers of its own, and returns them."""
    rows = np.random.default_rng(row).random((BLOCKS, 2, tokens, HEADS, HEAD_SIZE), np.float32)
    store.write(row, CacheSpan(2, 2 + BLOCKS, 0, tokens), rows)
    return rows


def test_a_row_that_moves_leaves_nothing_of_what_was_there_before() -> None:
    store = CacheStore(CacheShape(2, (4,) * BLOCKS, HEADS, TOKENS, HEAD_SIZE))
    before = taken()
    first, last = written(store, 0, 300), written(store, 3, 64)
    written(store, 1, TOKENS)
    written(store, 2, TOKENS)
    assert taken() - before >= BLOCKS * 2 * TOKENS * PER_TOKEN
    store.move(Move(3, 1, 2), 64)
    store.move(Move(3, 2, 4), 64)  # entered at the third of the blocks
    for block in range(2, 2 + BLOCKS):
        store.release(block, 3)
    assert (store.read(0, CacheSpan(2, 2 + BLOCKS, 0, 300)) == first).all()
    assert (store.read(1, CacheSpan(2, 2 + BLOCKS, 0, 64)) == last).all()
    assert (store.read(2, CacheSpan(4, 2 + BLOCKS, 0, 64)) == last[2:]).all()
    # 300 tokens are 19 pages of each head.
    left = BLOCKS * 19 * 16 + BLOCKS * 64 + 2 * 64 + 2 * TOKENS
    assert taken() - before == left * PER_TOKEN


def test_neighbours_of_a_row_without_whole_pages_stay_as_they_are() -> None:
    store = CacheStore(CacheShape(2, (3,) * BLOCKS, HEADS, 5, HEAD_SIZE))
    rows = [written(store, row, 5) for row in range(3)]
    store.move(Move(2, 1, 2), 2)
    for block in range(2, 2 + BLOCKS):
        store.release(block, 2)
    assert (store.read(0, CacheSpan(2, 2 + BLOCKS, 0, 5)) == rows[0]).all()
    assert (store.read(1, CacheSpan(2, 2 + BLOCKS, 0, 2)) == rows[2][:, :, :2]).all()
