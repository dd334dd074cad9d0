"""Loading of exported PyTorch programs (`torch.export.save`) that may come from strangers.

`torch.export.load` trusts its file: it unpickles whatever the archive declares to be a pickle,
passes texts from it to `sympy.sympify` and `exec`, resolves operators by attribute from `torch`
(`torch.os...` is one) and loads compiled libraries it finds. Therefore the archive is read first,
and refused unless it contains only tensors as raw bytes and a graph of PyTorch's own operators:

* members are stored (no compression, hence no bombs), each once, from the first byte on: what this
  reader sees is what PyTorch's own will see;
* a pickle is let through only if PyTorch's restricted unpickler (`weights_only`) reads it;
* sizes and guards are expressions of names, numbers and arithmetic, and small;
* operators are those of a list, one overload each (`torch_vetting`).
"""

from __future__ import annotations

import io
import json
import math
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from catenary_agent.partitioning.torch_vetting import check_graph
from catenary_services.errors import InvalidInput

_LARGEST_JSON_BYTES = 64 << 20
_MOST_MEMBERS = 100_000
_LOCAL_HEADER_BYTES = 30
_PLAIN = re.compile(
    r"archive_format|archive_version|byteorder|version|\.data/(version|serialization_id|alignment)"
    r"|\.format_version|\.storage_alignment|data/weights/weight_\d+|data/constants/tensor_\d+"
)
_CONFIG = re.compile(r"data/(weights|constants)/\w+_config\.json")
_PICKLE = re.compile(r"data/(sample_inputs|weights|constants)/\w+\.pt")
_GRAPH = re.compile(r"models/\w+\.json")


def load_program(path: Path, *, in_place: bool = False) -> torch.export.ExportedProgram:
    """Returns the exported program at `path`.

    Args:
        path: The archive.
        in_place: Whether to accept in-place operators (see `check_graph`), which the caller
            rewrites.

    Raises:
        InvalidInput: It is no program, or contains anything that could run code of its author's.
    """
    check_archive(path, in_place=in_place)
    try:
        return torch.export.load(path)
    except Exception as error:  # torch raises what its archive and schema readers raise
        raise InvalidInput(path.name, f"is not an exported program: {error}") from error


def check_archive(path: Path, *, in_place: bool = False) -> None:
    """Checks that an archive contains only tensors and a graph that may be run (`torch_vetting`).

    Raises:
        InvalidInput: It does not; the message says what was found.
    """
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            _check_members(path.name, archive, in_place)
    except (
        OSError,
        zipfile.BadZipFile,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
        NotImplementedError,
    ) as error:
        raise InvalidInput(path.name, f"is not an exported program: {error}") from error


def _check_members(file: str, archive: zipfile.ZipFile, in_place: bool) -> None:
    members = archive.infolist()
    names = [member.filename for member in members]
    plain = all(m.compress_type == zipfile.ZIP_STORED and not m.flag_bits & 1 for m in members)
    if not plain or archive.comment or len(set(names)) != len(names) or len(names) > _MOST_MEMBERS:
        raise InvalidInput(file, "is not an archive as PyTorch writes it")
    if not members or min(member.header_offset for member in members) != 0:
        raise InvalidInput(file, "has something in front of the archive")
    _check_disjoint(file, members)
    sizes = {member.filename: member.file_size for member in members}
    pickled = set[str]()
    for member in members:
        # The first part of a path is the archive's own name; old writers omit it.
        inside = str(PurePosixPath(*PurePosixPath(member.filename).parts[1:]))
        if _CONFIG.fullmatch(inside):
            folder = member.filename.rpartition("/")[0]
            pickled.update(
                f"{folder}/{each}" for each in _pickled(file, _json(archive, member), folder, sizes)
            )
        elif _GRAPH.fullmatch(inside):
            check_graph(file, _json(archive, member), in_place=in_place)
        elif _PICKLE.fullmatch(inside):
            pickled.add(member.filename)
        elif not _PLAIN.fullmatch(inside) and not _PLAIN.fullmatch(member.filename):
            raise InvalidInput(file, f"holds {member.filename[:200]!r}, which no program needs")
    for name in sorted(pickled):
        _check_pickle(file, archive, name)


def _json(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Any:
    if member.file_size > _LARGEST_JSON_BYTES:
        raise ValueError(f"{member.filename} is too large")
    return json.loads(archive.read(member))


def _check_disjoint(file: str, members: list[zipfile.ZipInfo]) -> None:
    """Raises InvalidInput if members share bytes, which makes large tensors of a small file."""
    end = 0
    for member in sorted(members, key=lambda member: member.header_offset):
        if member.header_offset < end or member.compress_size != member.file_size:
            raise InvalidInput(file, f"has members that overlap: {member.filename[:200]!r}")
        end = member.header_offset + _LOCAL_HEADER_BYTES + member.file_size


def _pickled(file: str, config: Any, folder: str, sizes: dict[str, int]) -> Iterator[str]:
    """Yields the members that a table of weights or constants declares to be pickles.

    Raises:
        InvalidInput: A constant is not a tensor, or is larger than its bytes.
    """
    for entry in config["config"].values() if isinstance(config.get("config"), dict) else ():
        name = str(entry.get("path_name"))
        if not re.fullmatch(r"(weight|tensor)_\d+", name):
            raise InvalidInput(file, f"has the constant {name[:100]!r}, which is not a tensor")
        if entry.get("use_pickle") is not False:
            yield name
        elif _elements(entry) > sizes.get(f"{folder}/{name}", 0):
            raise InvalidInput(file, f"has the constant {name!r}, which is larger than its bytes")


def _elements(entry: Any) -> int:
    """Returns the number of elements in a tensor's shape, whatever its strides."""
    sizes = entry["tensor_meta"]["sizes"]
    return math.prod(size["as_int"] for size in sizes)


def _check_pickle(file: str, archive: zipfile.ZipFile, name: str) -> None:
    content = archive.read(name)
    if not content:
        return
    try:
        torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
    except Exception as error:  # a pickle can raise anything
        raise InvalidInput(file, f"{name} holds more than tensors") from error
