"""PyTorch front end: a torch.export program becomes a `CutGraph`, and ranges of it new programs.

The batch is the only symbolic size. Nodes that depend only on shapes (sizes, masks and positions
made from them) are not data: every part that needs them gets a copy, with the batch size read from
the part's first input. Otherwise a mask would cross every boundary of a transformer.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

from catenary_agent.partitioning.graph import CutGraph, GraphNode
from catenary_agent.partitioning.torch_archive import load_program
from catenary_agent.partitioning.words import words
from catenary_services.domain.tensors import ANY, TensorSpec
from catenary_services.errors import InvalidInput, NotSupported

DATATYPE_OF_TORCH = {
    torch.bool: "BOOL",
    torch.uint8: "UINT8",
    torch.int8: "INT8",
    torch.int16: "INT16",
    torch.int32: "INT32",
    torch.int64: "INT64",
    torch.float16: "FP16",
    torch.float32: "FP32",
    torch.float64: "FP64",
}

_HEAVY = ("conv", "linear", "addmm", "mm", "bmm", "matmul", "batch_norm")
_FOLLOWERS = words("""
    relu relu_ hardtanh hardtanh_ clamp clamp_ silu silu_ gelu sigmoid sigmoid_ hardsigmoid
    hardswish hardswish_ leaky_relu tanh
""")


@dataclass(frozen=True, slots=True)
class TorchModel:
    """An exported program as a graph module, and the nodes in it that depend on input data."""

    module: fx.GraphModule
    placeholders: tuple[fx.Node, ...]
    returned: tuple[fx.Node, ...]
    data_nodes: tuple[fx.Node, ...]

    @property
    def inputs(self) -> tuple[str, ...]:
        return tuple(node.name for node in self.placeholders)

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of the values that the program returns."""
        return tuple(node.name for node in self.returned)

    def input_specs(self) -> list[TensorSpec]:
        """Returns the declared inputs.

        Raises:
            NotSupported: An input is not a tensor of a fixed-size datatype.
        """
        specs = []
        for node in self.placeholders:
            value = node.meta.get("val")
            if not isinstance(value, torch.Tensor) or value.dtype not in DATATYPE_OF_TORCH:
                raise NotSupported(f"model input {node.name!r} is not a fixed-size tensor")
            shape = tuple(size if isinstance(size, int) else ANY for size in value.shape)
            specs.append(TensorSpec(node.name, DATATYPE_OF_TORCH[value.dtype], shape))
        return specs

    def cut_graph(
        self,
        value_bytes: Mapping[str, int],
        cost_ns: Sequence[float],
        immovable: frozenset[str] = frozenset(),
    ) -> CutGraph:
        """Returns the graph to cut, with measured sizes and times."""
        known = set(self.data_nodes) | set(self.placeholders)
        nodes = tuple(
            GraphNode(
                reads=tuple(source.name for source in node.all_input_nodes if source in known),
                writes=(node.name,),
                cost_ns=cost,
            )
            for node, cost in zip(self.data_nodes, cost_ns, strict=True)
        )
        return CutGraph(
            inputs=self.inputs,
            outputs=self.outputs,
            nodes=nodes,
            value_bytes=value_bytes,
            bonds=frozenset(_bonds(self.data_nodes)),
            immovable=immovable,
        )


def load_torch(path: Path) -> TorchModel:
    """Returns the exported program at `path` (torch.export.save).

    Raises:
        InvalidInput: It is not one, or contains more than tensors and operators.
        NotSupported: It takes or returns anything but plain tensors.
    """
    program = load_program(path, in_place=True)
    if any(_mutates(node) for node in program.graph.nodes):
        # An in-place operation is a dependency that the graph does not show, so it is rewritten.
        program = program.run_decompositions({})
        signature = program.graph_signature
        changed = {**signature.buffers_to_mutate, **signature.user_inputs_to_mutate}
        kept = [node for node in program.graph.nodes if _mutates(node)]
        if changed or kept:
            what = next(iter([*changed.values(), *map(str, kept)]))
            # The next request would read what this one has written.
            raise InvalidInput(path.name, f"changes {what!r}, which outlives a request")
    return of_module(program.module())


def of_module(module: Any) -> TorchModel:
    """Returns the model of an unlifted graph module (`ExportedProgram.module()`).

    Raises:
        NotSupported: It returns something that is not a tensor.
    """
    nodes = list(module.graph.nodes)
    placeholders = tuple(node for node in nodes if node.op == "placeholder")
    output = nodes[-1].args[0]
    returned = tuple(output) if isinstance(output, tuple | list) else (output,)
    if not all(isinstance(node, fx.Node) for node in returned):
        raise NotSupported("the program returns something that is not a tensor")
    return TorchModel(module, placeholders, returned, tuple(_data_nodes(nodes)))


def extract_part(
    source: TorchModel, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]
) -> fx.GraphModule:
    """Returns a module that computes the tuple `outputs` from `inputs`, with its weights only.

    Inputs that the part does not need stay in its signature, unused.

    Raises:
        InvalidInput: A needed input is missing.
    """
    by_name = {node.name: node for node in source.module.graph.nodes}
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for spec in inputs:
        copies[by_name[spec.name]] = graph.placeholder(spec.name)
    first = next(iter(copies.values()))
    needed = _needed([by_name[spec.name] for spec in outputs], set(copies))
    for node in source.module.graph.nodes:
        if node not in needed or node in copies:
            continue
        if node.op == "placeholder":
            raise InvalidInput(node.name, "is needed but not among the part's inputs")
        if _is_batch_size(node):
            # Every boundary tensor has the batch first, so any input has its size.
            copies[node] = graph.call_function(torch.ops.aten.sym_size.int, (first, 0))
        else:
            copies[node] = graph.node_copy(node, lambda old: copies[old])
    graph.output(tuple(copies[by_name[spec.name]] for spec in outputs))
    part = fx.GraphModule(source.module, graph)
    part.delete_all_unused_submodules()
    return part


def _needed(wanted: Sequence[fx.Node], given: set[fx.Node]) -> set[fx.Node]:
    seen: set[fx.Node] = set()
    stack = list(wanted)
    while stack:
        node = stack.pop()
        if node in seen or node in given:
            continue
        seen.add(node)
        if not _is_batch_size(node):
            stack.extend(node.all_input_nodes)
    return seen


def _is_batch_size(node: fx.Node) -> bool:
    return node.target is torch.ops.aten.sym_size.int and bool(node.args[1] == 0)


def _data_nodes(nodes: Sequence[fx.Node]) -> Iterator[fx.Node]:
    """Yields nodes reached from the inputs' data; a size read from a tensor is not its data."""
    reached = {node for node in nodes if node.op == "placeholder"}
    for node in nodes:
        if node.op not in ("call_function", "call_module", "call_method"):
            continue
        if node.target is torch.ops.aten.sym_size.int:
            continue
        # The exporter's own check of input shapes reads the inputs, but nobody uses its result.
        if not node.users or reached.isdisjoint(node.all_input_nodes):
            continue
        reached.add(node)
        yield node


def _mutates(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _kind(node: fx.Node) -> str:
    """Returns the name of an operation; for an item of a tuple, that of the tuple's operation."""
    target = node.target
    if target is operator.getitem and isinstance(node.args[0], fx.Node):
        return _kind(node.args[0])
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.rpartition("::")[2]
    return str(getattr(target, "__name__", target))


def _bonds(nodes: Sequence[fx.Node]) -> Iterator[tuple[int, int]]:
    """Yields pairs that belong together: a tuple and its items, Conv-BatchNorm-activation."""
    position = {node: index for index, node in enumerate(nodes)}
    for index, node in enumerate(nodes):
        for source in node.all_input_nodes:
            if source not in position:
                continue
            unpacks = not isinstance(source.meta.get("val"), torch.Tensor)
            follows = _kind(node) in _FOLLOWERS or "batch_norm" in _kind(node)
            fused = follows and any(name in _kind(source) for name in _HEAVY)
            if unpacks or fused:
                yield position[source], index
