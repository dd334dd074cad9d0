"""Files of models are read up to a limit, and name no file elsewhere."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from catenary_agent.decoders.model_files.checkpoint import Checkpoint
from catenary_agent.decoders.model_files.weights import INDEX_FILE, WEIGHTS_FILE
from catenary_services.bounded_files import LARGEST_YAML_BYTES, read_bounded
from catenary_services.domain.ids import ModelKey
from catenary_services.errors import InvalidInput
from catenary_services.models.model_repository import ModelRepository

KEY = ModelKey("toy", "1")


def test_a_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x" * 10)
    assert read_bounded(file, 10) == b"x" * 10
    with pytest.raises(InvalidInput, match="larger than 9 bytes"):
        read_bounded(file, 9)


@pytest.mark.parametrize(
    "content",
    [
        "a" * (LARGEST_YAML_BYTES + 1),
        "[" * 3_000,
        "- " * 3_000,
        "a: [1]\n" * 600,
        "platform: [" + "{a: " * 2_000,
    ],
)
def test_a_manifest_that_is_too_large_or_too_deep_is_refused(tmp_path: Path, content: str) -> None:
    repository = ModelRepository(tmp_path)
    folder = repository.folder(KEY)
    folder.mkdir(parents=True)
    (folder / "model.yaml").write_text(content)
    with pytest.raises(InvalidInput):
        repository.manifest(KEY)


def test_deep_json_tables_are_refused(tmp_path: Path) -> None:
    repository = ModelRepository(tmp_path)
    folder = repository.folder(KEY)
    folder.mkdir(parents=True)
    (folder / "blocks.json").write_text("[" * 200_000)
    with pytest.raises(InvalidInput, match="JSON"):
        repository.block_table(KEY)


def test_an_index_of_weights_cannot_name_files_elsewhere(tmp_path: Path) -> None:
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": "../../secret"}}))
    with pytest.raises(InvalidInput, match="outside its folder"):
        Checkpoint.of(tmp_path)


def test_a_header_longer_than_headers_may_be_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / WEIGHTS_FILE).open("wb") as file:
        file.write(struct.pack("<Q", 200_000_000))
        file.truncate(300_000_000)
    with pytest.raises(InvalidInput):
        Checkpoint.of(tmp_path)
