"""Preparing small hand-made models: batches, shapes, captured values, odd forms of weights."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from catenary_agent.executors.device import Device
from catenary_agent.executors.loading import load_executor
from catenary_agent.partitioning import jailed
from catenary_agent.partitioning.onnx_graph import load_onnx
from catenary_agent.partitioning.parts import PartName, part_folder
from catenary_agent.preparing import cutting, prepare
from catenary_agent.preparing.prepare import prepare_model
from catenary_services.domain.ids import ModelKey, PartitionKey
from catenary_services.domain.model import ModelManifest
from catenary_services.errors import ContentMismatch, InvalidInput
from catenary_services.jail.run import run_jailed
from catenary_services.models.model_repository import ModelRepository
from small_models.jail_here import run_here

KEY = ModelKey("small", "1")
PART = PartName("0" * 64, "1" * 64, "test")
FLOAT = TensorProto.FLOAT


@pytest.fixture(autouse=True)
def _blocks_of_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutting, "SMALLEST_BLOCK_NS", 1.0)


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (jailed, prepare):
        monkeypatch.setattr(module, "run_jailed", run_here)


def repository_of(
    folder: Path,
    nodes: Sequence[onnx.NodeProto],
    shape: list[object],
    weights: dict[str, np.ndarray] | None = None,
) -> ModelRepository:
    """A repository with a model from "x" to "y"."""
    graph = helper.make_graph(
        list(nodes),
        "g",
        [helper.make_tensor_value_info("x", FLOAT, shape)],
        [helper.make_tensor_value_info("y", FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in (weights or {}).items()],
    )
    model = helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])
    repository = ModelRepository(folder)
    repository.write_manifest(ModelManifest(KEY, "onnxruntime_onnx", "model.onnx", 10**9, 4, True))
    onnx.save(model, repository.model_file(KEY))
    return repository


def check_every_cut(repository: ModelRepository, value: np.ndarray) -> None:
    blocks = repository.block_table(KEY).blocks
    assert blocks > 1
    expected = part(repository, 0, blocks).run([value])[0]
    for cut in range(1, blocks):
        middle = part(repository, 0, cut).run([value])
        np.testing.assert_array_equal(part(repository, cut, blocks).run(middle)[0], expected)


def visible(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if not path.name.startswith(".")]


def part(repository: ModelRepository, first: int, last: int):  # type: ignore[no-untyped-def]
    return load_executor(
        repository,
        PartitionKey(KEY, first, last),
        device=Device.parse("cpu"),
        float16_boundaries=False,
    )


def relus(count: int, first: str = "x", last: str = "y") -> list[onnx.NodeProto]:
    names = [first, *(f"h{i}" for i in range(count - 1)), last]
    return [helper.make_node("Softsign", [a], [b]) for a, b in pairwise(names)]


def test_the_jail_prepares_and_cuts_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = repository_of(tmp_path / "here", relus(6), ["n", 8])
    table = prepare_model(here, KEY, blocks=1)
    for module in (jailed, prepare):
        monkeypatch.setattr(module, "run_jailed", run_jailed)
    there = repository_of(tmp_path / "there", relus(6), ["n", 8])
    of_jail = prepare_model(there, KEY, blocks=1)
    assert replace(of_jail, compute_ns=table.compute_ns) == table
    value = np.random.default_rng(0).random((5, 8), np.float32)
    expected = part(here, 0, 1).run([value])[0]
    np.testing.assert_array_equal(part(there, 0, 1).run([value])[0], expected)
    written = [next(visible(r.folder(KEY) / ".parts")[0].glob("*.onnx")) for r in (here, there)]
    assert written[0].read_bytes() == written[1].read_bytes()


def test_rows_of_the_input_make_a_model_batched(tmp_path: Path) -> None:
    repository = repository_of(tmp_path, relus(6), ["n", 8])
    table = prepare_model(repository, KEY, blocks=3)
    assert table.batched
    assert all(b.tensors[0].shape == (-1, 8) and b.row_bytes == 32 for b in table.boundaries)
    check_every_cut(repository, np.random.default_rng(0).random((5, 8), np.float32))


def test_a_free_dimension_0_that_is_mixed_is_not_a_batch(tmp_path: Path) -> None:
    nodes = [helper.make_node("Softmax", ["x"], ["s"], axis=0), *relus(5, "s")]
    table = prepare_model(repository_of(tmp_path, nodes, ["time", 8]), KEY, blocks=3)
    assert not table.batched


def test_a_fixed_dimension_0_is_not_a_batch(tmp_path: Path) -> None:
    table = prepare_model(repository_of(tmp_path, relus(5), [1, 8]), KEY, blocks=3)
    assert not table.batched
    assert table.boundaries[0].tensors[0].shape == (1, 8)


def test_cuts_of_a_batched_model_send_only_batched_tensors(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        *relus(4, "x", "z"),
        helper.make_node("Reshape", ["z", "shape"], ["r"]),
        helper.make_node("Softsign", ["r"], ["y"]),
    ]
    repository = repository_of(tmp_path, nodes, ["n", 4, 2])
    table = prepare_model(repository, KEY, blocks=6)
    assert table.batched
    assert {t.datatype for b in table.boundaries for t in b.tensors} == {"FP32"}
    check_every_cut(repository, np.ones((3, 4, 2), np.float32))


def test_height_and_width_stay_free(tmp_path: Path) -> None:
    nodes = [
        *relus(3, "x", "a"),
        helper.make_node("MaxPool", ["a"], ["b"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Softsign", ["b"], ["y"]),
    ]
    repository = repository_of(tmp_path, nodes, ["n", 3, "h", "w"])
    table = prepare_model(repository, KEY, blocks=4)
    assert table.boundaries[-1].tensors[0].shape == (-1, 3, -1, -1)
    check_every_cut(repository, np.random.default_rng(0).random((2, 3, 10, 34), np.float32))


def test_a_value_captured_by_a_branch_crosses_the_cut(tmp_path: Path) -> None:
    def branch(name: str, kind: str) -> onnx.GraphProto:
        out = helper.make_tensor_value_info(f"{name}_out", FLOAT, None)
        return helper.make_graph(
            [helper.make_node(kind, ["early", "late"], [f"{name}_out"])], name, [], [out]
        )

    nodes = [
        helper.make_node("Abs", ["x"], ["early"]),
        *relus(4, "early", "late"),
        helper.make_node("ReduceSum", ["late"], ["sum"], keepdims=0),
        helper.make_node("Greater", ["sum", "zero"], ["positive"]),
        helper.make_node(
            "If",
            ["positive"],
            ["c"],
            then_branch=branch("t", "Add"),
            else_branch=branch("e", "Sub"),
        ),
        helper.make_node("Softsign", ["c"], ["y"]),
    ]
    repository = repository_of(tmp_path, nodes, [2, 3], {"zero": np.array(0, np.float32)})
    table = prepare_model(repository, KEY, blocks=6)
    assert any({"early"} < {t.name for t in b.tensors} for b in table.boundaries)
    check_every_cut(repository, np.random.default_rng(0).random((2, 3), np.float32))


def test_a_value_without_dimensions_keeps_none_on_its_way(tmp_path: Path) -> None:
    repository = repository_of(tmp_path, relus(4), [])
    table = prepare_model(repository, KEY, blocks=4)
    assert {t.shape for b in table.boundaries for t in b.tensors} == {()}
    assert part(repository, 0, 1).run([np.array(0.5, np.float32)])[0].shape == ()
    check_every_cut(repository, np.array(0.5, np.float32))


def test_a_convolution_stays_with_its_activation(tmp_path: Path) -> None:
    nodes, last = [], "x"
    for i in range(4):
        nodes.append(helper.make_node("Conv", [last, "w"], [f"c{i}"], pads=[1, 1, 1, 1]))
        last = f"r{i}" if i < 3 else "y"
        nodes.append(helper.make_node("Relu", [f"c{i}"], [last]))
    weights = {"w": np.ones((3, 3, 3, 3), np.float32) / 27}
    table = prepare_model(repository_of(tmp_path, nodes, ["n", 3, 8, 8], weights), KEY, blocks=8)
    assert [b.tensors[0].name for b in table.boundaries] == ["x", "r0", "r1", "r2", "y"]


def test_weights_listed_as_inputs_are_no_inputs() -> None:
    folder = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
    model = load_onnx(folder / "light_squeezenet.onnx")
    assert onnx.load(folder / "light_squeezenet.onnx").ir_version == 3
    assert model.inputs == ("data_0",)
    assert "ConstantOfShape" not in {node.op_type for node in model.data_nodes}


def test_a_table_of_another_model_file_is_refused(tmp_path: Path) -> None:
    repository = repository_of(tmp_path, relus(4), ["n", 8])
    prepare_model(repository, KEY, blocks=2)
    repository_of(tmp_path, relus(5), ["n", 8])
    with pytest.raises(ContentMismatch, match=r"small:1/model\.onnx on .* size"):
        part(repository, 0, 1)
    (repository.folder(KEY) / "content.json").unlink()
    with pytest.raises(InvalidInput, match="model_hash"):
        part(repository, 0, 1)


def test_what_is_not_a_model_is_refused(tmp_path: Path) -> None:
    repository = repository_of(tmp_path, relus(4), ["n", 8])
    repository.model_file(KEY).write_bytes(b"not a model")
    with pytest.raises(InvalidInput, match=r"model\.onnx"):
        prepare_model(repository, KEY)


def test_parts_are_extracted_once_and_loaded_without_the_model(tmp_path: Path) -> None:
    repository = repository_of(tmp_path, relus(4), ["n", 8])
    prepare_model(repository, KEY, blocks=2)
    part(repository, 0, 1)
    cached = visible(repository.folder(KEY) / ".parts")
    assert len(cached) == 1
    stamp = (cached[0] / "part.onnx").stat().st_mtime_ns
    part(repository, 0, 1)
    assert (cached[0] / "part.onnx").stat().st_mtime_ns == stamp


def test_two_writers_of_one_part_build_it_once(tmp_path: Path) -> None:
    built: list[Path] = []
    seen = []
    both = threading.Barrier(2, timeout=10)

    def build(folder: Path) -> None:
        built.append(folder)
        (folder / "part").write_text("whole")

    def write() -> None:
        both.wait()
        with part_folder(tmp_path / "cache", PART, build) as folder:
            seen.append((folder / "part").read_text())

    threads = [threading.Thread(target=write) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert seen == ["whole", "whole"]
    assert len(built) == 1
    assert [path.name for path in visible(tmp_path / "cache")] == [PART.folder]


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    made: list[Path] = []
    with part_folder(tmp_path / "file" / "cache", PART, made.append) as folder:
        assert folder == made[0]
        assert folder.is_dir()
    assert not made[0].exists()


def test_a_failed_extraction_leaves_nothing_behind(tmp_path: Path) -> None:
    def build(folder: Path) -> None:
        (folder / "half").touch()
        raise InvalidInput("x", "no")

    with pytest.raises(InvalidInput), part_folder(tmp_path, PART, build):
        pass
    assert visible(tmp_path) == []
    assert not list(tmp_path.rglob("half"))
