"""Folders and safetensors files of strangers: links, ranges and headers."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest

from catenary_agent.decoders.model_files.checkpoint import Checkpoint
from catenary_agent.decoders.model_files.weights import is_own_file, stored_tensors
from catenary_services.errors import InvalidInput


def written(file: Path, header: Any, content: bytes) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + content)
    return file


def entry(begin: int, end: int, shape: list[int] | None = None, dtype: str = "F32") -> Any:
    given = [(end - begin) // 4] if shape is None else shape
    return {"dtype": dtype, "shape": given, "data_offsets": [begin, end]}


GOOD = {"a": entry(0, 8), "b": entry(8, 16), "__metadata__": {"format": "pt"}}
HOSTILE = {
    "ranges that overlap": {"a": entry(0, 16), "b": entry(8, 16)},
    "a thousand times the same": {f"t{n}": entry(0, 16) for n in range(1000)},
    "a gap": {"a": entry(0, 4), "b": entry(8, 16)},
    "a beginning behind the first byte": {"a": entry(8, 16)},
    "a range that runs backwards": {"a": entry(8, 0, [2])},
    "a negative range": {"a": entry(-8, 0)},
    "a shape larger than its bytes": {"a": entry(0, 16, [1 << 40])},
    "a negative shape": {"a": entry(0, 16, [-2, -2])},
    "a shape of fractions": {"a": entry(0, 16, [4.0])},  # type: ignore[list-item]
    "a shape of truths": {"a": entry(0, 4, [True])},
    "very many dimensions": {"a": entry(0, 4, [1] * 1000)},
    "an unknown type": {"a": entry(0, 16, [4], "PICKLE")},
    "a type that is a list": {"a": {**entry(0, 16), "dtype": ["F32"]}},
    "three offsets": {"a": {**entry(0, 16), "data_offsets": [0, 8, 16]}},
    "a list": [],
    "a tensor that is a text": {"a": "b"},
    "a name twice": b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
    b'"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}',
    "a deep header": b'{"a":' * 100_000,
    "no JSON": b"\xff\xfe",
}


def test_a_file_as_the_library_writes_it_is_read(tmp_path: Path) -> None:
    found = stored_tensors(written(tmp_path / "m.safetensors", GOOD, bytes(16)))
    assert [(name, t.nbytes) for name, t in found.items()] == [("a", 8), ("b", 8)]


@pytest.mark.parametrize("attack", HOSTILE)
def test_headers_that_lie_are_refused(attack: str, tmp_path: Path) -> None:
    file = written(tmp_path / "model.safetensors", HOSTILE[attack], bytes(16))
    with pytest.raises(InvalidInput, match=r"^model\.safetensors"):
        Checkpoint.of(tmp_path)
    assert file.exists()


@pytest.mark.parametrize("length", [1 << 63, (1 << 64) - 1, 100_000_001, 17])
def test_headers_longer_than_the_file_are_not_read(length: int, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", length) + bytes(16))
    with pytest.raises(InvalidInput, match=r"^model\.safetensors"):
        stored_tensors(file)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_links_out_of_the_folder_are_refused(name: str, tmp_path: Path) -> None:
    """A link to a private file would be copied into the repository, for everybody to read."""
    secret, folder = tmp_path / "secret", tmp_path / "model"
    folder.mkdir()
    secret.write_text("private")
    (folder / name).symlink_to(secret)
    with pytest.raises(InvalidInput, match="symbolic link"):
        is_own_file(folder, name)
    (folder / name).unlink()
    (folder / name).symlink_to("../model/../secret")
    with pytest.raises(InvalidInput, match="symbolic link"):
        is_own_file(folder, name)
    (folder / name).unlink()
    os.mkfifo(folder / name)
    assert not is_own_file(folder, name)


def test_an_index_that_names_a_link_is_refused(tmp_path: Path) -> None:
    written(tmp_path / "outside", GOOD, bytes(16))
    folder = tmp_path / "model"
    folder.mkdir()
    for shard in ("../outside", "/etc/passwd", "link", "missing"):
        index = {"weight_map": {"a": shard}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        if shard == "link":
            (folder / "link").symlink_to(tmp_path / "outside")
        with pytest.raises(InvalidInput):
            Checkpoint.of(folder)
