"""Location of a published model's tensors: in one safetensors file, or in shards with an index.

A model in the repository keeps its files unchanged. Only `model.safetensors.index.json` is written
again at import: it has the digest of every shard, so its own digest covers all weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from catenary_agent.decoders.model_files.weights import (
    INDEX_FILE,
    WEIGHTS_FILE,
    StoredTensor,
    checked_tensors,
    header_bytes,
    is_own_file,
    stored_tensors,
)
from catenary_services.bounded_files import LARGEST_JSON_BYTES, read_bounded
from catenary_services.content.reading import VerifiedReading
from catenary_services.errors import InvalidInput

_MOST_SHARDS = 1024
_PIECE_BYTES = 1 << 24
Places = dict[str, tuple[Path, StoredTensor]]
"""The file of each tensor by name, and its place in the file."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The weights of a folder: their files and the place of each tensor."""

    files: tuple[Path, ...]
    tensors: Places

    @staticmethod
    def of(folder: Path) -> Checkpoint:
        """Returns the tensors in the headers of a folder's weights; nothing else is read.

        Raises:
            InvalidInput: There are no weights, or a file is damaged, missing, a link out of the
                folder, or has other tensors than the index says.
        """
        files = _files(folder)
        tensors = joined((file, stored_tensors(file)) for file in files)
        for file in files:
            end = max((t.offset + t.nbytes for at, t in tensors.values() if at == file), default=0)
            size = file.stat().st_size
            if size != end:
                where = "within" if size < end else "behind"
                raise InvalidInput(file.name, f"ends {where} its tensors")
        if files[0].name != WEIGHTS_FILE:
            _check_index(folder, tensors)
        return Checkpoint(files, tensors)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shape of every tensor by name."""
        return {name: tensor.shape for name, (_, tensor) in self.tensors.items()}


def places_in(reading: VerifiedReading) -> Places:
    """Returns the place of every tensor of a model in the repository, after checking the headers.

    Raises:
        ContentMismatch: A file differs from its record, or was added later.
        InvalidInput: There is none, one is damaged, or a tensor is in two.
    """
    files = sorted(reading.folder.glob("*.safetensors"))
    if not files:
        raise InvalidInput(reading.folder.name, "has no .safetensors file")
    return joined((file, checked_tensors(file, reading)) for file in files)


def joined(files: Iterable[tuple[Path, Mapping[str, StoredTensor]]]) -> Places:
    """Returns the tensors of several files.

    Raises:
        InvalidInput: A tensor is in two of them.
    """
    places: Places = {}
    for file, tensors in files:
        for name, tensor in tensors.items():
            if name in places:
                raise InvalidInput(name, f"is in {places[name][0].name} and in {file.name}")
            places[name] = file, tensor
    return places


def index_text(places: Mapping[str, str], total_bytes: int, digests: Mapping[str, str]) -> str:
    """Returns the text of an index of shards.

    Args:
        places: The shard of each tensor.
        total_bytes: Size of all tensors.
        digests: The SHA-256 of each shard.
    """
    document = {
        "metadata": {"total_size": total_bytes, "sha256": dict(sorted(digests.items()))},
        "weight_map": dict(sorted(places.items())),
    }
    return json.dumps(document, indent=1) + "\n"


def write_alone(name: str, checkpoint: Checkpoint, target: Path) -> None:
    """Writes a file that contains a single tensor of a checkpoint.

    Raises:
        InvalidInput: The checkpoint has no such tensor.
    """
    if name not in checkpoint.tensors:
        raise InvalidInput(checkpoint.files[0].name, f"has no {name}")
    file, tensor = checkpoint.tensors[name]
    with file.open("rb") as source, target.open("wb") as out:
        out.write(header_bytes({name: (tensor.dtype, tensor.shape, tensor.nbytes)}))
        source.seek(tensor.offset)
        left = tensor.nbytes
        while left and (piece := source.read(min(left, _PIECE_BYTES))):
            out.write(piece)
            left -= len(piece)


def _files(folder: Path) -> tuple[Path, ...]:
    if is_own_file(folder, WEIGHTS_FILE):
        return (folder / WEIGHTS_FILE,)
    if not is_own_file(folder, INDEX_FILE):
        raise InvalidInput(folder.name, f"has no {WEIGHTS_FILE}")
    names = sorted(set(_weight_map(folder).values()))
    if any(Path(name).name != name or not is_own_file(folder, name) for name in names):
        raise InvalidInput(INDEX_FILE, "names a file that is missing or outside its folder")
    if len(names) > _MOST_SHARDS:
        raise InvalidInput(INDEX_FILE, f"names more than {_MOST_SHARDS} files")
    return tuple(folder / name for name in names)


def _weight_map(folder: Path) -> dict[str, str]:
    try:
        index: Any = json.loads(read_bounded(folder / INDEX_FILE, LARGEST_JSON_BYTES))
        places = index["weight_map"]
        if not places or not all(isinstance(name, str) for name in places.values()):
            raise ValueError("its weight_map is none")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidInput(INDEX_FILE, f"is no index: {error}") from None
    return dict(places)


def _check_index(folder: Path, tensors: Places) -> None:
    said = _weight_map(folder)
    found = {name: file.name for name, (file, _) in tensors.items()}
    for name in sorted(said.keys() | found.keys()):
        if said.get(name) != found.get(name):
            where = found.get(name, "in no file")
            raise InvalidInput(INDEX_FILE, f"says {said.get(name)} has {name}, which is {where}")
