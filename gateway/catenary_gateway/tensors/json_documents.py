"""Strict parsing of JSON from strangers, bounded before objects are made of it.

A parser makes an object from a few bytes: 8 MB of `[],[],..` take a second of work and half a
gigabyte. So the values of a body are counted first, and tensors stay text until they are needed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from catenary_services.errors import InvalidInput

Document = dict[str, object]

MOST_BYTES = 16 << 20
"""Most bytes of JSON in one body; larger tensors are sent as binary data or over gRPC."""
MOST_SMALL_BYTES = 64 << 10
"""Most bytes of any value that is not a tensor."""
_MOST_VALUES = 500_000
_MOST_CONTAINERS = 20_000
"""Most lists and objects in a body of plain values; thousands of them are made in a millisecond."""
_MOST_OBJECTS = 30_000
_MOST_INPUTS = 1024
_STEP_BYTES = 256 << 10
_AT = re.compile(r"at `\$\[(\d+)\]")


_ABSENT = msgspec.Raw()


class _Tensor(msgspec.Struct):
    name: msgspec.Raw = _ABSENT
    datatype: msgspec.Raw = _ABSENT
    shape: msgspec.Raw = _ABSENT
    parameters: msgspec.Raw = _ABSENT
    data: msgspec.Raw = _ABSENT


class _Body(msgspec.Struct):
    id: msgspec.Raw = _ABSENT
    inputs: msgspec.Raw = _ABSENT
    outputs: msgspec.Raw = _ABSENT
    parameters: msgspec.Raw = _ABSENT


_body = msgspec.json.Decoder(_Body)
_tensors = msgspec.json.Decoder(list[_Tensor])
_anything = msgspec.json.Decoder()


def document_of(body: bytes | memoryview) -> Document:
    """Returns the JSON object in a body of plain values.

    Raises:
        InvalidInput: The body is not a JSON object, or has more values than any request needs.
    """
    data = bytes(body)
    if len(data) > MOST_SMALL_BYTES:
        _require_few(data, b",:", _MOST_VALUES, "values")
        _require_few(data, b"[{", _MOST_CONTAINERS, "lists and objects")
    document = decoded(data, "body", _anything.decode)
    if not isinstance(document, dict):
        raise InvalidInput("body", "must be a JSON object")
    return document


def object_in(text: str, field: str) -> Document:
    """Returns the JSON object in a text that is itself part of a body.

    Raises:
        InvalidInput: The text is not a JSON object; the error names `field`.
    """
    document = decoded(text, field, _anything.decode)
    if not isinstance(document, dict):
        raise InvalidInput(field, "must be a JSON object")
    return document


def inference_of(body: bytes | memoryview) -> Document:
    """Returns the body of an inference request; the `data` of every input is still text.

    Raises:
        InvalidInput: The body is not such a request; the error names the field.
    """
    if len(body) > MOST_BYTES:
        raise InvalidInput("body", f"has more than {MOST_BYTES} bytes of JSON; send binary data")
    if len(body) > MOST_SMALL_BYTES:
        _require_few(body, b"{", _MOST_OBJECTS, "objects")
    found = decoded(body, "body", _body.decode)
    document: Document = {}
    for name in ("id", "outputs", "parameters"):
        value = getattr(found, name)
        if value is not _ABSENT:
            document[name] = small_value(value, name)
    if found.inputs is not _ABSENT:
        document["inputs"] = _inputs(found.inputs)
    return document


def small_value(raw: msgspec.Raw, field: str) -> Any:
    """Returns the value in a piece of JSON of at most `MOST_SMALL_BYTES`.

    Raises:
        InvalidInput: The piece is longer, or is not JSON.
    """
    if len(memoryview(raw)) > MOST_SMALL_BYTES:
        raise InvalidInput(field, f"has more than {MOST_SMALL_BYTES} bytes")
    return decoded(raw, field, _anything.decode)


def decoded(data: Any, field: str, decode: Callable[[Any], Any]) -> Any:
    """Returns the result of `decode(data)`.

    Raises:
        InvalidInput: `decode` fails; the error names `field`.
    """
    try:
        return decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise InvalidInput(field, "is not JSON, or not of the right form") from None


def encoded(document: Document, *, is_finite: bool) -> bytes:
    """Returns a document as JSON.

    Args:
        document: The document.
        is_finite: False if it has numbers that are NaN or infinite, which are written as JavaScript
            writes them.
    """
    if is_finite:
        # A text from a header may have surrogates, which have no UTF-8 form.
        with suppress(UnicodeEncodeError):
            return msgspec.json.encode(document)
    return json.dumps(document, separators=(",", ":")).encode()


def _inputs(raw: msgspec.Raw) -> list[Document]:
    try:
        tensors = _tensors.decode(raw)
    except msgspec.ValidationError as error:
        place = _AT.search(str(error))
        if place is None:
            raise InvalidInput("inputs", "must be a list") from None
        raise InvalidInput(f"inputs[{place[1]}]", "must be an object") from None
    except (msgspec.MsgspecError, RecursionError):
        raise InvalidInput("body", "is not JSON") from None
    if len(tensors) > _MOST_INPUTS:
        raise InvalidInput("inputs", f"has more than {_MOST_INPUTS} tensors")
    return [_input(tensor, f"inputs[{at}]") for at, tensor in enumerate(tensors)]


def _input(tensor: _Tensor, field: str) -> Document:
    document: Document = {}
    for name in ("name", "datatype", "shape", "parameters"):
        value = getattr(tensor, name)
        if value is not _ABSENT:
            document[name] = small_value(value, f"{field}.{name}")
    if tensor.data is not _ABSENT:
        document["data"] = tensor.data
    return document


def has_few(data: memoryview, sign: bytes, most: int) -> bool:
    """Returns whether `data` holds the byte `sign` at most `most` times.

    It counts a piece at a time, and no further than it must, so that other threads can run between.
    """
    found = 0
    for at in range(0, len(data), _STEP_BYTES):
        found += bytes(data[at : at + _STEP_BYTES]).count(sign)
        if found > most:
            return False
    return True


def _require_few(data: bytes | memoryview, signs: bytes, most: int, what: str) -> None:
    """Raises InvalidInput for too many of any of `signs`; those inside texts count too."""
    view = memoryview(data)
    if not all(has_few(view, bytes((sign,)), most) for sign in signs):
        raise InvalidInput("body", f"has more than {most} {what}")
