"""The models that every server serves, with the row that is asked for and its right answer.

* `tiny` is four dense layers: what a request costs beside its arithmetic.
* `efficientnet-lite0` is a real network of some 13 ms, with 588 KiB of input.
* `payload` takes 600 KiB and returns their mean: what bytes cost.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime
from onnx import TensorProto, helper

from benchmarks.end_to_end import dense_model, save_graph
from catenary.tensors import Array
from catenary_agent.preparing.prepare import prepare_model
from catenary_services.domain.ids import ModelKey
from catenary_services.models.model_repository import ModelRepository
from catenaryd.demo.models import ensure_model

PAYLOAD_FLOATS = 600 * 1024 // 4
CONNECTIONS = {"tiny": (1, 4, 16, 64), "efficientnet-lite0": (1, 4, 16), "payload": (1, 16)}
"""Requests in flight, by model; each on a connection of its own."""
_BLOCKS = 10
_DIRECT_RUNS = 30


@dataclass(frozen=True, slots=True)
class Workload:
    """A model with the row that is asked for, and what ONNX Runtime answers."""

    name: str
    file: Path
    input_name: str
    output_name: str
    row: Array
    expected: Array
    direct_ms: float
    """CPU time of the row in ONNX Runtime, in process, one thread; the least of some runs."""

    def is_right(self, answer: Array) -> bool:
        """Returns True for the expected answer; graphs that are cut differ in the last digits."""
        return answer.shape == self.expected.shape and bool(
            np.allclose(answer, self.expected, rtol=1e-4, atol=1e-4)
        )


def session_of(file: Path) -> onnxruntime.InferenceSession:
    """Returns a session with one thread, as every server here has it."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])


def workloads(root: Path, names: tuple[str, ...] = tuple(CONNECTIONS)) -> list[Workload]:
    """Makes the models in the repository at `root`, if they are not there, and returns them.

    Their blocks are timed anew, because Catenary plans with these times.
    """
    repository = ModelRepository(root)
    found = []
    for name in names:
        key = _model(repository, name)
        prepare_model(repository, key, _BLOCKS)
        found.append(workload_of(name, repository.model_file(key)))
    return found


def workload_of(name: str, file: Path) -> Workload:
    """Returns the workload of a model's file, with a row from the seed that its size gives."""
    session = session_of(file)
    (given,), (made,) = session.get_inputs(), session.get_outputs()
    shape = [1, *given.shape[1:]]
    # Multiples of 1/128 in [-1, 1): short as decimals, so that JSON is no larger than it has to be.
    source = np.random.default_rng(int(np.prod(shape)))
    row = (source.integers(-128, 128, shape) / 128).astype(np.float32)
    (expected,) = session.run(None, {given.name: row})
    spent = []
    for _ in range(_DIRECT_RUNS):
        before = time.thread_time_ns()
        session.run(None, {given.name: row})
        spent.append(time.thread_time_ns() - before)
    return Workload(name, file.resolve(), given.name, made.name, row, expected, min(spent) / 1e6)


def _model(repository: ModelRepository, name: str) -> ModelKey:
    if name == "tiny":
        return dense_model(repository, name, 256, 4)
    if name == "payload":
        return payload_model(repository, name)
    return ensure_model(repository.root, name)


def payload_model(repository: ModelRepository, name: str) -> ModelKey:
    """Writes a model that returns the mean of a large row; returns its key."""
    graph = helper.make_graph(
        [helper.make_node("ReduceMean", ["x"], ["mean"], axes=[1], keepdims=1)],
        name,
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", PAYLOAD_FLOATS])],
        [helper.make_tensor_value_info("mean", TensorProto.FLOAT, ["batch", 1])],
    )
    return save_graph(repository, name, graph, float16_boundaries=False)
