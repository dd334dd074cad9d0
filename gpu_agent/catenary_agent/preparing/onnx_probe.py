"""Probing runs of a whole ONNX model, with every value visible and every node timed."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime

from catenary_agent.executors.base import Executor
from catenary_agent.executors.device import Device
from catenary_agent.executors.onnx_part import OnnxOptions, OnnxPart, write_part
from catenary_agent.partitioning.graph import CutGraph
from catenary_agent.partitioning.onnx_graph import OnnxModel, load_onnx
from catenary_agent.partitioning.signature import PartitionSignature
from catenary_agent.preparing.probe import ProbedModel, ProbeResult, Values, probe_model
from catenary_services.domain.model import BlockTable
from catenary_services.domain.tensors import ANY, DATATYPE_OF, TensorSpec
from catenary_services.errors import NotSupported


def probe_onnx(file: Path, example: Values | None) -> ProbedModel:
    """Returns the facts about an ONNX model that `prepare` needs."""
    source = load_onnx(file)
    with OnnxProbe(source) as whole:
        probe = probe_model(input_specs(source), whole.run, example)
        node_costs = whole.node_costs(probe.example)
        shapes = {name: array.shape for name, array in whole.run(probe.example).items()}

    def graph(probe: ProbeResult, costs: Sequence[float], immovable: frozenset[str]) -> CutGraph:
        return source.cut_graph(probe.row_bytes, costs, immovable)

    def build(table: BlockTable, ends: PartitionSignature, folder: Path) -> Executor:
        write_part(source, table, ends, folder)
        return OnnxPart(ends, folder / "part.onnx", OnnxOptions(Device("cpu")))

    return ProbedModel(probe, shapes, source.outputs, tuple(node_costs), graph, build)


def input_specs(source: OnnxModel) -> list[TensorSpec]:
    """Returns the model's declared inputs; a dimension without a positive number is free.

    Raises:
        NotSupported: An input is not a tensor of a fixed-size datatype and known rank.
    """
    specs = []
    for value in source.model.graph.inputs:
        dtype = value.dtype
        known = None if dtype is None else DATATYPE_OF.get(np.dtype(dtype.numpy()))
        if known is None or value.shape is None:
            raise NotSupported(f"model input {value.name!r} has no fixed-size datatype or rank")
        shape = tuple(d if isinstance(d, int) and d > 0 else ANY for d in value.shape.dims)
        specs.append(TensorSpec(value.name or "", known, shape))
    return specs


class OnnxProbe:
    """A session over the whole model that returns all values. Use as a context manager."""

    def __init__(self, source: OnnxModel, threads: int = 1) -> None:
        self._source = source
        self._threads = threads
        self._folder = tempfile.TemporaryDirectory(prefix="catenary-probe-")
        path = Path(self._folder.name) / "probe.onnx"
        graph = source.model.graph
        original = list(graph.outputs)
        wanted = [v for node in source.data_nodes for v in node.outputs if v.name]
        try:
            # A value may be an output only once, and the model's own outputs are among them.
            graph.outputs.extend(v for v in wanted if v not in set(original))
            ir.save(source.model, path, external_data="probe.data", size_threshold_bytes=1 << 20)
        finally:
            graph.outputs.clear()
            graph.outputs.extend(original)
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.log_severity_level = 4
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(self._folder.name) / "profile")
        self._session = onnxruntime.InferenceSession(
            str(path), options, providers=["CPUExecutionProvider"]
        )
        self._outputs = [value.name for value in self._session.get_outputs()]

    def __enter__(self) -> OnnxProbe:
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()

    def run(self, inputs: Values) -> Values:
        """Returns every tensor of one run, inputs included; other values are left out."""
        results = self._session.run(None, dict(inputs))
        found = dict(inputs)
        found.update(
            (name, result)
            for name, result in zip(self._outputs, results, strict=True)
            if isinstance(result, np.ndarray)
        )
        return found

    def node_costs(self, example: Values, repeats: int = 3) -> list[float]:
        """Returns the shortest time of each data node over `repeats` runs, in nanoseconds."""
        for _ in range(repeats):
            self._session.run(None, dict(example))
        return _node_times(Path(self._session.end_profiling()), self._source.data_nodes)


def _node_times(profile: Path, nodes: Sequence[ir.Node]) -> list[float]:
    least: dict[str, float] = {}
    for event in json.loads(profile.read_text("utf-8")):
        name = event.get("name", "")
        if event.get("cat") == "Node" and name.endswith("_kernel_time"):
            name = name.removesuffix("_kernel_time")
            took = event["dur"] * 1e3
            least[name] = min(took, least.get(name, took))
    # A node without an event (optimised away, shorter than the clock) still costs its dispatch.
    return [max(1e3, least.get(node.name or "", 0.0)) for node in nodes]
