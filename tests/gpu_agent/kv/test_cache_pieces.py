"""Caches leave a pool, and arrive in one, bit by bit as they were, in pieces of any size."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch

from catenary_agent.decoders.torch.torch_cache import CachePool, SessionCache, TokenCacheShape
from catenary_agent.kv import CacheSpan, to_bfloat16, to_float32

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FIRST, LAYERS = 20, 5
"""The first block of the partition, and the number of its blocks."""


def pool_of(dtype: Any, heads: int, size: int, tokens: int) -> CachePool:
    """Returns a pool of random numbers with three sessions' slots, of which one is free again."""
    shape = TokenCacheShape(heads, size, dtype, torch.device(DEVICE))
    pool = CachePool((3 * LAYERS + 1) * tokens, tokens, LAYERS, shape)
    random = torch.Generator(DEVICE).manual_seed(heads + size + tokens)
    pool.keys.normal_(generator=random)
    pool.values.normal_(generator=random)
    pool.close(pool.opened([tokens])[0])
    return pool


def placed(pool: CachePool, entry: int) -> SessionCache:
    """Returns a session that has all rows it may need."""
    cache = pool.open(entry)
    pool.grow(cache, pool.tokens)
    return cache


def as_stored(pool: CachePool, cache: SessionCache, span: CacheSpan) -> np.ndarray:
    """Returns the rows of a span as they lie in the pool, looked up one by one."""
    rows = []
    for block in range(span.first_block, span.last_block):
        start = int(cache.starts[block - FIRST])
        for numbers in (pool.keys, pool.values):
            rows.append(numbers[start + span.first_token : start + span.last_token].cpu())
    whole = torch.stack(rows).view(span.blocks, 2, *rows[0].shape)
    return (whole.view(torch.int16) if whole.itemsize == 2 else whole).numpy()


def bits_of(rows: np.ndarray) -> np.ndarray:
    return rows.view(np.int16 if rows.itemsize == 2 else np.int32)


@settings(max_examples=40, deadline=None)
@given(
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 23)),
    entry=st.integers(0, LAYERS - 1),
    most_bytes=st.sampled_from([1, 90, 333, 5000, None]),
    data=st.data(),
)
def test_what_is_read_and_written_in_pieces_is_what_lies_in_the_pool(
    dtype, sizes, entry, most_bytes, data
):
    source, target = pool_of(dtype, *sizes), pool_of(dtype, *sizes)
    theirs, beside = placed(source, entry), placed(target, 0)
    mine = placed(target, entry)
    first = data.draw(st.integers(FIRST + entry, FIRST + LAYERS - 1))
    start = data.draw(st.integers(0, sizes[2] - 1))
    span = CacheSpan(
        first,
        data.draw(st.integers(first + 1, FIRST + LAYERS)),
        start,
        data.draw(st.integers(start + 1, sizes[2])),
    )
    rows = source.read(theirs, span, FIRST, most_bytes)
    assert rows.shape == (span.blocks, 2, span.tokens, *sizes[:2])
    assert rows.flags.c_contiguous
    assert np.array_equal(bits_of(rows), bits_of(as_stored(source, theirs, span)))
    rows.flags.writeable = False
    before = (target.keys.clone(), target.values.clone())
    target.write_part(mine, span, FIRST, rows, *([most_bytes] if most_bytes else []))
    assert np.array_equal(bits_of(target.read(mine, span, FIRST)), bits_of(rows))
    everything = CacheSpan(FIRST, FIRST + LAYERS, 0, sizes[2])
    others = as_stored(target, beside, everything)
    for block in range(span.first_block, span.last_block):
        at = int(mine.starts[block - FIRST])
        for numbers, old in zip((target.keys, target.values), before, strict=True):
            numbers[at + span.first_token : at + span.last_token] = old[
                at + span.first_token : at + span.last_token
            ]
    assert torch.equal(target.keys, before[0])
    assert torch.equal(target.values, before[1])
    assert np.array_equal(as_stored(target, beside, everything), others)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("sent", ["FP32", "FP16", "BF16"])
def test_rows_in_another_format_are_rounded_to_nearest(dtype, sent):
    pool = pool_of(dtype, 2, 6, 11)
    cache, span = placed(pool, 1), CacheSpan(FIRST + 2, FIRST + 4, 3, 10)
    numbers = np.random.default_rng(8).normal(size=(2, 2, 7, 2, 6)).astype(np.float32)
    numbers.flat[:5] = [0.0, -0.0, np.inf, -np.inf, 1e-6]
    rows = {"FP32": numbers, "FP16": numbers.astype(np.float16), "BF16": to_bfloat16(numbers)}
    values = to_float32(rows[sent])
    pool.write_part(cache, span, FIRST, rows[sent], 400)
    expected = torch.from_numpy(values.copy()).to(dtype).float().numpy()
    assert np.array_equal(to_float32(pool.read(cache, span, FIRST)), expected)


def test_an_array_that_was_read_stays_as_it_is():
    pool = pool_of(torch.float16, 2, 8, 16)
    cache, span = placed(pool, 0), CacheSpan(FIRST, FIRST + LAYERS, 0, 16)
    rows = pool.read(cache, span, FIRST)
    kept = rows.copy()
    pool.write_part(cache, span, FIRST, np.zeros_like(rows))
    assert np.array_equal(rows, kept)
    assert not pool.read(cache, span, FIRST).any()
