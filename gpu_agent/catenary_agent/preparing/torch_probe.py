"""A probing run of a whole exported program: every value visible, every node timed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import fx

from catenary_agent.executors.base import Executor
from catenary_agent.executors.device import Device
from catenary_agent.executors.torch_part import TorchPart, write_part
from catenary_agent.partitioning.graph import CutGraph
from catenary_agent.partitioning.signature import PartitionSignature
from catenary_agent.partitioning.torch_graph import load_torch
from catenary_agent.preparing.probe import (
    ProbedModel,
    ProbeOrder,
    ProbeResult,
    Values,
    probe_model,
    with_sizes,
)
from catenary_services.domain.model import BlockTable

_REPEATS = 3


class _Recorder(fx.Interpreter):
    """Runs a graph module, and keeps every tensor and the shortest time of every node."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.values: dict[str, np.ndarray] = {}
        self.least_ns: dict[str, int] = {}

    def run_node(self, n: fx.Node) -> Any:
        """Runs one node and records its result and its time."""
        started = time.perf_counter_ns()
        result = super().run_node(n)
        took = time.perf_counter_ns() - started
        self.least_ns[n.name] = min(took, self.least_ns.get(n.name, took))
        if isinstance(result, torch.Tensor) and n.op not in ("get_attr", "output"):
            self.values[n.name] = result.detach().numpy()
        return result


def probe_torch(file: Path, order: ProbeOrder) -> ProbedModel:
    """Returns the facts about an exported program that `prepare` needs."""
    source = load_torch(file)
    inputs = with_sizes(source.input_specs(), source.dimension_names(), order.dimensions)
    recorder = _Recorder(source.module)

    def run(values: Values) -> Values:
        recorder.values = {}
        with torch.inference_mode():
            recorder.run(*(torch.from_numpy(values[name]) for name in source.inputs))
        # In-place operations overwrite their operands later in the run; copies are not affected.
        return {name: array.copy() for name, array in recorder.values.items()}

    probe = probe_model(inputs, run, order)
    recorder.least_ns.clear()
    for _ in range(_REPEATS):
        shapes = {name: array.shape for name, array in run(probe.example).items()}
    costs = tuple(float(recorder.least_ns[node.name]) for node in source.data_nodes)

    def graph(probe: ProbeResult, costs: Sequence[float], immovable: frozenset[str]) -> CutGraph:
        unsent = {node.name for node in source.data_nodes} - probe.specs.keys()
        sizes = dict.fromkeys(unsent, 0) | dict(probe.row_bytes)
        return source.cut_graph(sizes, costs, immovable | unsent)

    def build(table: BlockTable, ends: PartitionSignature, folder: Path) -> Executor:
        write_part(source, ends, folder)
        return TorchPart(ends, folder / "part.pt2", Device("cpu"))

    return ProbedModel(probe, shapes, source.outputs, costs, graph, build)
