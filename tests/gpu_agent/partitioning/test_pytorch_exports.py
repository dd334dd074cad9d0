"""ONNX files as PyTorch's exporter writes them unless told otherwise, made in the test."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from catenary_agent.partitioning import jailed
from catenary_agent.preparing import cutting, prepare
from catenary_agent.preparing.prepare import prepare_model
from catenary_services.domain.tensors import ANY
from catenary_services.errors import InvalidInput, NotSupported
from catenary_services.models.model_repository import ModelRepository
from compared_models.graphs import KEY, Arrays, assert_same_at_every_cut, parts, repository_of
from compared_models.onnx_files import FLOAT, bfloat16_inside, made
from small_models.jail_here import run_here

pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("onnxscript", reason="PyTorch exports to ONNX with it")

import torch

from compared_models.nets import Pairs, Pictures, export


@pytest.fixture(autouse=True)
def _blocks_of_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutting, "SMALLEST_BLOCK_NS", 1.0)


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spares a process of the jail for each part; the jail has tests of its own."""
    for module in (jailed, prepare):
        monkeypatch.setattr(module, "run_jailed", run_here)


def pictures(rows: int, size: int = 32) -> Arrays:
    values = np.random.default_rng(7).normal(size=(rows, size, size, 3))
    return {"pictures": values.astype(np.float32)}


def tokens(rows: int, length: int) -> Arrays:
    generator = np.random.default_rng(7)
    mask = np.arange(length)[None] < generator.integers(1, length + 1, (rows, 1))
    return {
        "ids": generator.integers(0, 100, (rows, length)),
        "mask": mask.astype(np.int64),
    }


def test_the_default_export_is_served_in_parts_from_the_jail(tmp_path: Path) -> None:
    repository = repository_of(tmp_path)
    export(repository, Pictures(), (torch.zeros(2, 32, 32, 3),), dynamic_shapes=({0: "batch"},))
    folder = repository.folder(KEY)
    assert (folder / "model.onnx.data").stat().st_size > 10_000, "weights are beside the graph"
    prepare_model(repository, KEY, blocks=4)
    record = repository.content(KEY)
    assert record is not None
    assert {"model.onnx", "model.onnx.data", "blocks.json", "model.yaml"} == record.files.keys()
    table = assert_same_at_every_cut(repository, pictures(3))
    assert table.batched
    assert [spec.name for spec in table.boundaries[0].tensors] == ["pictures"]
    assert table.boundaries[0].tensors[0].shape == (ANY, 32, 32, 3)
    assert len(table.boundaries[-1].tensors) == 2


FREE = ({0: "batch", 1: "length"}, {0: "batch", 1: "length"})


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("name", ["length", "by axis"])
def test_model_yaml_gives_free_sizes_a_value(tmp_path: Path, name: str) -> None:
    sizes = (("length", 12),) if name == "length" else (("ids[1]", 12), ("mask[1]", 12))
    repository = repository_of(tmp_path, dimensions=sizes)
    example = torch.ones(2, 6, dtype=torch.int64)
    export(repository, Pairs(), (example, example), dynamic_shapes=FREE)
    table = prepare_model(repository, KEY, blocks=4)
    assert table.boundaries[0].tensors[0].shape == (ANY, 12)
    assert table.boundaries[-1].tensors[0].shape == (ANY, 12, 32)
    assert_same_at_every_cut(repository, tokens(3, 12))


@pytest.mark.usefixtures("in_this_process")
def test_a_size_for_an_unknown_dimension_is_refused(tmp_path: Path) -> None:
    repository = repository_of(tmp_path, dimensions=(("width", 12),))
    example = torch.ones(2, 6, dtype=torch.int64)
    export(repository, Pairs(), (example, example), dynamic_shapes=FREE)
    with pytest.raises(
        InvalidInput, match=r"'width' is none .*: batch, ids\[0\], length, ids\[1\]"
    ):
        prepare_model(repository, KEY, blocks=4)


@pytest.mark.usefixtures("in_this_process")
def test_a_model_of_texts_has_answers_of_one_size(tmp_path: Path) -> None:
    repository = repository_of(tmp_path, text_tokens=16)
    example = torch.ones(2, 6, dtype=torch.int64)
    export(repository, Pairs(), (example, example), dynamic_shapes=FREE)
    with pytest.raises(NotSupported, match=r"text_tokens: the output .* has a size"):
        prepare_model(repository, KEY, blocks=4)


@pytest.mark.usefixtures("in_this_process")
def test_other_weights_beside_the_same_graph_are_another_model(tmp_path: Path) -> None:
    repository = repository_of(tmp_path)
    file = export(
        repository, Pictures(), (torch.zeros(2, 32, 32, 3),), dynamic_shapes=({0: "batch"},)
    )
    prepare_model(repository, KEY, blocks=4)
    before = assert_same_at_every_cut(repository, pictures(2))
    graph = file.read_bytes()
    data = file.with_name("model.onnx.data")
    weights = np.fromfile(data, np.float32) * np.float32(1.25)
    weights.tofile(data)
    repository.record_content(KEY)
    assert file.read_bytes() == graph
    again = ModelRepository(tmp_path)
    assert again.block_table(KEY) == before
    assert_same_at_every_cut(again, pictures(2))


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_more_weights_than_a_protobuf_can_have(tmp_path: Path) -> None:
    size, layers = 13_500, 3
    repository = repository_of(tmp_path)
    names = ["x", "h1", "h2", "y"]
    nodes = [
        node
        for at in range(layers)
        for node in (
            helper.make_node("MatMul", [names[at], f"w{at}"], [f"m{at}"]),
            helper.make_node("Add", [f"m{at}", names[at]], [names[at + 1]]),
        )
    ]
    each = 4 * size * size
    weights = []
    for at in range(layers):
        weight = onnx.TensorProto(name=f"w{at}", data_type=FLOAT, dims=[size, size])
        weight.data_location = onnx.TensorProto.EXTERNAL
        for key, value in (("location", "w.data"), ("offset", at * each), ("length", each)):
            weight.external_data.add(key=key, value=str(value))
        weights.append(weight)
    made(repository, nodes, weights, shape=("n", size))
    with repository.model_file(KEY).with_name("w.data").open("wb") as data:
        data.truncate(layers * each)
        for at in range(layers):  # the rest is a hole, which is read as zeros
            data.seek(at * each)
            data.write(np.full(size, at + 1, np.float32).tobytes())
    assert layers * each > 2**31
    prepare_model(repository, KEY, blocks=3)
    value = np.random.default_rng(0).normal(size=(2, size)).astype(np.float32)
    expected = value
    for at in range(layers):
        expected = expected + expected[:, :1] * np.float32(at + 1)
    (found,) = parts(repository, [1, 2], {"x": value})
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("in_this_process")
def test_a_value_of_a_type_without_arrays_is_never_sent(tmp_path: Path) -> None:
    repository = repository_of(tmp_path)
    bfloat16_inside(repository)
    table = prepare_model(repository, KEY, blocks=4)
    assert "h1" not in {tensor.name for end in table.boundaries for tensor in end.tensors}
