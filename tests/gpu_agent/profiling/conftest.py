"""Small real models, cut into blocks, in both runtimes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from catenary_agent.preparing import cutting, prepare
from catenary_services.domain.ids import ModelKey
from catenary_services.domain.model import ModelManifest
from catenary_services.models.model_repository import ModelRepository
from small_models.jail_here import run_here

ONNX, TORCH = ModelKey("small-onnx", "1"), ModelKey("small-torch", "1")
CHANNELS, SIZE, LAYERS = 24, 16, 4


def write_onnx(repository: ModelRepository) -> None:
    """Four 3x3 convolutions with Relu, then a matrix product."""
    manifest = ModelManifest(ONNX, "onnxruntime_onnx", "model.onnx", 10**9, 8, True)
    repository.write_manifest(manifest)
    generator = np.random.default_rng(0)
    weights, nodes, last, inner = [], [], "x", 3
    for i in range(LAYERS):
        array = generator.standard_normal((CHANNELS, inner, 3, 3)).astype(np.float32) / 9
        weights.append(numpy_helper.from_array(array, f"w{i}"))
        nodes.append(helper.make_node("Conv", [last, f"w{i}"], [f"c{i}"], pads=[1, 1, 1, 1]))
        nodes.append(helper.make_node("Relu", [f"c{i}"], [f"r{i}"]))
        last, inner = f"r{i}", CHANNELS
    matrix = generator.standard_normal((CHANNELS * SIZE * SIZE, 10)).astype(np.float32)
    weights.append(numpy_helper.from_array(matrix, "m"))
    nodes.append(helper.make_node("Flatten", [last], ["f"]))
    nodes.append(helper.make_node("MatMul", ["f", "m"], ["y"]))
    graph = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, SIZE, SIZE])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 10])],
        weights,
    )
    model = helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])
    onnx.save(model, repository.model_file(ONNX))


def write_torch(repository: ModelRepository) -> None:
    """The same layers as an exported program."""
    import torch

    manifest = ModelManifest(TORCH, "pytorch_exported", "model.pt2", 10**9, 8, True)
    repository.write_manifest(manifest)
    layers: list[torch.nn.Module] = []
    inner = 3
    for _ in range(LAYERS):
        layers += [torch.nn.Conv2d(inner, CHANNELS, 3, padding=1, bias=False), torch.nn.ReLU()]
        inner = CHANNELS
    layers += [torch.nn.Flatten(), torch.nn.Linear(CHANNELS * SIZE * SIZE, 10, bias=False)]
    program = torch.export.export(
        torch.nn.Sequential(*layers).eval(),
        (torch.zeros(2, 3, SIZE, SIZE),),
        dynamic_shapes=({0: torch.export.Dim("batch", min=1)},),
        strict=False,
    )
    torch.export.save(program, repository.model_file(TORCH))


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory) -> ModelRepository:
    """Holds both models, three blocks each."""
    made = ModelRepository(tmp_path_factory.mktemp("models"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cutting, "SMALLEST_BLOCK_NS", 1.0)
        patch.setattr(prepare, "run_jailed", run_here)
        for key, write in ((ONNX, write_onnx), (TORCH, write_torch)):
            write(made)
            prepare.prepare_model(made, key, blocks=3)
    return made


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """Where a profile goes."""
    return tmp_path / "profile.json"
