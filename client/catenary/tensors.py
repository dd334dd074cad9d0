"""Conversion between NumPy arrays and Open Inference Protocol tensors. Pure.

Tensors travel raw: row-major little-endian bytes, one buffer a tensor. Encoding copies once (NumPy
to bytes); decoding copies nothing, so arrays of a reply are read-only views of its buffers.
`BYTES` elements are length-prefixed and become object arrays of `bytes`. NumPy has no bfloat16:
arrays of such a dtype (ml_dtypes, jax) are sent as `BF16`, received ones are widened to float32,
which is exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from catenary.errors import InvalidInputError, ProtocolError

Array = npt.NDArray[Any]

DTYPE_OF: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype(np.uint8),
    "UINT16": np.dtype(np.uint16),
    "UINT32": np.dtype(np.uint32),
    "UINT64": np.dtype(np.uint64),
    "INT8": np.dtype(np.int8),
    "INT16": np.dtype(np.int16),
    "INT32": np.dtype(np.int32),
    "INT64": np.dtype(np.int64),
    "FP16": np.dtype(np.float16),
    "FP32": np.dtype(np.float32),
    "FP64": np.dtype(np.float64),
}
"""Datatypes of fixed size that NumPy has. `BYTES` and `BF16` are handled separately."""

DATATYPE_OF = {dtype: name for name, dtype in DTYPE_OF.items()}

# Typed fields of the protocol; FP16 and BF16 have none and always travel raw.
_CONTENTS_OF = {
    "BOOL": "bool_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}

_PREFIX_BYTES = 4


def datatype_of(array: Array, field: str = "array") -> str:
    """Returns the protocol's name of an array's dtype.

    Raises:
        InvalidInputError: The protocol has no such datatype; the error names `field`.
    """
    if array.dtype.kind in "OSU":
        return "BYTES"
    if array.dtype.name == "bfloat16":
        return "BF16"
    name = DATATYPE_OF.get(array.dtype.newbyteorder("="))
    if name is None:
        raise InvalidInputError.at(field, f"dtype {array.dtype} has no datatype in the protocol")
    return name


def encode(array: Array, field: str = "array") -> tuple[str, bytes]:
    """Returns the datatype and the raw bytes of an array of any layout and byte order."""
    datatype = datatype_of(array, field)
    if datatype == "BYTES":
        return datatype, _encode_bytes(array, field)
    if datatype == "BF16":
        array = array.view(np.uint16)
    return datatype, array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()


def decode(datatype: str, shape: Sequence[int], raw: bytes, field: str = "tensor") -> Array:
    """Returns a read-only view of raw bytes as an array.

    Raises:
        ProtocolError: The bytes do not match the datatype and shape.
    """
    elements = _elements(shape, field)
    if datatype == "BYTES":
        return _object_array(_decode_bytes(raw, field), shape, field)
    dtype = np.dtype("<u2") if datatype == "BF16" else _dtype(datatype, field).newbyteorder("<")
    if len(raw) != elements * dtype.itemsize:
        raise ProtocolError(
            f"{field} has {len(raw)} bytes, but {datatype} of shape {list(shape)} takes "
            f"{elements * dtype.itemsize}"
        )
    array = np.frombuffer(raw, dtype).reshape(shape)
    return _widen(array) if datatype == "BF16" else array


def decode_contents(
    datatype: str, shape: Sequence[int], contents: Any, field: str = "tensor"
) -> Array:
    """Returns the array of a tensor in the protocol's typed form."""
    name = _CONTENTS_OF.get(datatype)
    if name is None:
        raise ProtocolError(f"{field} has datatype {datatype!r}, which has no typed form")
    values = getattr(contents, name)
    if datatype == "BYTES":
        return _object_array(list(values), shape, field)
    if len(values) != _elements(shape, field):
        raise ProtocolError(f"{field} has {len(values)} elements for shape {list(shape)}")
    try:
        # A list, because NumPy checks the range of Python's integers, not of protobuf's containers.
        return np.array(list(values), dtype=_dtype(datatype, field)).reshape(shape)
    except OverflowError as error:
        raise ProtocolError(f"{field} has an element outside {datatype}") from error


def _dtype(datatype: str, field: str) -> np.dtype[Any]:
    dtype = DTYPE_OF.get(datatype)
    if dtype is None:
        raise ProtocolError(f"{field} has the unknown datatype {datatype!r}")
    return dtype


def _elements(shape: Sequence[int], field: str) -> int:
    if any(size < 0 for size in shape):
        raise ProtocolError(f"{field} has the impossible shape {list(shape)}")
    return math.prod(shape)


def _encode_bytes(array: Array, field: str) -> bytes:
    parts: list[bytes] = []
    for position, element in enumerate(array.ravel().tolist()):
        value = element.encode() if isinstance(element, str) else element
        if not isinstance(value, (bytes, bytearray)):
            raise InvalidInputError.at(
                field,
                f"element {position} is {type(element).__name__}; BYTES takes bytes or str",
            )
        parts.append(len(value).to_bytes(_PREFIX_BYTES, "little"))
        parts.append(bytes(value))
    return b"".join(parts)


def _decode_bytes(raw: bytes, field: str) -> list[bytes]:
    values: list[bytes] = []
    offset = 0
    while offset < len(raw):
        start = offset + _PREFIX_BYTES
        offset = start + int.from_bytes(raw[offset:start], "little")
        if start > len(raw) or offset > len(raw):
            raise ProtocolError(f"{field} ends in the middle of element {len(values)}")
        values.append(raw[start:offset])
    return values


def _object_array(values: list[bytes], shape: Sequence[int], field: str) -> Array:
    if len(values) != _elements(shape, field):
        raise ProtocolError(f"{field} has {len(values)} elements for shape {list(shape)}")
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array.reshape(shape)


def _widen(bfloat16: Array) -> Array:
    # A bfloat16 is the upper half of a float32.
    return np.asarray(bfloat16.astype(np.uint32) << 16).view(np.float32)
