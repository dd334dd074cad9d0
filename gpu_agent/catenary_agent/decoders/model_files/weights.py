"""Reading of safetensors headers, without loading the tensors."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from catenary_services.content.reading import VerifiedReading
from catenary_services.errors import InvalidInput

_LARGEST_HEADER_BYTES = 100_000_000
"""The largest header accepted; the limit of the safetensors library."""
_MOST_TENSORS = 100_000
_MOST_DIMENSIONS = 16
_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
    "C64": 64,
}
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a safetensors file."""

    dtype: str
    """The datatype: "F32", "BF16", ..."""
    shape: tuple[int, ...]
    offset: int
    """Offset of its first byte from the start of the file."""
    nbytes: int


def stored_tensors(file: Path) -> dict[str, StoredTensor]:
    """Returns the tensors of a safetensors file by name.

    Source: https://huggingface.co/docs/safetensors (u64 header length, JSON header, raw bytes).

    Raises:
        InvalidInput: It is not a safetensors file.
    """
    try:
        with file.open("rb") as opened:
            size = file.stat().st_size
            (length,) = struct.unpack("<Q", opened.read(8))
            if length > min(size - 8, _LARGEST_HEADER_BYTES):
                raise ValueError("its header is longer than the file, or than headers may be")
            header = json.loads(opened.read(length), object_pairs_hook=_each_once)
        tensors = {
            name: _stored(entry, 8 + length)
            for name, entry in header.items()
            if name != "__metadata__"
        }
        if len(tensors) > _MOST_TENSORS:
            raise ValueError(f"it has more than {_MOST_TENSORS} tensors")
        _check_disjoint(tensors, 8 + length)
    except (
        OSError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        struct.error,
        RecursionError,
    ) as error:
        raise InvalidInput(file.name, f"is not a safetensors file: {error}") from None
    return tensors


def is_own_file(folder: Path, name: str) -> bool:
    """Returns True if a folder has a file of that name.

    Raises:
        InvalidInput: The file is a symbolic link out of the folder. It may lead to a file that the
            user may read but the maker of the folder may not.
    """
    path = folder / name
    if not path.is_file():
        return False
    if not path.resolve().is_relative_to(folder.resolve()):
        raise InvalidInput(name, "is a symbolic link out of its folder: copy the file there")
    return True


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("its header names something twice")
    return made


def _stored(entry: Any, start: int) -> StoredTensor:
    shape = tuple(entry["shape"])
    begin, end = entry["data_offsets"]
    bits = _BITS[entry["dtype"]] * math.prod(shape)
    numbers = (*shape, begin, end)
    if len(shape) > _MOST_DIMENSIONS or not all(type(n) is int and n >= 0 for n in numbers):
        raise ValueError("a tensor has sizes that cannot be")
    if 8 * (end - begin) != bits:
        raise ValueError("a tensor has another length than its shape says")
    return StoredTensor(entry["dtype"], shape, start + begin, end - begin)


def _check_disjoint(tensors: dict[str, StoredTensor], start: int) -> None:
    """Raises ValueError unless the tensors follow each other without gaps and overlaps."""
    at = start
    for tensor in sorted(tensors.values(), key=lambda each: (each.offset, each.nbytes)):
        if tensor.offset != at:
            raise ValueError("its tensors overlap, or have bytes between them")
        at += tensor.nbytes


def checked_tensors(file: Path, reading: VerifiedReading) -> dict[str, StoredTensor]:
    """Returns the tensors of a safetensors file by name, after `reading` has checked its header.

    Raises:
        ContentMismatch: The file differs from its record.
        InvalidInput: It is not a safetensors file.
    """
    reading.begin(file, [(0, 8)], first=True)
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
    reading.begin(file, [(0, 8 + min(length, _LARGEST_HEADER_BYTES))], first=True)
    return stored_tensors(file)


def header_bytes(tensors: Mapping[str, tuple[str, tuple[int, ...], int]]) -> bytes:
    """Returns the header of a safetensors file in which tensors follow each other.

    Args:
        tensors: Datatype, shape and bytes of each tensor by name, in their order.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape, nbytes) in tensors.items():
        span = [end, end + nbytes]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": span}
        end += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
