"""Cached keys and values as arrays: `[blocks, 2 (keys, values), tokens, heads, head size]`.

Rows travel in the format of their sender: float32 ("FP32") and float16 ("FP16") unchanged, bfloat16
("BF16"), which NumPy does not have, as uint16 with its bits. A receiver with another format
converts; to bfloat16 and float16 by rounding to nearest, ties to even.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from catenary_agent.kv.span import CacheSpan
from catenary_services.errors import InvalidInput

CacheArray = NDArray[Any]
"""An array of float32, float16, or uint16 with the bits of bfloat16."""

TYPES: Mapping[str, np.dtype[Any]] = {
    "FP32": np.dtype(np.float32),
    "FP16": np.dtype(np.float16),
    "BF16": np.dtype(np.uint16),
}
"""The dtypes by the names of datatypes in headers of frames."""
NAMES: Mapping[np.dtype[Any], str] = {dtype: name for name, dtype in TYPES.items()}
CACHE_DTYPES = frozenset(NAMES)
"""The dtypes of a `CacheArray`."""
_QUIET_NAN = np.uint16(0x7FC0)


def datatype_of(array: CacheArray) -> str:
    """Returns the name of an array's datatype in a frame's header."""
    return NAMES[array.dtype]


def bytes_of(datatype: str, span: CacheSpan, row: tuple[int, int]) -> int:
    """Returns the size of the array of a part.

    Args:
        datatype: The datatype in the frame's header.
        span: The blocks and tokens in the frame's header.
        row: Number of key-value heads, and head size of the model.

    Raises:
        InvalidInput: The datatype is unknown, or the part is empty.
    """
    dtype = TYPES.get(datatype)
    if dtype is None:
        raise InvalidInput("cache.datatype", f"{datatype!r} is none of {', '.join(TYPES)}")
    if span.blocks < 1 or span.tokens < 1:
        raise InvalidInput("cache", f"{span} is empty")
    return dtype.itemsize * math.prod((span.blocks, 2, span.tokens, *row))


def array_of_payload(
    payload: memoryview, datatype: str, span: CacheSpan, row: tuple[int, int]
) -> CacheArray:
    """Returns a frame's payload as an array that shares its memory.

    Args:
        payload: The bytes.
        datatype: The datatype in the frame's header.
        span: The blocks and tokens in the frame's header.
        row: Number of key-value heads, and head size of the model.

    Raises:
        InvalidInput: The datatype is unknown, or the payload has another size.
    """
    wanted = bytes_of(datatype, span, row)
    if len(payload) != wanted:
        raise InvalidInput("payload", f"{len(payload)} bytes; {span} as {datatype} are {wanted}")
    shape = (span.blocks, 2, span.tokens, *row)
    return np.frombuffer(payload, TYPES[datatype]).reshape(shape)


def to_float32(array: CacheArray) -> NDArray[np.float32]:
    """Returns an array as float32; the array itself if it is float32."""
    if array.dtype == np.float32:
        return array
    if array.dtype == np.float16:
        return array.astype(np.float32)
    return (array.astype(np.uint32) << 16).view(np.float32)


def to_bfloat16(array: CacheArray) -> NDArray[np.uint16]:
    """Returns the bits of bfloat16 as uint16; the array itself if it has them."""
    if array.dtype == np.uint16:
        return array
    array = to_float32(array)
    bits = np.ascontiguousarray(array).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(array), _QUIET_NAN, rounded.astype(np.uint16))
