"""Checks what a request declares about its tensors against the model, before any byte is read.

Both endpoints call these, so that one mistake has one message. Fields are named as in the message:
`inputs[0].shape`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from catenary_gateway.catalog import Model
from catenary_services.domain.tensors import ANY, DTYPE_OF, TensorSpec
from catenary_services.errors import InvalidInput

MAX_ROWS = 65_536
"""Rows of one request; a request of more is a mistake or an attack."""

BYTES = "BYTES"
DATATYPES = frozenset((*DTYPE_OF, BYTES, "BF16"))
_LONGEST_NAME = 100
LONGEST_ID = 256
"""Characters of a request's id; it is echoed, logged and kept for a while."""


@dataclass(frozen=True, slots=True)
class DeclaredInput:
    """What a request says of one of its inputs."""

    name: str
    datatype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def check_inputs(model: Model, declared: Sequence[DeclaredInput], max_bytes: int) -> int:
    """Returns the number of rows of a request that declares these inputs.

    Raises:
        InvalidInput: an input is unknown, twice, missing, of another datatype or shape, too large,
            or has another number of rows than the others.
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
    """Returns the positions of the requested outputs; all of them if none is named.

    Raises:
        InvalidInput: an output is unknown or asked for twice.
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
    """Returns the bytes the tensor has at least."""
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
    # A BYTES element has a length of four bytes even when empty.
    item = 4 if spec.datatype == BYTES else DTYPE_OF[spec.datatype].itemsize
    # Python integers do not overflow; a product of huge dimensions is simply too large.
    # Empty ones count as 1: NumPy refuses huge dimensions even beside a zero.
    if math.prod(max(size, 1) for size in shape) * item > max_bytes:
        raise InvalidInput(
            f"{field}.shape", f"describes more than the {max_bytes} bytes a request may have"
        )
    return math.prod(shape) * item


def _check_rows(rows: int, field: str) -> int:
    if not 1 <= rows <= MAX_ROWS:
        raise InvalidInput(field, f"has {rows} rows; a request has 1 to {MAX_ROWS}")
    return rows


def clip(text: str) -> str:
    """Returns `text`, shortened if a stranger made it long."""
    return text if len(text) <= _LONGEST_NAME else text[:_LONGEST_NAME] + "…"


def _shown(shape: Sequence[int]) -> str:
    return "[" + ", ".join(str(size) for size in shape) + "]"


def check_id(request_id: str) -> str:
    """Returns the id of a request.

    Raises:
        InvalidInput: it is too long to be echoed, logged and kept.
    """
    if len(request_id) > LONGEST_ID:
        raise InvalidInput("id", f"has {len(request_id)} characters, at most {LONGEST_ID} may be")
    return request_id
