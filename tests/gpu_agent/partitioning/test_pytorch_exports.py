"""ONNX files as PyTorch's exporter writes them unless told otherwise, made in the test."""

from __future__ import annotations

import itertools
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from catenary_agent.executors.device import Device
from catenary_agent.executors.loading import load_executor
from catenary_agent.partitioning import jailed
from catenary_agent.preparing import cutting, prepare
from catenary_agent.preparing.prepare import prepare_model
from catenary_services.domain.ids import ModelKey, PartitionKey
from catenary_services.domain.model import BlockTable, ModelManifest
from catenary_services.domain.tensors import ANY
from catenary_services.errors import CatenaryError, InvalidInput, NotSupported
from catenary_services.models.model_repository import ModelRepository
from small_models.jail_here import run_here

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("onnxscript", reason="PyTorch exports to ONNX with it")
nn: Any = torch.nn

KEY = ModelKey("net", "1")
FLOAT = TensorProto.FLOAT
Arrays = Mapping[str, np.ndarray]


@pytest.fixture(autouse=True)
def _blocks_of_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutting, "SMALLEST_BLOCK_NS", 1.0)


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spares a process of the jail for each part; the jail has tests of its own."""
    for module in (jailed, prepare):
        monkeypatch.setattr(module, "run_jailed", run_here)


class Pictures(nn.Module):  # type: ignore[misc]
    """A convolution network on pictures whose channels come last, with two outputs."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 16, 32, 32)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.SiLU())
            for a, b in itertools.pairwise(widths)
        )
        self.head = nn.Linear(32, 10)

    def forward(self, pictures: Any) -> Any:
        x = pictures.permute(0, 3, 1, 2)
        for layer in self.layers:
            x = layer(x)
        features = x.mean((2, 3))
        return self.head(features), features


class Pairs(nn.Module):  # type: ignore[misc]
    """Attention over sequences of any length, with a mask as the second input."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 32)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 4, 64, batch_first=True) for _ in range(2)
        )

    def forward(self, ids: Any, mask: Any) -> Any:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=mask == 0)
        return x


def repository_of(folder: Path, **facts: Any) -> ModelRepository:
    repository = ModelRepository(folder)
    manifest = ModelManifest(KEY, "onnxruntime_onnx", "model.onnx", 10**9, 8, False, **facts)
    repository.write_manifest(manifest)
    return repository


def export(
    repository: ModelRepository, module: Any, arguments: Sequence[Any], **options: Any
) -> Path:
    """Exports a module with PyTorch's own defaults for all that `options` do not name."""
    torch.manual_seed(0)
    file = repository.model_file(KEY)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module.eval(), tuple(arguments), str(file), dynamo=True, verbose=False, **options
        )
    return file


def whole(file: Path, inputs: Arrays) -> list[np.ndarray]:
    """What ONNX Runtime itself makes of the file as it is."""
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    return list(session.run(None, dict(inputs)))


def parts(repository: ModelRepository, cuts: Sequence[int], inputs: Arrays) -> list[np.ndarray]:
    """What parts between the cuts make of it, one after the other."""
    table = repository.block_table(KEY)
    values = [inputs[tensor.name] for tensor in table.boundaries[0].tensors]
    for first, last in itertools.pairwise([0, *cuts, table.blocks]):
        executor = load_executor(
            repository,
            PartitionKey(KEY, first, last),
            device=Device.parse("cpu"),
            float16_boundaries=False,
        )
        values = executor.run(values)
        executor.close()
    return values


def assert_same_at_every_cut(
    repository: ModelRepository, inputs: Arrays, *, least_blocks: int = 3
) -> BlockTable:
    table = repository.block_table(KEY)
    assert table.blocks >= least_blocks
    expected = whole(repository.model_file(KEY), inputs)
    assert all(np.abs(each).max() > 0 for each in expected)
    for cuts in [(cut,) for cut in range(1, table.blocks)] + [tuple(range(1, table.blocks))]:
        found = parts(repository, cuts, inputs)
        assert len(found) == len(expected)
        for mine, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)
    return table


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


@pytest.mark.usefixtures("in_this_process")
def test_without_dynamic_shapes_a_request_has_the_exported_ones(tmp_path: Path) -> None:
    repository = repository_of(tmp_path)
    export(repository, Pictures(), (torch.zeros(2, 32, 32, 3),))
    prepare_model(repository, KEY, blocks=4)
    table = assert_same_at_every_cut(repository, pictures(2))
    assert not table.batched
    assert table.boundaries[0].tensors[0].shape == (2, 32, 32, 3)


FREE = ({0: "batch", 1: "length"}, {0: "batch", 1: "length"})


@pytest.mark.usefixtures("in_this_process")
def test_sizes_that_are_free_stay_free(tmp_path: Path) -> None:
    repository = repository_of(tmp_path)
    example = torch.ones(2, 6, dtype=torch.int64)
    export(repository, Pairs(), (example, example), dynamic_shapes=FREE)
    table = prepare_model(repository, KEY, blocks=4)
    assert table.batched
    assert table.boundaries[0].tensors[0].shape == (ANY, ANY)
    assert_same_at_every_cut(repository, tokens(3, 9))
    assert_same_at_every_cut(repository, tokens(1, 5))


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


def branching(repository: ModelRepository) -> None:
    """Writes a model whose branches have weights of their own, in a file beside the graph."""
    random = np.random.default_rng(3)

    def branch(name: str) -> onnx.GraphProto:
        weight = numpy_helper.from_array(random.normal(size=(8, 8)).astype(np.float32), f"w_{name}")
        out = helper.make_tensor_value_info(f"{name}_out", FLOAT, None)
        node = helper.make_node("MatMul", ["h", f"w_{name}"], [f"{name}_out"])
        return helper.make_graph([node], name, [], [out], [weight])

    nodes = [
        helper.make_node("Softsign", ["x"], ["h"]),
        helper.make_node("ReduceSum", ["h"], ["sum"], keepdims=0),
        helper.make_node("Greater", ["sum", "zero"], ["positive"]),
        helper.make_node(
            "If", ["positive"], ["c"], then_branch=branch("a"), else_branch=branch("b")
        ),
        helper.make_node("Softsign", ["c"], ["y"]),
    ]
    made(repository, nodes, [numpy_helper.from_array(np.array(0, np.float32), "zero")])
    file = repository.model_file(KEY)
    model = onnx.load(file)
    onnx.save(model, file, save_as_external_data=True, location="w.data", size_threshold=0)


@pytest.mark.usefixtures("in_this_process")
def test_branches_have_their_weights_beside_the_graph(tmp_path: Path) -> None:
    repository = repository_of(tmp_path)
    branching(repository)
    prepare_model(repository, KEY, blocks=4)
    value = np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32)
    assert_same_at_every_cut(repository, {"x": value})
    assert_same_at_every_cut(repository, {"x": -value})


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
        weight.data_location = TensorProto.EXTERNAL
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


def made(
    repository: ModelRepository,
    nodes: Sequence[onnx.NodeProto],
    weights: Sequence[onnx.TensorProto] = (),
    functions: Sequence[onnx.FunctionProto] = (),
    opsets: Mapping[str, int] | None = None,
    shape: Sequence[object] = ("n", 8),
) -> None:
    """Writes a model from "x" to "y" by hand."""
    x = helper.make_tensor_value_info("x", FLOAT, shape)
    y = helper.make_tensor_value_info("y", FLOAT, None)
    graph = helper.make_graph(list(nodes), "g", [x], [y], list(weights))
    domains = {"": 18} | dict(opsets or {})
    model = helper.make_model(
        graph,
        functions=list(functions),
        ir_version=10,
        opset_imports=[helper.make_opsetid(name, version) for name, version in domains.items()],
    )
    onnx.save(model, repository.model_file(KEY))


def function(name: str, body: Sequence[onnx.NodeProto], **domains: int) -> onnx.FunctionProto:
    opsets = [
        helper.make_opsetid("" if domain == "main" else domain, version)
        for domain, version in domains.items()
    ]
    return helper.make_function("own", name, ["a"], ["b"], list(body), opsets)


@pytest.mark.usefixtures("in_this_process")
def test_local_functions_and_operators_of_several_domains_are_served(tmp_path: Path) -> None:
    repository = repository_of(tmp_path)
    inner = function("Softer", [helper.make_node("Softsign", ["a"], ["b"])], main=18)
    outer = function(
        "Twice",
        [
            helper.make_node("Softer", ["a"], ["c"], domain="own"),
            helper.make_node("Softer", ["c"], ["b"], domain="own"),
        ],
        main=18,
        own=1,
    )
    made(
        repository,
        [
            helper.make_node("Twice", ["x"], ["h0"], domain="own"),
            helper.make_node("Gelu", ["h0"], ["h1"], domain="com.microsoft"),
            helper.make_node("Normalizer", ["h1"], ["h2"], domain="ai.onnx.ml", norm="L2"),
            helper.make_node("Twice", ["h2"], ["y"], domain="own"),
        ],
        functions=[inner, outer],
        opsets={"own": 1, "com.microsoft": 1, "ai.onnx.ml": 3},
    )
    prepare_model(repository, KEY, blocks=6)
    value = np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32)
    assert_same_at_every_cut(repository, {"x": value})


@pytest.mark.usefixtures("in_this_process")
def test_a_value_of_a_type_without_arrays_is_never_sent(tmp_path: Path) -> None:
    repository = repository_of(tmp_path)
    made(
        repository,
        [
            helper.make_node("Softsign", ["x"], ["h0"]),
            helper.make_node("Cast", ["h0"], ["h1"], to=TensorProto.BFLOAT16),
            helper.make_node("Cast", ["h1"], ["h2"], to=TensorProto.FLOAT),
            helper.make_node("Softsign", ["h2"], ["y"]),
        ],
    )
    table = prepare_model(repository, KEY, blocks=4)
    assert "h1" not in {tensor.name for end in table.boundaries for tensor in end.tensors}
    value = np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32)
    assert_same_at_every_cut(repository, {"x": value}, least_blocks=2)


def unknown_operator(repository: ModelRepository) -> None:
    node = helper.make_node("Mystery", ["x"], ["y"], domain="com.example", name="the_odd_one")
    made(repository, [node], opsets={"com.example": 1})


def unknown_standard_operator(repository: ModelRepository) -> None:
    made(repository, [helper.make_node("Mystery", ["x"], ["y"], name="the_odd_one")])


def wrong_attribute(repository: ModelRepository) -> None:
    node = helper.make_node("Concat", ["x", "x"], ["y"], name="the_odd_one", axis=7)
    made(repository, [node])


def function_of_another_opset(repository: ModelRepository) -> None:
    body = [helper.make_node("Softsign", ["a"], ["b"])]
    call = helper.make_node("Older", ["x"], ["y"], domain="own", name="the_odd_one")
    made(repository, [call], functions=[function("Older", body, main=13)], opsets={"own": 1})


def function_that_calls_itself(repository: ModelRepository) -> None:
    body = [helper.make_node("Endless", ["a"], ["b"], domain="own")]
    call = helper.make_node("Endless", ["x"], ["y"], domain="own", name="the_odd_one")
    endless = function("Endless", body, main=18, own=1)
    made(repository, [call], functions=[endless], opsets={"own": 1})


def a_name_used_twice(repository: ModelRepository) -> None:
    # PyTorch writes this where a name in `output_names` is that of a value inside.
    nodes = [
        helper.make_node("Softsign", ["x"], ["y"], name="first"),
        helper.make_node("Softsign", ["y"], ["y"], name="the_odd_one"),
    ]
    made(repository, nodes)


def a_hard_link(repository: ModelRepository) -> None:
    weight = numpy_helper.from_array(np.ones(8, np.float32), "w")
    made(repository, [helper.make_node("Add", ["x", "w"], ["y"])], [weight])
    file = repository.model_file(KEY)
    model = onnx.load(file)
    onnx.save(model, file, save_as_external_data=True, location="w.data", size_threshold=0)
    file.with_name("other").hardlink_to(file.with_name("w.data"))


def weights_of_a_hidden_file(repository: ModelRepository) -> None:
    weight = numpy_helper.from_array(np.ones(8, np.float32), "w")
    made(repository, [helper.make_node("Add", ["x", "w"], ["y"])], [weight])
    file = repository.model_file(KEY)
    model = onnx.load(file)
    onnx.save(model, file, save_as_external_data=True, location=".w", size_threshold=0)


def future_opset(repository: ModelRepository) -> None:
    made(repository, [helper.make_node("Softsign", ["x"], ["y"])], opsets={"": 400})


def weights_cut_short(repository: ModelRepository) -> None:
    weight = numpy_helper.from_array(np.ones(8, np.float32), "w")
    node = helper.make_node("Add", ["x", "w"], ["y"])
    made(repository, [node], [weight])
    model = onnx.load(repository.model_file(KEY))
    file = repository.model_file(KEY)
    onnx.save(model, file, save_as_external_data=True, location="w.data", size_threshold=0)
    file.with_name("w.data").write_bytes(b"12345678")


def a_sequence_as_input(repository: ModelRepository) -> None:
    made(repository, [helper.make_node("SequenceAt", ["x", "i"], ["y"])])
    model = onnx.load(repository.model_file(KEY))
    model.graph.input[0].CopyFrom(helper.make_tensor_sequence_value_info("x", FLOAT, ["n"]))
    model.graph.initializer.append(numpy_helper.from_array(np.array(0), "i"))
    onnx.save(model, repository.model_file(KEY))


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (unknown_operator, r"com\.example::Mystery.*the_odd_one"),
        (unknown_standard_operator, r"the_odd_one \(Mystery\)"),
        (wrong_attribute, r"the_odd_one \(Concat\)"),
        (function_of_another_opset, r"Older"),
        (function_that_calls_itself, r"Endless"),
        (future_opset, r"400"),
        (a_name_used_twice, r"'y' is redeclared .*the_odd_one"),
        (a_hard_link, r"'w\.data', which is a hard link"),
        (weights_of_a_hidden_file, r"'\.w', but files of such names are not recorded"),
        (weights_cut_short, r"'w\.data', which ends before 'w' does"),
        (a_sequence_as_input, r"'x'"),
    ],
)
def test_what_cannot_be_served_is_refused_with_a_sentence(
    tmp_path: Path, spoil: Callable[[ModelRepository], None], said: str
) -> None:
    repository = repository_of(tmp_path)
    spoil(repository)
    with pytest.raises(CatenaryError, match=said) as refused:
        prepare_model(repository, KEY)
    assert isinstance(refused.value, InvalidInput | NotSupported)
    assert "\n" not in refused.value.message
    assert "block_node" not in refused.value.message
