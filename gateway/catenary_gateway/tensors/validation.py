"""Checks of what a request declares, before any byte of its tensors is read.

Endpoints of both protocols call them, so that one mistake has one error message. Fields are named
as in the request: `inputs[0].shape`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from catenary_gateway.catalog import Model
from catenary_services.domain.tensors import (
    ANY,
    ARRAY_DTYPE_OF,
    BYTES,
    DTYPE_OF,
    LENGTH_BYTES,
    MOST_BYTES_ELEMENTS,
    TensorSpec,
)
from catenary_services.errors import InvalidInput

MAX_ROWS = 65_536
"""Most rows of one request; a request with more is a mistake or an attack."""

DATATYPES = frozenset((*ARRAY_DTYPE_OF, "BF16"))
PAIRS = TensorSpec("text", BYTES, (ANY, 2))
"""The other form of the input of a model that judges pairs of texts."""
_LONGEST_NAME = 100
NANOSECONDS_PER_MILLISECOND = 1_000_000
LONGEST_SLO_MS = 3_600_000.0
"""Longest objective in milliseconds, one hour; longer ones are cut to this."""
LONGEST_ID = 256
"""Most characters of a request's id, which is echoed, logged and kept for a while."""


class DeclaredInput(msgspec.Struct, frozen=True):
    """The declaration of one input in a request."""

    name: str
    datatype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def check_inputs(model: Model, declared: Sequence[DeclaredInput], max_bytes: int) -> int:
    """Checks the declared inputs of a request, and returns its number of rows.

    Raises:
        InvalidInput: An input is unknown, given twice, missing, of another datatype or shape, too
            large, or has another number of rows than the others.
    """
    specs = model.specs
    seen: set[str] = set()
    rows: int | None = None
    total = 0
    for at, tensor in enumerate(declared):
        spec = specs.get(tensor.name)
        if spec is None:
            known = ", ".join(specs)
            raise InvalidInput(
                f"inputs[{at}].name", f"model has no input {clip(tensor.name)!r}; it has {known}"
            )
        if tensor.name in seen:
            raise InvalidInput(f"inputs[{at}].name", f"{clip(tensor.name)!r} is given twice")
        seen.add(tensor.name)
        if model.takes_pairs and len(tensor.shape) > 1:
            spec = PAIRS
        total += _check_tensor(tensor, spec, f"inputs[{at}]", max_bytes)
        if model.batched:
            if rows is not None and tensor.shape[0] != rows:
                raise InvalidInput(
                    f"inputs[{at}].shape", f"has {tensor.shape[0]} rows, inputs[0] has {rows}"
                )
            rows = tensor.shape[0]
    missing = [name for name in specs if name not in seen]
    if missing:
        raise InvalidInput("inputs", f"input {missing[0]!r} is missing")
    rows = _check_rows(rows if model.batched and rows is not None else 1, "inputs[0].shape")
    if model.max_row_bytes and total > model.max_row_bytes * rows:
        raise InvalidInput(
            "inputs", f"a row has {total // rows} bytes, the model takes {model.max_row_bytes}"
        )
    return rows


def check_outputs(model: Model, names: Sequence[str]) -> tuple[int, ...]:
    """Returns the indices of the requested outputs in the model; all of them if none is named.

    Raises:
        InvalidInput: An output is unknown or requested twice.
    """
    if not names:
        return tuple(range(len(model.outputs)))
    wanted: list[int] = []
    for at, name in enumerate(names):
        index = model.output_index.get(name)
        if index is None:
            known = ", ".join(model.output_index)
            raise InvalidInput(
                f"outputs[{at}].name", f"model has no output {clip(name)!r}; it has {known}"
            )
        if index in wanted:
            raise InvalidInput(f"outputs[{at}].name", f"{clip(name)!r} is asked for twice")
        wanted.append(index)
    return tuple(wanted)


def _check_tensor(tensor: DeclaredInput, spec: TensorSpec, field: str, max_bytes: int) -> int:
    """Checks one tensor, and returns the least number of bytes it has."""
    if tensor.datatype != spec.datatype:
        known = "" if tensor.datatype in DATATYPES else " (not a datatype of the protocol)"
        raise InvalidInput(
            f"{field}.datatype",
            f"is {clip(tensor.datatype)!r}{known}, the model takes {spec.datatype}",
        )
    shape = tensor.shape
    if len(shape) != len(spec.shape):
        raise InvalidInput(
            f"{field}.shape", f"has {len(shape)} dimensions, the model takes {_shown(spec.shape)}"
        )
    for size, expected in zip(shape, spec.shape, strict=True):
        if size < 0:
            raise InvalidInput(f"{field}.shape", f"dimension {size} is negative")
        if expected not in (ANY, size):
            raise InvalidInput(
                f"{field}.shape", f"is {_shown(shape)}, the model takes {_shown(spec.shape)}"
            )
    # An element of BYTES has a length even when it is empty.
    item = LENGTH_BYTES if spec.datatype == BYTES else DTYPE_OF[spec.datatype].itemsize
    # Python integers do not overflow, so a product of huge dimensions is compared as it is.
    # Empty dimensions count as 1, because NumPy refuses huge dimensions even beside a zero.
    elements = math.prod(shape)
    if (elements or math.prod(max(size, 1) for size in shape)) * item > max_bytes:
        raise InvalidInput(
            f"{field}.shape", f"describes more than the {max_bytes} bytes a request may have"
        )
    if spec.datatype == BYTES and elements > MOST_BYTES_ELEMENTS:
        text = f"has {elements} elements; at most {MOST_BYTES_ELEMENTS} of BYTES may be"
        raise InvalidInput(f"{field}.shape", text)
    return elements * item


def _check_rows(rows: int, field: str) -> int:
    if not 1 <= rows <= MAX_ROWS:
        raise InvalidInput(field, f"has {rows} rows; a request has 1 to {MAX_ROWS}")
    return rows


def clip(text: str) -> str:
    """Returns `text`, shortened to at most 100 characters and an ellipsis."""
    return text if len(text) <= _LONGEST_NAME else text[:_LONGEST_NAME] + "…"


def _shown(shape: Sequence[int]) -> str:
    return "[" + ", ".join(str(size) for size in shape) + "]"


def check_id(request_id: str) -> str:
    """Returns the id of a request if it is short enough to be echoed, logged and kept.

    Raises:
        InvalidInput: The id has more than `LONGEST_ID` characters.
    """
    if len(request_id) > LONGEST_ID:
        raise InvalidInput("id", f"has {len(request_id)} characters, at most {LONGEST_ID} may be")
    return request_id
