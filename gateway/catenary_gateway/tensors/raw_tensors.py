"""Conversion of raw tensor bytes to arrays and back; reading copies nothing but BYTES."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from catenary_gateway.inference import Tensor
from catenary_gateway.tensors.validation import BYTES, DeclaredInput
from catenary_services.domain.tensors import DTYPE_OF
from catenary_services.errors import InvalidInput
from catenary_services.transport.frames import decode_bytes, encode_bytes

ObjectArray = NDArray[np.object_]
"""An array of BYTES, whose elements are `bytes` of any length."""


def object_array(elements: Sequence[bytes], shape: tuple[int, ...]) -> ObjectArray:
    """Returns an array of BYTES of `shape`, which has a place for each of `elements`."""
    array = np.empty(len(elements), dtype=np.object_)
    array[:] = elements
    return array.reshape(shape)


def from_raw(raw: bytes | memoryview, tensor: DeclaredInput, field: str) -> Tensor:
    """Returns a view of `raw` (a new array for BYTES).

    Raises:
        InvalidInput: The length of `raw` is not that of the datatype and shape.
    """
    count = tensor.elements
    if tensor.datatype == BYTES:
        try:
            return decode_bytes(raw, tensor.shape)
        except InvalidInput as error:
            raise InvalidInput(field, error.message) from None
    dtype = DTYPE_OF[tensor.datatype]
    expected = count * dtype.itemsize
    if len(raw) != expected:
        raise InvalidInput(
            field,
            f"has {len(raw)} bytes, shape {list(tensor.shape)} of {tensor.datatype} "
            f"takes {expected}",
        )
    if count == 0:
        # frombuffer refuses empty buffers.
        return np.empty(tensor.shape, dtype)
    if tensor.datatype == "BOOL" and bool((np.frombuffer(raw, np.uint8) > 1).any()):
        raise InvalidInput(field, "BOOL elements are the bytes 0 and 1")
    return np.frombuffer(raw, dtype).reshape(tensor.shape)


def to_raw(array: Tensor) -> bytes:
    """Returns the elements' bytes in row-major order; each BYTES element follows its length."""
    if array.dtype == np.object_:
        return encode_bytes(array.astype(np.object_, copy=False))
    return array.tobytes()
