"""Tensors as JSON: lists of numbers, booleans or strings, nested or flat, row-major."""

from __future__ import annotations

import numpy as np

from gateway import bytes_tensors
from gateway.inference import Tensor
from gateway.typed_contents import narrowed
from gateway.validation import BYTES, Declared
from services.domain.tensors import DTYPE_OF
from services.errors import InvalidInput


def from_json(data: object, tensor: Declared, field: str) -> Tensor:
    """Returns the array in a JSON value.

    Raises:
        InvalidInput: it is ragged, has another shape, or an element is of another type.
    """
    if not isinstance(data, list):
        raise InvalidInput(field, "must be a list")
    if tensor.datatype == "FP16":
        raise InvalidInput(field, "FP16 has no JSON form; send it as binary data")
    if tensor.datatype == BYTES:
        return _strings(data, tensor, field)
    dtype = DTYPE_OF[tensor.datatype]
    array = _numbers(data, dtype, field)
    if array.shape not in (tensor.shape, (tensor.elements,)):
        raise InvalidInput(
            field, f"has shape {list(array.shape)}, declared is {list(tensor.shape)}"
        )
    return array.reshape(tensor.shape)


def to_json(array: Tensor, field: str) -> list[object]:
    """Returns a flat list of the elements.

    Raises:
        InvalidInput: BYTES elements are not UTF-8 and so have no JSON form.
    """
    if array.dtype != np.object_:
        flat: list[object] = array.reshape(-1).tolist()
        return flat
    try:
        return [element.decode() for element in array.reshape(-1).tolist()]
    except UnicodeDecodeError:
        raise InvalidInput(field, "is not UTF-8; ask for it as binary data") from None


def _numbers(data: list[object], dtype: np.dtype[np.generic], field: str) -> Tensor:
    try:
        array: Tensor = np.array(data)
    except (ValueError, OverflowError, RecursionError):
        raise InvalidInput(field, "is ragged or too deeply nested") from None
    if not array.size:
        return array.astype(dtype)
    if dtype.kind == "u" and array.dtype.kind in "fO":
        # NumPy finds no common type for integers on both sides of 2**63.
        array = _large_integers(array.shape, data, field)
    kinds = {"b": "b", "i": "iu", "u": "iu", "f": "iuf"}[dtype.kind]
    if array.dtype.kind not in kinds:
        raise InvalidInput(field, f"elements do not fit {np.dtype(dtype).name}")
    if dtype.kind in "iu":
        return narrowed(array, dtype, field)
    with np.errstate(over="ignore"):
        return array.astype(dtype)


def _large_integers(shape: tuple[int, ...], data: list[object], field: str) -> Tensor:
    flat = _flat(data)
    if not all(type(item) is int for item in flat):
        raise InvalidInput(field, "elements must be integers")
    try:
        return np.array(flat, np.uint64).reshape(shape)
    except (OverflowError, ValueError):
        raise InvalidInput(field, "elements must be 0 to 18446744073709551615") from None


def _strings(data: list[object], tensor: Declared, field: str) -> Tensor:
    flat = _flat(data)
    if not all(isinstance(item, str) for item in flat):
        raise InvalidInput(field, "BYTES elements are strings")
    if len(flat) != tensor.elements:
        raise InvalidInput(
            field, f"has {len(flat)} elements, shape {list(tensor.shape)} takes {tensor.elements}"
        )
    try:
        encoded = [str(item).encode() for item in flat]
    except UnicodeEncodeError:
        raise InvalidInput(field, "holds a lone surrogate, which has no UTF-8 form") from None
    return bytes_tensors.object_array(encoded, tensor.shape)


def _flat(data: list[object]) -> list[object]:
    """Returns the leaves in order, without recursion: the depth is the sender's choice."""
    leaves: list[object] = []
    stack: list[object] = [data]
    while stack:
        item = stack.pop()
        if isinstance(item, list):
            stack.extend(reversed(item))
        else:
            leaves.append(item)
    return leaves
