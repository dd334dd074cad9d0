"""Graphs and exported programs that are prepared, cut everywhere and compared with the whole."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from catenary_agent.executors.device import Device
from catenary_agent.executors.loading import load_executor
from catenary_agent.preparing.prepare import prepare_model
from catenary_services.domain.ids import ModelKey, PartitionKey
from catenary_services.domain.model import BlockTable, ModelManifest
from catenary_services.models.model_repository import ModelRepository
from compared_models.page import largest_difference

KEY = ModelKey("net", "1")
Arrays = Mapping[str, np.ndarray]
Answers = Callable[[Arrays], list[np.ndarray]]
"""What computes the outputs of a model, other than we."""
_FILES = {"onnxruntime_onnx": "model.onnx", "pytorch_exported": "model.pt2"}


@dataclass(frozen=True, slots=True)
class GraphCase:
    """A model, with requests that it was not exported with."""

    write: Callable[[ModelRepository], Answers]
    """Writes the model, and returns what it computes."""
    requests: Callable[[], Sequence[Arrays]]
    batched: bool = True
    platform: str = "onnxruntime_onnx"
    is_slow: bool = False


def repository_of(
    folder: Path, platform: str = "onnxruntime_onnx", **facts: Any
) -> ModelRepository:
    """Returns a repository with the manifest of a model whose file is still missing."""
    repository = ModelRepository(folder)
    manifest = ModelManifest(KEY, platform, _FILES[platform], 10**9, 8, False, **facts)
    repository.write_manifest(manifest)
    return repository


def compared(folder: Path, case: GraphCase) -> float:
    """Returns how far parts between all cuts are from the whole model, at every request."""
    repository = repository_of(folder, case.platform)
    answers = case.write(repository)
    table = prepare_model(repository, KEY, blocks=4)
    assert table.batched is case.batched
    assert table.blocks > 1
    return max(difference(repository, inputs, answers(inputs)) for inputs in case.requests())


def difference(repository: ModelRepository, inputs: Arrays, expected: list[np.ndarray]) -> float:
    """Returns how far parts are from expected outputs: uncut, cut once anywhere, cut everywhere."""
    blocks = repository.block_table(KEY).blocks
    worst = 0.0
    for cuts in ((), *((cut,) for cut in range(1, blocks)), tuple(range(1, blocks))):
        found = parts(repository, cuts, inputs)
        for mine, theirs in zip(found, expected, strict=True):
            if mine.dtype == np.object_:
                said = [bytes(each).decode() for each in mine.ravel()]
                assert said == theirs.ravel().tolist()
            else:
                worst = max(worst, largest_difference(mine, theirs))
    return worst


def parts(
    repository: ModelRepository, cuts: Sequence[int], inputs: Arrays, key: ModelKey = KEY
) -> list[np.ndarray]:
    """Returns what parts between the cuts make of a request, one after the other."""
    table = repository.block_table(key)
    values = [inputs[tensor.name] for tensor in table.boundaries[0].tensors]
    for first, last in itertools.pairwise([0, *cuts, table.blocks]):
        executor = load_executor(
            repository,
            PartitionKey(key, first, last),
            device=Device.parse("cpu"),
            float16_boundaries=False,
        )
        values = executor.run(values)
        executor.close()
    return values


def whole(file: Path, inputs: Arrays) -> list[np.ndarray]:
    """Returns what ONNX Runtime itself makes of a file as it is."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    return list(session.run(None, dict(inputs)))


def assert_same_at_every_cut(
    repository: ModelRepository, inputs: Arrays, *, least_blocks: int = 3
) -> BlockTable:
    """Asserts that parts compute what ONNX Runtime makes of the file; returns its blocks."""
    table = repository.block_table(KEY)
    assert table.blocks >= least_blocks
    expected = whole(repository.model_file(KEY), inputs)
    assert difference(repository, inputs, expected) < 1e-4
    return table
