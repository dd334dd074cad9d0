"""Random weights that depend only on seed, tensor name and index.

Any part of any tensor can be computed separately, in any order and on any machine. Value i of a
tensor is draw i of a counter-based generator (Philox; Salmon et al., "Parallel random numbers: as
easy as 1, 2, 3", SC 2011) whose key is a hash of seed and name. A draw of 16 bits selects one of
65,536 quantiles of the normal distribution. These are rounded, because the mathematics libraries of
machines differ; everything after the hash is integer arithmetic and one exact product.
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
"""Size of a value in bytes, by the name of its datatype in safetensors files."""
_DRAWS = 1 << 16
_PER_BLOCK = 16
"""Number of 16-bit draws in one block of the generator."""
_PIECE_VALUES = 1 << 22
"""Number of values computed at a time, which bounds the memory for a tensor of any size."""
_STEPS = 4096.0
"""Quantiles are multiples of 1/4096, so that the last bits of a logarithm do not matter."""


def random_pieces(
    seed: int, name: str, count: int, spread: float, dtype: str
) -> Iterator[memoryview]:
    """Yields the bytes of a tensor, piece by piece.

    Args:
        seed: The seed of the model.
        name: The name of the tensor.
        count: Number of its values.
        spread: Standard deviation.
        dtype: One of `ITEM_BYTES`.
    """
    table = _values(spread, dtype)
    for first in range(0, count, _PIECE_VALUES):
        yield _picked(table, seed, name, first, min(_PIECE_VALUES, count - first)).data.cast("B")


def random_values(
    seed: int, name: str, first: int, count: int, spread: float, dtype: str
) -> np.ndarray[Any, np.dtype[Any]]:
    """Returns values `[first, first + count)` of a tensor; for bfloat16 their bits as uint16."""
    return _picked(_values(spread, dtype), seed, name, first, count)


def constant_bytes(value: float, count: int, dtype: str) -> bytes:
    """Returns the bytes of a tensor of `count` equal values."""
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
    # A bfloat16 is the upper half of a float32, rounded to nearest, ties to even.
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
