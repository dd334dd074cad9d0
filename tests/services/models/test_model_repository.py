from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from catenary_services.domain.ids import ModelKey
from catenary_services.domain.latency import TokenObjectives
from catenary_services.domain.model import BlockTable, Boundary, ModelManifest, TokenUnits
from catenary_services.domain.tensors import TensorSpec
from catenary_services.errors import InvalidInput, ModelNotFound
from catenary_services.models.block_document import document_of_table, table_of_document
from catenary_services.models.model_repository import ModelRepository

KEY = ModelKey("net", "1")
MS = 1_000_000


def manifest(key: ModelKey = KEY, **changes: object) -> ModelManifest:
    fields: dict[str, object] = {
        "key": key,
        "platform": "onnxruntime_onnx",
        "file": "model.onnx",
        "slo_ns": 250_000_000,
        "max_batch": 8,
        "float16_boundaries": False,
    }
    return ModelManifest(**{**fields, **changes})  # type: ignore[arg-type]


def table(model_hash: str = "00") -> BlockTable:
    ends = [
        Boundary((TensorSpec("x", "FP32", (-1, 3, -1)),), 24),
        Boundary((TensorSpec("a", "FP32", (-1, 4)), TensorSpec("b", "INT64", (-1,))), 24),
        Boundary((TensorSpec("y", "FP32", (-1, 10)),), 40),
    ]
    return BlockTable(model_hash, True, tuple(ends), (100, 200))


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    repository = ModelRepository(tmp_path)
    repository.write_manifest(manifest())
    repository.write_block_table(KEY, table())
    assert repository.manifest(KEY) == manifest()
    assert repository.block_table(KEY) == table()
    assert repository.list() == [KEY]


def test_objectives_of_text_are_read_back_each_by_itself(tmp_path: Path) -> None:
    repository = ModelRepository(tmp_path)
    for objectives in (None, TokenObjectives(800 * MS, 80_500_000), TokenObjectives(0, 30 * MS)):
        written = manifest(platform="decoder", objectives=objectives)
        repository.write_manifest(written)
        assert repository.manifest(KEY) == written


@pytest.mark.parametrize(
    ("platform", "line", "field"),
    [
        ("decoder", "time_to_first_token_slo_ms: 0", "time_to_first_token_slo_ms"),
        ("decoder", "time_per_output_token_slo_ms: fast", "time_per_output_token_slo_ms"),
        ("decoder", "time_per_output_token_slo_ms: .inf", "time_per_output_token_slo_ms"),
        ("onnxruntime_onnx", "time_to_first_token_slo_ms: 9", "time_to_first_token_slo_ms"),
    ],
)
def test_wrong_objectives_are_named(tmp_path: Path, platform: str, line: str, field: str) -> None:
    repository = ModelRepository(tmp_path)
    repository.write_manifest(manifest(platform=platform))
    file = repository.folder(KEY) / "model.yaml"
    file.write_text(file.read_text() + line + "\n")
    with pytest.raises(InvalidInput) as raised:
        repository.manifest(KEY)
    assert raised.value.field == f"net:1/model.yaml.{field}"


def test_example_shapes_fill_in_free_sizes(tmp_path: Path) -> None:
    repository = ModelRepository(tmp_path)
    repository.write_manifest(manifest())
    repository.write_block_table(KEY, table())
    assert repository.example_shapes(KEY)[0] == ((1, 3, 1),)
    examples = (((1, 3, 7),), ((1, 4), (1,)), ((1, 10),))
    repository.write_block_table(KEY, table(), examples)
    assert repository.example_shapes(KEY) == examples
    assert repository.block_table(KEY) == table()


def test_versions_are_ordered_as_numbers_and_the_highest_is_the_default(tmp_path: Path) -> None:
    repository = ModelRepository(tmp_path)
    for version in ("10", "9", "1"):
        repository.write_manifest(manifest(ModelKey("net", version)))
    assert [key.version for key in repository.list()] == ["1", "9", "10"]
    assert repository.resolve("net") == ModelKey("net", "10")
    assert repository.resolve("net:9") == ModelKey("net", "9")
    for absent in ("net:2", "other"):
        with pytest.raises(ModelNotFound):
            repository.resolve(absent)


def test_a_table_is_refused_when_the_model_file_is_another(tmp_path: Path) -> None:
    repository = ModelRepository(tmp_path)
    repository.write_manifest(manifest())
    repository.model_file(KEY).write_bytes(b"weights")
    repository.write_block_table(KEY, table(hashlib.sha256(b"weights").hexdigest()))
    repository.block_table(KEY)
    repository.model_file(KEY).write_bytes(b"other weights")
    with pytest.raises(InvalidInput, match="another model file"):
        repository.block_table(KEY)


def test_a_table_without_a_model_file_is_taken(tmp_path: Path) -> None:
    repository = ModelRepository(tmp_path)
    repository.write_manifest(manifest())
    repository.write_block_table(KEY, table("hash of a file that is elsewhere"))
    assert repository.block_table(KEY).blocks == 2


@pytest.mark.parametrize("name", ["..", "a/b", "", ".hidden", "a\\b", "n\0"])
def test_names_cannot_leave_the_root(tmp_path: Path, name: str) -> None:
    for key in (ModelKey(name, "1"), ModelKey("net", name)):
        with pytest.raises(InvalidInput):
            ModelRepository(tmp_path).manifest(key)


@pytest.mark.parametrize("file", ["../../../etc/passwd", "/etc/passwd", ""])
def test_a_model_file_cannot_be_outside(tmp_path: Path, file: str) -> None:
    repository = ModelRepository(tmp_path)
    with pytest.raises(InvalidInput, match="file"):
        repository.write_manifest(manifest(file=file))
    repository.write_manifest(manifest())
    path = repository.folder(KEY) / "model.yaml"
    path.write_text(path.read_text().replace("model.onnx", json.dumps(file)))
    with pytest.raises(InvalidInput, match="file"):
        repository.model_file(KEY)


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("- a", "model.yaml"),
        ("a: [", "model.yaml"),
        ("file: m\nplatform: onnx", "platform"),
        ("platform: onnxruntime_onnx", "file"),
        ("file: m\nplatform: onnxruntime_onnx\nslo_ms: -1", "slo_ms"),
        ("file: m\nplatform: onnxruntime_onnx\nmax_batch: true", "max_batch"),
        ("file: m\nplatform: onnxruntime_onnx\nsol_ms: 5", "sol_ms"),
        ("file: m\nplatform: onnxruntime_onnx\nfloat16_boundaries: 1", "float16_boundaries"),
    ],
)
def test_a_bad_manifest_names_the_key(tmp_path: Path, text: str, field: str) -> None:
    folder = tmp_path / "net" / "1"
    folder.mkdir(parents=True)
    (folder / "model.yaml").write_text(text)
    with pytest.raises(InvalidInput) as caught:
        ModelRepository(tmp_path).manifest(KEY)
    assert caught.value.field.endswith(field)


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        (("version",), 2, "version"),
        (("version",), True, "version"),
        (("compute_ns",), [1], "compute_ns"),
        (("compute_ns", 0), -5, "compute_ns[0]"),
        (("boundaries", 1, "tensors", 0, "datatype"), "BF16", "tensors[0].datatype"),
        (("boundaries", 1, "tensors", 1, "shape"), [-2], "tensors[1].shape[0]"),
        (("boundaries", 0, "tensors"), [], "boundaries[0].tensors"),
        (("boundaries", 2, "row_bytes"), "40", "boundaries[2].row_bytes"),
        (("batched",), 1, "batched"),
    ],
)
def test_a_bad_table_names_the_key(path: tuple[str | int, ...], value: object, field: str) -> None:
    document = document_of_table(table())
    assert table_of_document(document) == table()
    place = document
    for step in path[:-1]:
        place = place[step]  # type: ignore[index]
    place[path[-1]] = value  # type: ignore[index]
    with pytest.raises(InvalidInput) as caught:
        table_of_document(document)
    assert caught.value.field.endswith(field)


def test_a_table_of_units_is_of_a_version_that_earlier_releases_refuse() -> None:
    texts = replace(table(), units=TokenUnits(16, 64))
    document = document_of_table(texts)
    assert table_of_document(document) == texts
    assert (document["version"], document["units"]) == (2, {"tokens": 16, "text_tokens": 64})
    assert "units" not in document_of_table(table())
    with pytest.raises(InvalidInput, match="version: is 1"):
        table_of_document(document | {"version": 1})
    with pytest.raises(InvalidInput, match=r"units\.tokens"):
        table_of_document(document | {"units": {"tokens": 0, "text_tokens": 64}})
    with pytest.raises(InvalidInput, match="units: is only for models that are batched"):
        table_of_document(document | {"batched": False})


def test_missing_things_are_not_found(tmp_path: Path) -> None:
    repository = ModelRepository(tmp_path / "nowhere")
    assert repository.list() == []
    with pytest.raises(ModelNotFound):
        repository.manifest(KEY)
    with pytest.raises(ModelNotFound):
        repository.block_table(KEY)
