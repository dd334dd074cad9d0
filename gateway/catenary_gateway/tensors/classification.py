"""The likeliest classes in place of an output: texts "VALUE:INDEX" or "VALUE:INDEX:NAME"."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from catenary_gateway.inference import InferenceResponse, Tensor
from catenary_gateway.tensors.raw_tensors import ObjectArray, object_array
from catenary_services.domain.tensors import DTYPE_OF, MOST_BYTES_ELEMENTS
from catenary_services.errors import InvalidInput

CLASSIFIED = frozenset(name for name, dtype in DTYPE_OF.items() if dtype.kind in "iuf")
"""The datatypes of outputs whose elements can be ranked."""


def classified(
    response: InferenceResponse, counts: Sequence[int], names: Sequence[str]
) -> InferenceResponse:
    """Returns an answer with the largest elements of some outputs in place of these.

    Args:
        response: The answer.
        counts: The number of classes for each of its outputs; 0 for an output that stays.
        names: Names of the model's classes; () if it has none.

    Raises:
        InvalidInput: The classes of all rows are too many.
    """
    outputs = [
        largest(array, count, names, f"outputs[{at}].parameters", by_row=response.model.batched)
        if count
        else array
        for at, (array, count) in enumerate(zip(response.outputs, counts, strict=True))
    ]
    return msgspec.structs.replace(response, outputs=tuple(outputs))


def largest(
    array: Tensor, count: int, names: Sequence[str], field: str, *, by_row: bool
) -> ObjectArray:
    """Returns the `count` largest elements, of each row if `by_row`, the largest first.

    Of equal elements the first comes first; NaN comes last.

    Raises:
        InvalidInput: They are too many for a tensor of texts.
    """
    rows = array.reshape(len(array), -1) if by_row and len(array) else array.reshape(1, -1)
    count = min(count, rows.shape[1])
    if len(rows) * count > MOST_BYTES_ELEMENTS:
        raise InvalidInput(
            f'{field}["classification"]',
            f"{len(rows) * count} classes of all rows are more than {MOST_BYTES_ELEMENTS}",
        )
    texts = [
        _text(row[index], int(index), names)
        for row, order in zip(rows, _descending(rows)[:, :count], strict=True)
        for index in order
    ]
    return object_array(texts, (len(rows), count) if by_row else (count,))


def _descending(rows: Tensor) -> NDArray[np.intp]:
    if rows.dtype.kind == "f":
        return np.argsort(np.negative(rows), axis=1, kind="stable")
    # The least integer has no negative, so rows are sorted backwards and turned round twice.
    backwards = np.argsort(rows[:, ::-1], axis=1, kind="stable")[:, ::-1]
    turned: NDArray[np.intp] = rows.shape[1] - 1 - backwards
    return turned


def _text(value: np.generic, index: int, names: Sequence[str]) -> bytes:
    shown = f"{value:f}" if value.dtype.kind == "f" else str(value)
    name = names[index] if index < len(names) else ""
    text = f"{shown}:{index}:{name}" if name else f"{shown}:{index}"
    return text.encode(errors="replace")  # a name of a JSON file may have a lone surrogate
