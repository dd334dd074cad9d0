"""BYTES tensors, whose elements vary in length, as object arrays of `bytes`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from catenary_services.errors import InvalidInput
from catenary_services.transport.frames import decode_bytes

ObjectArray = NDArray[np.object_]


def object_array(elements: Sequence[bytes], shape: tuple[int, ...]) -> ObjectArray:
    """Returns an object array of `shape`, which has a place for each of `elements`."""
    array = np.empty(len(elements), dtype=np.object_)
    array[:] = elements
    return array.reshape(shape)


def decode(raw: bytes | memoryview, shape: tuple[int, ...], field: str) -> ObjectArray:
    """Returns the elements in `raw`, where each follows its length (4 bytes, little-endian).

    Raises:
        InvalidInput: `raw` does not hold exactly the elements of `shape`; the error names `field`.
    """
    try:
        return decode_bytes(raw, shape)
    except InvalidInput as error:
        raise InvalidInput(field, error.message) from None
