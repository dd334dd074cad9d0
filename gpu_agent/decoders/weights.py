"""Reading what a safetensors file holds without loading it, and joining the files of a shard."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from services.bounded_files import LARGEST_JSON_BYTES, read_bounded
from services.content.reading import Reading
from services.errors import InvalidInput

_LARGEST_HEADER_BYTES = 100_000_000
"""As the library itself has it."""
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_PIECE_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a safetensors file."""

    dtype: str
    """"F32", "BF16", .."""
    shape: tuple[int, ...]
    offset: int
    """From the start of the file."""
    nbytes: int


def stored_tensors(file: Path) -> dict[str, StoredTensor]:
    """Returns name -> where it lies.

    Source: https://huggingface.co/docs/safetensors (u64 header length, JSON header, raw bytes).

    Raises:
        InvalidInput: If it is not a safetensors file.
    """
    try:
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            if length > min(file.stat().st_size, _LARGEST_HEADER_BYTES):
                raise ValueError("its header is longer than the file, or than headers may be")
            header = json.loads(opened.read(length))
        return {
            name: StoredTensor(
                entry["dtype"],
                tuple(entry["shape"]),
                8 + length + entry["data_offsets"][0],
                entry["data_offsets"][1] - entry["data_offsets"][0],
            )
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise InvalidInput(file.name, f"is not a safetensors file: {error}") from None


def checked_tensors(file: Path, reading: Reading) -> dict[str, StoredTensor]:
    """Returns the same, after `reading` has checked the header.

    Raises:
        ContentMismatch: If it is not what was recorded.
        InvalidInput: If it is not a safetensors file.
    """
    reading.begin(file, [(0, 8)], first=True)
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
    reading.begin(file, [(0, 8 + min(length, _LARGEST_HEADER_BYTES))], first=True)
    return stored_tensors(file)


def write_joined(source: Path, target: Path) -> None:
    """Writes the weights in folder `source`, one file or several, as the one file `target`.

    Raises:
        InvalidInput: If there are none, or a file is damaged.
    """
    if (source / WEIGHTS_FILE).exists():
        shards = [source / WEIGHTS_FILE]
    elif (source / INDEX_FILE).exists():
        index = json.loads(read_bounded(source / INDEX_FILE, LARGEST_JSON_BYTES))
        names = sorted(set(index["weight_map"].values()))
        if any(Path(name).name != name for name in names):
            raise InvalidInput(INDEX_FILE, "names a file outside its folder")
        shards = [source / name for name in names]
    else:
        raise InvalidInput(source.name, f"has no {WEIGHTS_FILE}")
    tensors = [(shard, name, t) for shard in shards for name, t in stored_tensors(shard).items()]
    header, end = {}, 0
    for _, name, tensor in tensors:
        span = [end, end + tensor.nbytes]
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": span}
        end += tensor.nbytes
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    with target.open("wb") as out:
        out.write(struct.pack("<Q", len(text)))
        out.write(text)
        for shard, name, tensor in tensors:
            _append(shard, name, tensor, out)


def _append(shard: Path, name: str, tensor: StoredTensor, out: BinaryIO) -> None:
    with shard.open("rb") as file:
        file.seek(tensor.offset)
        left = tensor.nbytes
        while left:
            piece = file.read(min(left, _PIECE_BYTES))
            if not piece:
                raise InvalidInput(shard.name, f"ends within {name}")
            out.write(piece)
            left -= len(piece)
