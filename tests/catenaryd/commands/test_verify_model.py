from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from catenary_services.domain.ids import ModelKey
from catenary_services.domain.model import ModelManifest
from catenary_services.models.model_repository import ModelRepository
from catenaryd.command_line import cli

KEY = ModelKey("net", "1")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    repository = ModelRepository(tmp_path)
    repository.write_manifest(ModelManifest(KEY, "onnxruntime_onnx", "model.onnx", 10**9, 1, True))
    repository.model_file(KEY).write_bytes(b"weights")
    return repository.folder(KEY)


def verify(folder: Path, *options: str) -> tuple[int, str]:
    root = str(folder.parent.parent)
    result = CliRunner().invoke(cli, ["verify-model", "net", "--model-repository", root, *options])
    return result.exit_code, result.output


def test_a_version_is_recorded_compared_and_recorded_anew(folder: Path) -> None:
    code, said = verify(folder, "--json")
    first = json.loads(said)
    assert (code, first["problems"], first["files"]) == (0, [], 2)
    (folder / "model.onnx").write_bytes(b"Weights")
    code, said = verify(folder)
    assert code == 1
    assert "net:1/model.onnx on" in said
    assert first["digest"] in said
    code, said = verify(folder, "--record", "--json")
    again = json.loads(said)
    assert (code, again["problems"]) == (0, [])
    assert again["digest"] != first["digest"]


def test_every_file_that_differs_is_named(folder: Path) -> None:
    verify(folder)
    (folder / "model.onnx").unlink()
    (folder / "model.yaml").write_text((folder / "model.yaml").read_text() + "# later\n")
    code, said = verify(folder)
    assert code == 1
    assert "net:1/model.onnx is missing" in said
    assert "net:1/model.yaml on" in said
