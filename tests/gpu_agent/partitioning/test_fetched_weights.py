"""Parts of an ONNX model with weights in a second file, of which only those of the part come."""

from __future__ import annotations

import asyncio
import hashlib
import warnings
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from catenary_agent.executors.device import Device
from catenary_agent.executors.loading import load_executor
from catenary_agent.preparing import cutting
from catenary_agent.preparing.prepare import prepare_model
from catenary_services.domain.ids import PartitionKey
from catenary_services.domain.model import BlockTable, Boundary, ModelManifest
from catenary_services.domain.tensors import ANY, TensorSpec
from catenary_services.models.model_repository import ModelRepository
from small_models.store_world import CHUNK, KEY, chunks_of_64_kib, store_world

SIZE = 256
BLOCKS = 4
DATA = "weights.data"
PER_BLOCK = SIZE * SIZE * 4 // CHUNK
"""Chunks of one block's weights."""


def write_model(root: Path) -> None:
    """Writes four products of matrices, a block each, with the matrices in a second file."""
    repository = ModelRepository(root)
    manifest = ModelManifest(KEY, "onnxruntime_onnx", "model.onnx", 10**9, 4, False)
    repository.write_manifest(manifest)
    random = np.random.default_rng(3)
    names = ["x", *(f"h{index}" for index in range(1, BLOCKS)), "y"]
    weights = [
        numpy_helper.from_array(random.normal(size=(SIZE, SIZE)).astype(np.float32) / 16, f"w{i}")
        for i in range(BLOCKS)
    ]
    nodes = [
        helper.make_node("MatMul", [names[i], f"w{i}"], [names[i + 1]], name=f"n{i}")
        for i in range(BLOCKS)
    ]
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", SIZE])
        for name in ("x", "y")
    ]
    graph = helper.make_graph(nodes, "net", [ends[0]], [ends[1]], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 10  # what every ONNX Runtime in use reads
    file = repository.folder(KEY) / "model.onnx"
    onnx.save(model, file, save_as_external_data=True, location=DATA, size_threshold=0)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    boundaries = tuple(
        Boundary((TensorSpec(name, "FP32", (ANY, SIZE)),), 4 * SIZE) for name in names
    )
    repository.write_block_table(KEY, BlockTable(digest, True, boundaries, (1,) * BLOCKS))


def answer(repository: ModelRepository, first: int, last: int, rows: np.ndarray) -> np.ndarray:
    executor = load_executor(
        repository,
        PartitionKey(KEY, first, last),
        device=Device.parse("cpu"),
        float16_boundaries=False,
    )
    try:
        return executor.run([rows])[0]
    finally:
        executor.close()


async def test_a_part_fetches_the_graph_and_its_own_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks_of_64_kib(monkeypatch)
    write_model(tmp_path / "source")
    rows = np.random.default_rng(5).normal(size=(3, SIZE)).astype(np.float32)
    async with store_world(tmp_path) as world:
        source, fetcher = await world.add("source"), await world.add("fetcher")
        digest = await asyncio.to_thread(source.repository.content_digest, KEY)

        def load() -> np.ndarray:
            fetcher.store.prepare(KEY, digest, ["source"])
            return answer(fetcher.repository, 1, 2, rows)

        found = await asyncio.to_thread(load)
        expected = await asyncio.to_thread(answer, source.repository, 1, 2, rows)
        np.testing.assert_array_equal(found, expected)
        assert np.abs(found).max() > 0.1
        here = fetcher.kept().map_of(DATA).here()
        assert 0 < len(here) <= PER_BLOCK + 1


def export(root: Path) -> None:
    """Exports four layers as PyTorch does by default, with the weights beside the graph."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    pytest.importorskip("onnxscript", reason="PyTorch exports to ONNX with it")
    repository = ModelRepository(root)
    repository.write_manifest(ModelManifest(KEY, "onnxruntime_onnx", "model.onnx", 10**9, 4, False))
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(SIZE, SIZE), torch.nn.ReLU()) for _ in range(4)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            torch.nn.Sequential(*layers).eval(),
            (torch.zeros(2, SIZE),),
            str(repository.model_file(KEY)),
            dynamo=True,
            dynamic_shapes=({0: "batch"},),
            verbose=False,
        )
    prepare_model(repository, KEY, blocks=4)


async def test_of_a_default_export_a_part_fetches_what_it_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks_of_64_kib(monkeypatch)
    monkeypatch.setattr(cutting, "SMALLEST_BLOCK_NS", 1.0)
    await asyncio.to_thread(export, tmp_path / "source")
    rows = np.random.default_rng(5).normal(size=(3, SIZE)).astype(np.float32)
    async with store_world(tmp_path) as world:
        source, fetcher = await world.add("source"), await world.add("fetcher")
        digest = await asyncio.to_thread(source.repository.content_digest, KEY)
        blocks = source.repository.block_table(KEY).blocks
        assert blocks == 4

        def load() -> np.ndarray:
            fetcher.store.prepare(KEY, digest, ["source"])
            return answer(fetcher.repository, 3, 4, rows)

        found = await asyncio.to_thread(load)
        expected = await asyncio.to_thread(answer, source.repository, 3, 4, rows)
        np.testing.assert_array_equal(found, expected)
        here = fetcher.kept().map_of("model.onnx.data").here()
        assert 0 < len(here) <= PER_BLOCK + 2
