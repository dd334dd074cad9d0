"""Conversion of tensors to and from JSON lists, nested or flat, in row-major order."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np

from catenary_gateway.inference import Tensor
from catenary_gateway.tensors.json_documents import decoded, has_few
from catenary_gateway.tensors.raw_tensors import object_array
from catenary_gateway.tensors.typed_contents import narrowed
from catenary_gateway.tensors.validation import DeclaredInput
from catenary_services.domain.tensors import BYTES, DTYPE_OF
from catenary_services.errors import InvalidInput

_PIECE_BYTES = 32 << 10
"""Bytes of text that are parsed at once, in less than a millisecond."""
_MOST_LISTS = 200_000
_DEEPEST = 32
"""Most levels of nested lists, which is NumPy's own limit."""
_MOST_COMMAS = 1_000_000
"""Most commas in a list of texts, those inside the texts included."""


class _List(msgspec.Struct, array_like=True):
    """A list of any length whose elements are skipped."""


_lists = msgspec.json.Decoder(list[_List])
_rows = msgspec.json.Decoder(list[msgspec.Raw])


def from_json(data: object, tensor: DeclaredInput, field: str) -> Tensor:
    """Returns the array in the text of a JSON value.

    Raises:
        InvalidInput: The value is ragged, has another shape, or an element is of another type.
    """
    text = memoryview(data) if isinstance(data, msgspec.Raw) else memoryview(b"null")
    if bytes(text[:1]) != b"[":
        raise InvalidInput(field, "must be a list")
    if tensor.datatype == "FP16":
        raise InvalidInput(field, "FP16 has no JSON form; send it as binary data")
    if tensor.datatype == BYTES:
        _require_few(text, field)
        return _strings(decoded(text, field, msgspec.json.decode), tensor, field)
    array = _array(text, tensor, field)
    if array.shape not in (tensor.shape, (tensor.elements,)):
        raise InvalidInput(
            field, f"has shape {list(array.shape)}, declared is {list(tensor.shape)}"
        )
    return array.reshape(tensor.shape)


def _array(text: memoryview, tensor: DeclaredInput, field: str) -> Tensor:
    dtype = DTYPE_OF[tensor.datatype]
    if len(text) <= _PIECE_BYTES:
        return _numbers(decoded(text, field, msgspec.json.decode), dtype, field)
    # However lists are nested, there is one comma fewer than numbers.
    if not has_few(text, b",", tensor.elements):
        raise InvalidInput(field, f"has more than {tensor.elements} elements, as declared")
    if not has_few(text, b"[", _MOST_LISTS):
        raise InvalidInput(field, "has too many lists for JSON; send it as binary data")
    numbers = _Numbers(np.empty(tensor.elements, dtype), field)
    shape = numbers.read(text, _DEEPEST)
    return numbers.array[: numbers.filled].reshape(shape)


class _Numbers:
    """The numbers of a long text, parsed piece by piece so that other threads can run between."""

    def __init__(self, array: Tensor, field: str) -> None:
        self.array = array
        self.filled = 0
        self._field = field

    def read(self, text: memoryview, depth: int) -> tuple[int, ...]:
        """Appends the numbers of a list, and returns its shape."""
        field = self._field
        if len(text) <= _PIECE_BYTES:
            return self._take(decoded(text, field, msgspec.json.decode))
        if depth == 0:
            raise InvalidInput(field, "is too deeply nested")
        if has_few(text, b"[", 1):
            begin = self.filled
            for piece in _pieces(text, field):
                if len(self._take(piece)) != 1:
                    raise InvalidInput(field, "is ragged")
            return (self.filled - begin,)
        # A number among lists may be one of millions, so it is found before any object is made.
        decoded(text, field, _lists.decode)
        rows = decoded(text, field, _rows.decode)
        shapes = {self.read(memoryview(row), depth - 1) for row in rows}
        if len(shapes) != 1:
            raise InvalidInput(field, "is ragged")
        return (len(rows), *shapes.pop())

    def _take(self, data: object) -> tuple[int, ...]:
        if not isinstance(data, list):
            raise InvalidInput(self._field, "is ragged")
        numbers = _numbers(data, self.array.dtype, self._field)
        until = self.filled + numbers.size
        if until > self.array.size:
            raise InvalidInput(self._field, f"has more than {self.array.size} elements")
        self.array[self.filled : until] = numbers.reshape(-1)
        self.filled = until
        return numbers.shape


def _pieces(text: memoryview, field: str) -> Iterator[list[object]]:
    """Yields the elements of a flat list of numbers, some thousands at a time."""
    at, end = 1, len(text) - 1
    while at <= end:
        window = bytes(text[at : min(at + _PIECE_BYTES, end)])
        size = len(window) if at + len(window) >= end else window.rfind(b",")
        # A piece ends at a comma, so no number is split; texts are refused later.
        piece = decoded(b"[" + window[: max(0, size)] + b"]", field, msgspec.json.decode)
        if not piece:
            raise InvalidInput(field, "is not a list of numbers")
        yield piece
        at += size + 1


def _require_few(text: memoryview, field: str) -> None:
    """Raises InvalidInput if a list of texts has more elements than tensors may have in JSON."""
    bounds = ((b"[", _MOST_LISTS), (b'"', 2 * _MOST_LISTS), (b",", _MOST_COMMAS))
    if not all(has_few(text, sign, most) for sign, most in bounds):
        raise InvalidInput(field, "has too many elements for JSON; send it as binary data")


def to_json(array: Tensor, field: str) -> list[object]:
    """Returns a flat list of the elements.

    Raises:
        InvalidInput: BYTES elements are not UTF-8, and so have no JSON form.
    """
    if array.dtype != np.object_:
        flat: list[object] = array.reshape(-1).tolist()
        return flat
    try:
        return [element.decode() for element in array.reshape(-1).tolist()]
    except UnicodeDecodeError:
        raise InvalidInput(field, "is not UTF-8; ask for it as binary data") from None


def is_finite(array: Tensor) -> bool:
    """Returns True if no element is NaN or infinite."""
    return array.dtype.kind not in "fc" or bool(np.isfinite(array).all())


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


def _strings(data: list[object], tensor: DeclaredInput, field: str) -> Tensor:
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
    return object_array(encoded, tensor.shape)


def _flat(data: list[object]) -> list[object]:
    """Returns the leaves of nested lists, without recursion because the sender sets the depth."""
    leaves: list[object] = []
    stack: list[object] = [data]
    while stack:
        item = stack.pop()
        if isinstance(item, list):
            stack.extend(reversed(item))
        else:
            leaves.append(item)
    return leaves
