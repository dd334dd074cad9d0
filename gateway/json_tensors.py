"""Tensors as JSON: lists of numbers, booleans or strings, nested or flat, row-major."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np

from gateway import bytes_tensors
from gateway.inference import Tensor
from gateway.json_documents import decoded
from gateway.typed_contents import narrowed
from gateway.validation import BYTES, Declared
from services.domain.tensors import DTYPE_OF
from services.errors import InvalidInput

_PIECE_BYTES = 32 << 10
"""Text that is parsed at once, below a millisecond."""
_MOST_LISTS = 200_000
_DEEPEST = 32
"""NumPy's own limit."""
_rows = msgspec.json.Decoder(list[msgspec.Raw])


def from_json(data: object, tensor: Declared, field: str) -> Tensor:
    """Returns the array in the text of a JSON value.

    Raises:
        InvalidInput: it is ragged, has another shape, or an element is of another type.
    """
    text = memoryview(data) if isinstance(data, msgspec.Raw) else memoryview(b"null")
    if bytes(text[:1]) != b"[":
        raise InvalidInput(field, "must be a list")
    if tensor.datatype == "FP16":
        raise InvalidInput(field, "FP16 has no JSON form; send it as binary data")
    if tensor.datatype == BYTES:
        _require_few(text, field)
        return _strings(decoded(text, field, msgspec.json.decode), tensor, field)
    array = _array(text, DTYPE_OF[tensor.datatype], field, _DEEPEST)
    if array.shape not in (tensor.shape, (tensor.elements,)):
        raise InvalidInput(
            field, f"has shape {list(array.shape)}, declared is {list(tensor.shape)}"
        )
    return array.reshape(tensor.shape)


def _array(text: memoryview, dtype: np.dtype[np.generic], field: str, depth: int) -> Tensor:
    """Returns the numbers in a list, made piece by piece: other threads go on between."""
    if len(text) <= _PIECE_BYTES:
        return _numbers(decoded(text, field, msgspec.json.decode), dtype, field)
    if depth == 0:
        raise InvalidInput(field, "is too deeply nested")
    if b"[" not in bytes(text[1:]):
        return np.concatenate([_numbers(part, dtype, field) for part in _pieces(text, field)])
    _require_few(text, field)
    parts = decoded(text, field, _rows.decode)
    rows = [_array(memoryview(part), dtype, field, depth - 1) for part in parts]
    try:
        return np.stack(rows)
    except ValueError:
        raise InvalidInput(field, "is ragged") from None


def _pieces(text: memoryview, field: str) -> Iterator[list[object]]:
    """Yields the elements of a flat list of numbers, some thousands at a time."""
    flat = bytes(text)
    at, end = 1, len(flat) - 1
    while at <= end:
        until = flat.find(b",", at + _PIECE_BYTES, end)
        until = end if until < 0 else until
        # Not one element cut in two: numbers have no commas, and texts are refused below.
        piece = decoded(b"[" + flat[at:until] + b"]", field, msgspec.json.decode)
        if not piece:
            raise InvalidInput(field, "is not a list of numbers")
        yield piece
        at = until + 1


def _require_few(text: memoryview, field: str) -> None:
    """Returns if a list of lists or texts has no more of them than tensors have in JSON."""
    data = bytes(text)
    if data.count(b"[") > _MOST_LISTS or data.count(b'"') > 2 * _MOST_LISTS:
        raise InvalidInput(field, "has too many elements for JSON; send it as binary data")


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
