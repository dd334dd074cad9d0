"""Random weights that are a function of seed, tensor name and place, and of nothing else.

Any part of any tensor can be made alone, in any order, on any machine: value i of a tensor is
draw i of a counter-based generator (Philox; Salmon et al., "Parallel random numbers: as easy as
1, 2, 3", SC 2011) whose key is a hash of seed and name. A draw of 16 bits picks one of 65,536
quantiles of the normal distribution, rounded where the mathematics libraries of machines differ,
so that everything behind the hash is arithmetic on integers and one exact product.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cache
from statistics import NormalDist
from typing import Any

import numpy as np

from catenary_services.errors import InvalidInput

ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
"""Datatypes, as safetensors files name them."""
_DRAWS = 1 << 16
_PER_BLOCK = 16
"""Draws of 16 bits in one block of the generator."""
_PIECE_VALUES = 1 << 22
"""Made at a time: what a tensor of any size takes in memory."""
_STEPS = 4096.0
"""Quantiles are multiples of 1/4096: no last bit of a logarithm matters."""


def random_pieces(
    seed: int, name: str, count: int, spread: float, dtype: str
) -> Iterator[memoryview]:
    """Returns the bytes of a tensor, piece after piece.

    Args:
        seed: Of the model.
        name: Of the tensor.
        count: Of its values.
        spread: Standard deviation.
        dtype: One of `ITEM_BYTES`.
    """
    table = _values(spread, dtype)
    for first in range(0, count, _PIECE_VALUES):
        yield _picked(table, seed, name, first, min(_PIECE_VALUES, count - first)).data.cast("B")


def random_values(
    seed: int, name: str, first: int, count: int, spread: float, dtype: str
) -> np.ndarray[Any, np.dtype[Any]]:
    """Returns values `[first, first + count)` of a tensor; of bfloat16 the bits."""
    return _picked(_values(spread, dtype), seed, name, first, count)


def constant_bytes(value: float, count: int, dtype: str) -> bytes:
    """Returns the bytes of `count` times the same value."""
    return _encoded(np.full(count, value, np.float32), dtype).tobytes()


def _picked(
    table: np.ndarray[Any, np.dtype[Any]], seed: int, name: str, first: int, count: int
) -> np.ndarray[Any, np.dtype[Any]]:
    block, skipped = divmod(first, _PER_BLOCK)
    key = int.from_bytes(hashlib.sha256(f"{seed}\n{name}".encode()).digest()[:16], "little")
    blocks = -(-(skipped + count) // _PER_BLOCK)
    words = np.random.Philox(key=key, counter=block).random_raw(4 * blocks)
    draws = words.astype("<u8", copy=False).view("<u2")[skipped : skipped + count]
    picked: np.ndarray[Any, np.dtype[Any]] = table[draws]
    return picked


@cache
def _quantiles() -> np.ndarray[Any, np.dtype[np.float64]]:
    normal = NormalDist()
    half = [normal.inv_cdf((draw + 0.5) / _DRAWS) for draw in range(_DRAWS // 2)]
    rounded = np.round(np.array(half) * _STEPS) / _STEPS
    return np.concatenate((rounded, -rounded[::-1]))


def _values(spread: float, dtype: str) -> np.ndarray[Any, np.dtype[Any]]:
    return _encoded((_quantiles() * spread).astype(np.float32), dtype)


def _encoded(
    values: np.ndarray[Any, np.dtype[np.float32]], dtype: str
) -> np.ndarray[Any, np.dtype[Any]]:
    if dtype == "F32":
        return values.astype("<f4")
    if dtype == "F16":
        return values.astype("<f2")
    if dtype != "BF16":
        raise InvalidInput("dtype", f"{dtype!r} is none of {', '.join(ITEM_BYTES)}")
    bits = values.view(np.uint32)
    # The upper half of a float32, rounded to the nearest and half-way to even.
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
