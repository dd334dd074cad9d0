"""Loads exported PyTorch programs (`torch.export.save`) that may come from strangers.

`torch.export.load` trusts its file: it unpickles whatever the archive says is a pickle, hands
texts from it to `sympy.sympify` and `exec`, resolves operators by attribute from `torch`
(`torch.os...` is one) and loads compiled libraries it finds. So the archive is read first, and
refused unless it holds nothing but tensors as raw bytes and a graph of PyTorch's own operators:

* members are stored (no compression, hence no bombs), each once, from the first byte on: what this
  reader sees is what PyTorch's own will see;
* a pickle is let through only if PyTorch's restricted unpickler (`weights_only`) reads it;
* sizes and guards are expressions of names, numbers and arithmetic.
"""

from __future__ import annotations

import ast
import io
import json
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from services.errors import InvalidInput

_LARGEST_JSON_BYTES = 64 << 20
_MOST_MEMBERS = 100_000
_PLAIN = re.compile(
    r"archive_format|archive_version|byteorder|version|\.data/(version|serialization_id|alignment)"
    r"|\.format_version|\.storage_alignment|data/weights/weight_\d+|data/constants/tensor_\d+"
)
_CONFIG = re.compile(r"data/(weights|constants)/\w+_config\.json")
_PICKLE = re.compile(r"data/(sample_inputs|weights|constants)/\w+\.pt")
_GRAPH = re.compile(r"models/\w+\.json")
_OPERATOR = re.compile(
    r"torch\.ops\.(aten|prims|quantized_decomposed)\.\w+(\.\w+)?"
    r"|torch\.ops\.higher_order\.(cond|wrap_with_set_grad_enabled)|torch\.sym_\w+|torch\._check\w*"
    r"|_operator\.(?!(attrgetter|methodcaller|call)\b)[a-z]\w*|math\.[a-z]\w*"
)
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,127}")
_TREES = frozenset({None, "builtins.tuple", "builtins.list", "builtins.dict"})
_ARITHMETIC = (
    ast.Expression, ast.BoolOp, ast.BinOp, ast.UnaryOp, ast.Compare, ast.Name, ast.Constant,
    ast.Call, ast.keyword, ast.Subscript, ast.Attribute, ast.Load, ast.operator, ast.unaryop,
    ast.boolop, ast.cmpop, ast.Tuple,
)  # fmt: skip
_ASKED_OF_TENSORS = frozenset({"size", "shape", "stride", "storage_offset", "ndim", "dim"})
_FUNCTIONS = frozenset({
    "Symbol", "Integer", "Float", "Rational", "Add", "Mul", "Pow", "Max", "Min", "Mod", "Abs", "Eq",
    "Ne", "Lt", "Le", "Gt", "Ge", "And", "Or", "Not", "floor", "ceiling", "FloorDiv", "CleanDiv",
    "CeilDiv", "PythonMod", "ModularIndexing", "IntTrueDiv", "FloatTrueDiv", "FloatPow",
    "PowByNatural", "ToFloat", "TruncToInt", "TruncToFloat", "RoundToInt", "Where", "Identity",
    "max", "min", "abs",
})  # fmt: skip


def load_program(path: Path) -> torch.export.ExportedProgram:
    """Returns the exported program at `path`.

    Raises:
        InvalidInput: It is none, or holds anything that could run code of its author's.
    """
    check_archive(path)
    try:
        return torch.export.load(path)
    except Exception as error:  # torch raises what its archive and schema readers raise
        raise InvalidInput(path.name, f"is not an exported program: {error}") from error


def check_archive(path: Path) -> None:
    """Returns if the archive holds only tensors and a graph of PyTorch's own operators.

    Raises:
        InvalidInput: It does not; the message says what was found.
    """
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            _check_members(path.name, archive)
    except (OSError, zipfile.BadZipFile, ValueError, RecursionError) as error:
        raise InvalidInput(path.name, f"is not an exported program: {error}") from error


def _check_members(file: str, archive: zipfile.ZipFile) -> None:
    members = archive.infolist()
    names = [member.filename for member in members]
    plain = all(m.compress_type == zipfile.ZIP_STORED and not m.flag_bits & 1 for m in members)
    if not plain or archive.comment or len(set(names)) != len(names) or len(names) > _MOST_MEMBERS:
        raise InvalidInput(file, "is not an archive as PyTorch writes it")
    if not members or min(member.header_offset for member in members) != 0:
        raise InvalidInput(file, "has something in front of the archive")
    pickled = set[str]()
    for member in members:
        # The first part is the archive's own name; old writers leave it out.
        inside = str(PurePosixPath(*PurePosixPath(member.filename).parts[1:]))
        if _CONFIG.fullmatch(inside):
            folder = member.filename.rpartition("/")[0]
            pickled.update(f"{folder}/{each}" for each in _pickled(file, _json(archive, member)))
        elif _GRAPH.fullmatch(inside):
            _check_graph(file, _json(archive, member))
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


def _pickled(file: str, config: Any) -> Iterator[str]:
    """Yields the members that a table of weights or constants calls pickles."""
    for entry in config["config"].values() if isinstance(config.get("config"), dict) else ():
        name = str(entry.get("path_name"))
        if not re.fullmatch(r"(weight|tensor)_\d+", name):
            raise InvalidInput(file, f"has the constant {name[:100]!r}, which is not a tensor")
        if entry.get("use_pickle") is not False:
            yield name


def _check_pickle(file: str, archive: zipfile.ZipFile, name: str) -> None:
    content = archive.read(name)
    if not content:
        return
    try:
        torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
    except Exception as error:  # whatever a pickle comes to
        raise InvalidInput(file, f"{name} holds more than tensors") from error


def _check_graph(file: str, graph: Any) -> None:
    for key, value in _walk(graph, ""):
        if key == "target" and isinstance(value, str) and not _OPERATOR.fullmatch(value):
            raise InvalidInput(file, f"calls {value[:200]!r}, which is no operator of PyTorch's")
        if key in ("expr_str", "guards_code") and not _is_arithmetic(value):
            raise InvalidInput(file, f"has a size or guard that is not arithmetic: {value[:200]!r}")
        if key in ("in_spec", "out_spec") and value and not _is_plain_tree(json.loads(value)):
            raise InvalidInput(file, "takes or returns something other than plain containers")
    for symbol in graph.get("range_constraints", {}):
        if not _is_arithmetic(symbol):
            raise InvalidInput(file, f"has a size that is not arithmetic: {symbol[:200]!r}")


def _walk(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Yields every text below `value`, with the name of the field (or of the list) it is in."""
    if isinstance(value, dict):
        for name, below in value.items():
            yield from _walk(below, name)
    elif isinstance(value, list):
        for below in value:
            yield from _walk(below, key)
    elif isinstance(value, str):
        yield key, value


def _is_plain_tree(spec: Any) -> bool:
    return all(
        node["type"] in _TREES for node in _nodes(spec) if isinstance(node, dict) and "type" in node
    )


def _nodes(value: Any) -> Iterator[Any]:
    yield value
    inside = value.values() if isinstance(value, dict) else value
    for below in inside if isinstance(value, dict | list) else ():
        yield from _nodes(below)


def _is_arithmetic(text: str) -> bool:
    """True for an expression of names, numbers and the functions PyTorch writes in sizes."""
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, MemoryError):
        return False
    return all(isinstance(node, _ARITHMETIC) and _is_harmless(node) for node in ast.walk(tree))


def _is_harmless(node: ast.AST) -> bool:
    if isinstance(node, ast.Name):
        return not node.id.startswith("__")
    if isinstance(node, ast.Attribute):
        return node.attr in _ASKED_OF_TENSORS
    if isinstance(node, ast.Call):
        name = node.func
        return (isinstance(name, ast.Name) and name.id in _FUNCTIONS) or (
            isinstance(name, ast.Attribute) and name.attr in _ASKED_OF_TENSORS
        )
    if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes):
        # `sympify` reads texts as expressions: only names may be written as one.
        return isinstance(node.value, str) and _NAME.fullmatch(node.value) is not None
    return True
