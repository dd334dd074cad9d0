"""Probing runs of a whole ONNX model, with every value visible and every node timed."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime

from catenary_agent.executors.base import Executor
from catenary_agent.executors.device import Device
from catenary_agent.executors.onnx_part import OnnxOptions, OnnxPart
from catenary_agent.executors.onnx_texts import to_elements, to_texts
from catenary_agent.executors.onnx_writing import write_part
from catenary_agent.partitioning.graph import CutGraph
from catenary_agent.partitioning.onnx_graph import OnnxModel, load_onnx
from catenary_agent.partitioning.signature import PartitionSignature
from catenary_agent.preparing.probe import (
    ProbedModel,
    ProbeOrder,
    ProbeResult,
    Values,
    probe_model,
    with_sizes,
)
from catenary_agent.words import words
from catenary_services.domain.model import BlockTable
from catenary_services.domain.tensors import ANY, BYTES, DATATYPE_OF, TensorSpec
from catenary_services.errors import InvalidInput, NotSupported

_READABLE = frozenset(
    f"tensor({kind})"
    for kind in words("""
        bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 float double string
    """)
)
"""The types of values that a session can return as arrays."""
_OF_THE_LIBRARY = re.compile(
    r"\[ONNXRuntimeError\] : \d+ : \w+ : |Load model from \S+ failed:"
    r"|/onnxruntime_src/.*?\) (?=[A-Z])"
)
"""Pieces of error texts that say where in ONNX Runtime an error was raised."""
_LONGEST_REASON = 400


def probe_onnx(file: Path, order: ProbeOrder) -> ProbedModel:
    """Returns the facts about an ONNX model that `prepare` needs.

    Raises:
        InvalidInput: The model cannot be loaded or run.
        NotSupported: See `input_specs`.
    """
    source = load_onnx(file)
    inputs = with_sizes(input_specs(source), _dimension_names(source), order.dimensions)
    with OnnxProbe(source, file.name) as whole:
        probe = probe_model(inputs, whole.run, order)
        node_costs = whole.node_costs(probe.example)
        shapes = {name: array.shape for name, array in whole.run(probe.example).items()}

    def graph(probe: ProbeResult, costs: Sequence[float], immovable: frozenset[str]) -> CutGraph:
        computed = {value.name or "" for node in source.data_nodes for value in node.outputs}
        unsent = computed - probe.specs.keys()
        sizes = dict.fromkeys(unsent, 0) | dict(probe.row_bytes)
        return source.cut_graph(sizes, costs, immovable | unsent)

    def build(table: BlockTable, ends: PartitionSignature, folder: Path) -> Executor:
        write_part(source, table, ends, folder)
        return OnnxPart(ends, folder / "part.onnx", OnnxOptions(Device("cpu")))

    return ProbedModel(probe, shapes, source.outputs, tuple(node_costs), graph, build)


def input_specs(source: OnnxModel) -> list[TensorSpec]:
    """Returns the model's declared inputs; a dimension without a positive number is free.

    Raises:
        NotSupported: An input is not a tensor of a known datatype and rank.
    """
    specs = []
    for value in source.model.graph.inputs:
        dtype = value.dtype
        known = None if dtype is None else _datatype_of(dtype)
        if known is None or value.shape is None:
            said = "no tensor" if dtype is None else dtype.name
            raise NotSupported(f"model input {value.name!r} is {said} of rank {_rank(value)}")
        shape = tuple(d if isinstance(d, int) and d > 0 else ANY for d in value.shape.dims)
        specs.append(TensorSpec(value.name or "", known, shape))
    return specs


def _datatype_of(dtype: ir.DataType) -> str | None:
    if dtype == ir.DataType.STRING:
        return BYTES
    try:
        return DATATYPE_OF.get(np.dtype(dtype.numpy()))
    except TypeError:  # a type that NumPy has no dtype for
        return None


def _rank(value: ir.Value) -> str:
    return "unknown size" if value.shape is None else str(len(value.shape))


def _dimension_names(source: OnnxModel) -> list[list[str]]:
    """Returns the names that the file has for the dimensions of each input; "" for none."""
    return [
        ["" if isinstance(size, int) else str(size.value or "") for size in value.shape or ()]
        for value in source.model.graph.inputs
    ]


class OnnxProbe:
    """A session over the whole model that returns all values. Use as a context manager."""

    def __init__(self, source: OnnxModel, file: str, threads: int = 1) -> None:
        """Loads the model.

        Args:
            source: The model.
            file: The name of its file, for messages.
            threads: Number of compute threads.

        Raises:
            InvalidInput: ONNX Runtime refuses the model.
        """
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
        try:
            self._session = onnxruntime.InferenceSession(
                str(path), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # ONNX Runtime's own exception classes share no root
            self._folder.cleanup()
            raise InvalidInput(file, f"is refused by ONNX Runtime: {self._said(error)}") from error
        # NumPy has no bfloat16 and the like; such values are computed, and never sent.
        self._outputs = [v.name for v in self._session.get_outputs() if v.type in _READABLE]

    def __enter__(self) -> OnnxProbe:
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()

    def run(self, inputs: Values) -> Values:
        """Returns every tensor of one run, inputs included; other values are left out.

        Raises:
            InvalidInput: The model cannot compute these inputs.
        """
        feeds = self._feeds(inputs)
        try:
            results = self._session.run(self._outputs, feeds)
        except Exception as error:
            raise InvalidInput("inputs", self._said(error)) from error
        found = dict(inputs)
        found.update(
            (name, to_elements(result)) for name, result in zip(self._outputs, results, strict=True)
        )
        return found

    def node_costs(self, example: Values, repeats: int = 3) -> list[float]:
        """Returns the shortest time of each data node over `repeats` runs, in nanoseconds."""
        for _ in range(repeats):
            self._session.run(self._outputs, self._feeds(example))
        return _node_times(Path(self._session.end_profiling()), self._source.data_nodes)

    def _said(self, error: Exception) -> str:
        """Returns what an error of ONNX Runtime says, with the file's own names of nodes."""
        text = " ".join(str(error).split()).replace(self._folder.name, "")
        return self._source.with_names(_OF_THE_LIBRARY.sub("", text))[:_LONGEST_REASON]

    def _feeds(self, inputs: Values) -> dict[str, np.ndarray]:
        return {name: to_texts(array, name) for name, array in inputs.items()}


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
