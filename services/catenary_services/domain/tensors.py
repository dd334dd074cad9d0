"""Tensor datatypes of the Open Inference Protocol, and their NumPy equivalents."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np

DTYPE_OF: dict[str, np.dtype[np.generic]] = {
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
"""Datatypes of fixed size. BYTES, which is variable-length, and BF16, which NumPy lacks, are
absent."""

BYTES = "BYTES"
"""The datatype of texts and of everything else whose elements have any length."""
ARRAY_DTYPE_OF: dict[str, np.dtype[np.generic]] = DTYPE_OF | {BYTES: np.dtype(np.object_)}
"""The dtypes of arrays of all datatypes; elements of BYTES are objects of `bytes`."""
DATATYPE_OF: dict[np.dtype[np.generic], str] = {
    dtype: name for name, dtype in ARRAY_DTYPE_OF.items()
}
LENGTH_BYTES = 4
"""Bytes of the length before every element of BYTES, so that the element takes at least these."""
MOST_BYTES_ELEMENTS = 1 << 18
"""The most elements of a tensor of BYTES; each is an object, which takes far more than a number."""

ANY = -1
"""A dimension that may have any size."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, Open Inference Protocol datatype and shape (`ANY` where free) of a tensor."""

    name: str
    datatype: str
    shape: tuple[Annotated[int, msgspec.Meta(ge=ANY)], ...]

    def nbytes(self, shape: Sequence[int]) -> int:
        """Returns the size in bytes of a tensor of this datatype and a concrete `shape`.

        Of BYTES it is the size of a tensor of empty elements, the least possible.
        """
        fixed = DTYPE_OF.get(self.datatype)
        return math.prod(shape) * (LENGTH_BYTES if fixed is None else fixed.itemsize)


def zeros(datatype: str, shape: Sequence[int]) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
    """Returns an array of zeros; of BYTES, one of empty elements."""
    dtype = ARRAY_DTYPE_OF[datatype]
    return np.full(shape, b"", dtype) if datatype == BYTES else np.zeros(shape, dtype)
