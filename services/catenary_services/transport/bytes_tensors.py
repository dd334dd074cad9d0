"""Tensors of BYTES, whose elements have any length: their encoding in payloads, and its bounds.

Every element follows its length (4 bytes, little-endian), as in the raw form of the Open Inference
Protocol. Whoever receives such a tensor does not decode it at once: that takes about half a
microsecond an element, and is left to the thread that needs the elements.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from catenary_services.domain.tensors import LENGTH_BYTES, MOST_BYTES_ELEMENTS
from catenary_services.errors import InvalidInput

_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class EncodedBytes:
    """A tensor of BYTES as it arrived, with the shape that its header says it has."""

    encoding: npt.NDArray[np.uint8]
    shape: tuple[int, ...]
    dtype: ClassVar[np.dtype[np.object_]] = np.dtype(np.object_)
    """The dtype of `decoded`."""

    @staticmethod
    def of(encoding: npt.NDArray[np.generic], shape: Sequence[int]) -> EncodedBytes:
        """Returns the tensor after checking that so many elements may lie in the encoding.

        Raises:
            InvalidInput: There are too many.
        """
        _count(shape, encoding.nbytes)
        return EncodedBytes(encoding.astype(np.uint8, copy=False), tuple(shape))

    def decoded(self) -> npt.NDArray[np.object_]:
        """Returns the elements as an array of `bytes`.

        Raises:
            InvalidInput: The encoding does not hold exactly the elements of the shape.
        """
        return decode_bytes(self.encoding, self.shape)


def encode_bytes(elements: npt.NDArray[np.object_] | Sequence[bytes]) -> bytes:
    """Returns the elements of a BYTES tensor, each behind its length.

    Raises:
        InvalidInput: There are too many, or one is not `bytes`.
    """
    parts: list[bytes] = []
    flat = elements.ravel() if isinstance(elements, np.ndarray) else elements
    if len(flat) > MOST_BYTES_ELEMENTS:
        raise InvalidInput("elements", f"{len(flat)}; at most {MOST_BYTES_ELEMENTS} are carried")
    for index, element in enumerate(flat):
        if not isinstance(element, bytes):
            raise InvalidInput(f"elements[{index}]", f"{type(element).__name__} is not bytes")
        parts += (_LENGTH.pack(len(element)), element)
    return b"".join(parts)


def decode_bytes(
    data: bytes | memoryview | npt.NDArray[np.uint8], shape: Sequence[int]
) -> npt.NDArray[np.object_]:
    """Returns a BYTES tensor as an object array of `bytes`; the inverse of `encode_bytes`.

    Raises:
        InvalidInput: The data does not hold exactly as many elements as `shape` has.
    """
    view = data.data.cast("B") if isinstance(data, np.ndarray) else memoryview(data)
    count = _count(shape, len(view))
    array = np.empty(count, dtype=np.object_)
    position = 0
    for index in range(count):
        begin = position + LENGTH_BYTES
        if begin > len(view):
            raise InvalidInput(f"elements[{index}]", "the data ends before its length")
        position = begin + _LENGTH.unpack_from(view, position)[0]
        if position > len(view):
            raise InvalidInput(f"elements[{index}]", "the data ends before it does")
        array[index] = bytes(view[begin:position])
    if position != len(view):
        raise InvalidInput("elements", f"{len(view) - position} bytes behind the last one")
    try:
        return array.reshape(tuple(shape))
    except ValueError as error:
        raise InvalidInput("shape", str(error)) from error


def encoded_bytes(elements: npt.NDArray[np.object_]) -> int:
    """Returns the number of bytes that `encode_bytes` makes of an array of `bytes`."""
    return sum(LENGTH_BYTES + len(element) for element in elements.ravel())


def _count(shape: Sequence[int], nbytes: int) -> int:
    """Returns the number of elements of a shape, if so many may lie in so many bytes."""
    count = math.prod(shape)
    if count < 0 or count * LENGTH_BYTES > nbytes or any(size < 0 for size in shape):
        raise InvalidInput("shape", f"{list(shape)} cannot lie in {nbytes} bytes")
    if count > MOST_BYTES_ELEMENTS:
        raise InvalidInput("shape", f"{count} elements; at most {MOST_BYTES_ELEMENTS} are carried")
    return count
