"""Real model structures: the onnx wheel's light models (given weights here) and rapidocr's."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from catenary_agent.preparing.prepare import prepare_model
from catenary_services.domain.ids import ModelKey
from catenary_services.domain.model import ModelManifest
from catenary_services.models.model_repository import ModelRepository

_PERIOD = 8191
"""A prime, so that the repeated weights line up with no channel."""
_BASE = np.random.default_rng(20).standard_normal(_PERIOD).astype(np.float32)


def _centre_and_spread(
    consumer: onnx.NodeProto, slot: int, shape: list[int]
) -> tuple[float, float]:
    """Scales that keep activations near one and variances positive."""
    kind = consumer.op_type
    if kind in ("Conv", "Gemm", "MatMul") and slot == 1:
        fan_in = int(np.prod(shape[1:]))
        return 0.0, float(np.sqrt((2.0 if kind == "Conv" else 0.3) / fan_in))
    if kind == "BatchNormalization":
        return {1: (0.8, 0.1), 2: (0.0, 0.1), 3: (0.0, 0.1), 4: (1.5, 0.1)}[slot]
    return {"Mul": (0.8, 0.1), "Div": (1.5, 0.1)}.get(kind, (0.0, 0.05))


def with_weights(path: Path) -> onnx.ModelProto:
    """Replaces every ConstantOfShape by constant arithmetic that makes pseudo-random weights.

    The file stays small, and the weights stay what exporters love to hide: constant subgraphs.
    """
    model = onnx.load(path)
    graph = model.graph
    shapes = {i.name: numpy_helper.to_array(i).tolist() for i in graph.initializer if i.dims}
    readers = {name: (node, i) for node in graph.node for i, name in enumerate(node.input)}
    nodes = []
    for node in graph.node:
        if node.op_type != "ConstantOfShape":
            nodes.append(node)
            continue
        name, shape = node.output[0], shapes[node.input[0]]
        reader, slot = readers[name]
        while reader.op_type in ("Unsqueeze", "Reshape", "Identity"):
            reader, slot = readers[reader.output[0]]
        centre, spread = _centre_and_spread(reader, slot, shape)
        size = int(np.prod(shape))
        start = sum(name.encode()) * 37 % _PERIOD
        base = np.roll(_BASE, start) * np.float32(spread) + np.float32(centre)
        if size <= _PERIOD:
            graph.initializer.append(numpy_helper.from_array(base[:size].reshape(shape), name))
            continue
        repeats = np.array([-(-size // _PERIOD)], np.int64)
        for part, array in (
            ("base", base),
            ("repeats", repeats),
            ("start", np.array([0], np.int64)),
            ("end", np.array([size], np.int64)),
            ("shape", np.array(shape, np.int64)),
        ):
            graph.initializer.append(numpy_helper.from_array(array, f"{name}/{part}"))
        nodes += [
            helper.make_node("Tile", [f"{name}/base", f"{name}/repeats"], [f"{name}/tiled"]),
            helper.make_node(
                "Slice", [f"{name}/tiled", f"{name}/start", f"{name}/end"], [f"{name}/cut"]
            ),
            helper.make_node("Reshape", [f"{name}/cut", f"{name}/shape"], [name]),
        ]
    del graph.node[:]
    graph.node.extend(nodes)
    model.ir_version = 8
    # Slice takes its bounds as inputs from opset 10 on; nothing else in these models changed.
    model.opset_import[0].version = max(10, model.opset_import[0].version)
    return model


@pytest.fixture(scope="session")
def real_model(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], tuple[ModelRepository, ModelKey]]:
    """Returns a function: name of a real model -> a repository that holds it, cut into blocks."""
    made: dict[str, tuple[ModelRepository, ModelKey]] = {}

    def make(name: str) -> tuple[ModelRepository, ModelKey]:
        if name not in made:
            repository = ModelRepository(tmp_path_factory.mktemp("models"))
            key = ModelKey(name.replace(" ", "-"), "1")
            manifest = ModelManifest(key, "onnxruntime_onnx", "model.onnx", 10**9, 4, True)
            repository.write_manifest(manifest)
            target = repository.model_file(key)
            if name.startswith("light_"):
                folder = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
                onnx.save(with_weights(folder / f"{name}.onnx"), target)
            else:
                rapidocr = pytest.importorskip("rapidocr", reason="the wheel holds the models")
                folder = Path(rapidocr.__file__).parent / "models"
                shutil.copy(folder / f"{name}.onnx", target)
            prepare_model(repository, key)
            made[name] = repository, key
        return made[name]

    return make
