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

DATATYPE_OF: dict[np.dtype[np.generic], str] = {dtype: name for name, dtype in DTYPE_OF.items()}

ANY = -1
"""A dimension that may have any size."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, Open Inference Protocol datatype and shape (`ANY` where free) of a tensor."""

    name: str
    datatype: str
    shape: tuple[Annotated[int, msgspec.Meta(ge=ANY)], ...]

    def nbytes(self, shape: Sequence[int]) -> int:
        """Returns the size in bytes of a tensor of this datatype and a concrete `shape`."""
        return math.prod(shape) * DTYPE_OF[self.datatype].itemsize
