"""The embedding as a look-up in memory-mapped weights, so that only rows in use are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from catenary_agent.decoders.model_files.weights import checked_tensors
from catenary_services.content.reading import VerifiedReading
from catenary_services.errors import InvalidInput, NotSupported

EMBEDDING = "model.embed_tokens.weight"
_DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}


class Embedding:
    """A matrix in a safetensors file whose rows are read as float32."""

    def __init__(self, file: Path, reading: VerifiedReading, factor: float = 1.0) -> None:
        """Maps the embedding in a file, which `reading` checks.

        Args:
            file: A safetensors file.
            reading: The reading of its folder.
            factor: The factor of all rows.

        Raises:
            InvalidInput: The file has no such matrix.
            NotSupported: Its datatype is not F32, F16 or BF16.
        """
        tensor = checked_tensors(file, reading).get(EMBEDDING)
        if tensor is None or len(tensor.shape) != 2:
            raise InvalidInput(file.name, f"has no matrix {EMBEDDING}")
        if tensor.dtype not in _DTYPES:
            raise NotSupported(f"{file.name}: {EMBEDDING} is {tensor.dtype}")
        self._factor = None if factor == 1.0 else np.float32(factor)
        self._bfloat16 = tensor.dtype == "BF16"
        reading.begin(file, [(tensor.offset, tensor.nbytes)])
        dtype = _DTYPES[tensor.dtype]
        self._rows = np.memmap(file, dtype, "r", tensor.offset, tensor.shape)

    def look_up(self, token_ids: np.ndarray) -> np.ndarray:
        """Returns the rows of int64 [n] token ids as float32 [n, hidden]."""
        rows = np.asarray(self._rows[token_ids])
        if self._bfloat16:  # these bits are the upper half of a float32
            rows = (rows.astype(np.uint32) << 16).view(np.float32)
        rows = rows.astype(np.float32, copy=False)
        return rows if self._factor is None else rows * self._factor
