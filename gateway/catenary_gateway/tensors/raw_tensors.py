"""Conversion of raw tensor bytes to arrays and back; reading copies nothing but BYTES."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from catenary_gateway.inference import Tensor
from catenary_gateway.tensors.validation import DeclaredInput
from catenary_services.domain.tensors import BYTES, DTYPE_OF
from catenary_services.errors import InvalidInput
from catenary_services.transport.bytes_tensors import decode_bytes, encode_bytes

_VIEWED_BYTES = 16 * 1024
ObjectArray = NDArray[np.object_]
"""An array of BYTES, whose elements are `bytes` of any length."""


def object_array(elements: Sequence[bytes], shape: tuple[int, ...]) -> ObjectArray:
    """Returns an array of BYTES of `shape`, which has a place for each of `elements`."""
    array = np.empty(len(elements), dtype=np.object_)
    array[:] = elements
    return array.reshape(shape)


def check_texts(elements: Sequence[bytes], field: str) -> None:
    """Checks that elements of BYTES are texts, as the strings of an ONNX graph have to be.

    An element that is none would fail the other requests of its batch, too.

    Raises:
        InvalidInput: An element is not UTF-8.
    """
    for index, element in enumerate(elements):
        try:
            element.decode()
        except UnicodeDecodeError as error:
            raise InvalidInput(field, f"element {index} is not UTF-8: {error.reason}") from None


def from_raw(raw: bytes | memoryview, tensor: DeclaredInput, field: str) -> Tensor:
    """Returns a view of `raw` (a new array for BYTES).

    Raises:
        InvalidInput: The length of `raw` is not that of the datatype and shape.
    """
    count = tensor.elements
    if tensor.datatype == BYTES:
        try:
            elements = decode_bytes(raw, tensor.shape)
        except InvalidInput as error:
            raise InvalidInput(field, error.message) from None
        check_texts(elements.ravel().tolist(), field)
        return elements
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


def raw_of(array: Tensor) -> bytes | memoryview:
    """Returns what `to_raw` does, which is a view of a large array; nobody may change that then."""
    if array.nbytes < _VIEWED_BYTES or array.dtype == np.object_:
        return to_raw(array)
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
