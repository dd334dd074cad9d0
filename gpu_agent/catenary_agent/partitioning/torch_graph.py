"""PyTorch front end: a torch.export program becomes a `CutGraph`, and ranges of it new programs.

Nodes that depend only on shapes (sizes, masks and positions made from them) are not data: every
part that needs them gets a copy, with each size read from an input of the part that has it. Where
no tensor at a position has a size that is needed later, the program is not cut. Otherwise a mask
would cross every boundary of a transformer.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import fx

from catenary_agent.partitioning.graph import CutGraph, GraphNode
from catenary_agent.partitioning.torch_archive import load_program
from catenary_agent.words import words
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
    ranges: Mapping[str, tuple[int, int | None]] = field(default_factory=dict)
    """The least and the most that each symbol of a size may be; None for no limit."""

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

    def dimension_names(self) -> list[list[str]]:
        """Returns the names that the program has for the sizes of each input; "" for known ones."""
        sizes = [_sizes_of(node) for node in self.placeholders]
        return [["" if size.isdecimal() else size for size in each] for each in sizes]

    def sizes_of(self, tensors: Sequence[TensorSpec]) -> list[list[str]]:
        """Returns the expressions of the sizes of some tensors, such as "2", "s77" or "2*s77"."""
        by_name = {node.name: node for node in self.module.graph.nodes}
        return [_sizes_of(by_name[spec.name]) for spec in tensors]

    def cut_graph(
        self,
        value_bytes: Mapping[str, int],
        cost_ns: Sequence[float],
        immovable: frozenset[str] = frozenset(),
    ) -> CutGraph:
        """Returns the graph to cut, with measured sizes and times."""
        graph = self._whole_graph(value_bytes, cost_ns, immovable)
        # A bond of neighbours forbids the position between them.
        uncut = frozenset((position - 1, position) for position in self._sizeless(graph))
        return replace(graph, bonds=graph.bonds | uncut)

    def _sizeless(self, graph: CutGraph) -> Iterator[int]:
        """Yields the positions behind which a size is needed that no tensor there has."""
        by_name = {node.name: node for node in self.module.graph.nodes}
        data = {*self.placeholders, *self.data_nodes}
        needed: set[str] = set()
        sets = graph.crossing_sets()
        for position in range(len(self.data_nodes) - 1, 0, -1):
            needed |= _sizes_behind(self.data_nodes[position], data)
            had = {text for name in sets[position] for text in _sizes_of(by_name[name])}
            if not needed <= had:
                yield position

    def _whole_graph(
        self, value_bytes: Mapping[str, int], cost_ns: Sequence[float], immovable: frozenset[str]
    ) -> CutGraph:
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
    ranges = {
        str(symbol): (_bound(limits.lower) or 0, _bound(limits.upper))
        for symbol, limits in program.range_constraints.items()
    }
    return of_module(program.module(), ranges)


def _bound(limit: Any) -> int | None:
    return int(limit) if limit.is_Integer else None


def of_module(
    module: Any, ranges: Mapping[str, tuple[int, int | None]] | None = None
) -> TorchModel:
    """Returns the model of an unlifted graph module (`ExportedProgram.module()`).

    Args:
        module: The module.
        ranges: See `TorchModel.ranges`.

    Raises:
        NotSupported: It returns something that is not a tensor.
    """
    nodes = list(module.graph.nodes)
    placeholders = tuple(node for node in nodes if node.op == "placeholder")
    output = nodes[-1].args[0]
    returned = tuple(output) if isinstance(output, tuple | list) else (output,)
    if not all(isinstance(node, fx.Node) for node in returned):
        raise NotSupported("the program returns something that is not a tensor")
    return TorchModel(module, placeholders, returned, tuple(_data_nodes(nodes)), ranges or {})


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
    places: dict[str, tuple[fx.Node, int]] = {}
    for node, copy in copies.items():
        for axis, text in enumerate(_sizes_of(node)):
            places.setdefault(text, (copy, axis))
    needed = _needed([by_name[spec.name] for spec in outputs], set(copies), set(places))
    for node in source.module.graph.nodes:
        if node not in needed or node in copies:
            continue
        if node.op == "placeholder":
            raise InvalidInput(node.name, "is needed but not among the part's inputs")
        size = _size_read(node)
        if size is not None and size in places:
            copies[node] = graph.call_function(torch.ops.aten.sym_size.int, places[size])
        else:
            copies[node] = graph.node_copy(node, lambda old: copies[old])
    graph.output(tuple(copies[by_name[spec.name]] for spec in outputs))
    part = fx.GraphModule(source.module, graph)
    part.delete_all_unused_submodules()
    return part


def _needed(wanted: Sequence[fx.Node], given: set[fx.Node], sizes: set[str]) -> set[fx.Node]:
    """Returns the nodes that compute `wanted` from the `given` ones and known `sizes`."""
    seen: set[fx.Node] = set()
    stack = list(wanted)
    while stack:
        node = stack.pop()
        if node in seen or node in given:
            continue
        seen.add(node)
        if _size_read(node) not in sizes:
            stack.extend(node.all_input_nodes)
    return seen


def _sizes_of(node: fx.Node) -> list[str]:
    """Returns the expressions of a tensor's sizes; () for what is no tensor."""
    value = node.meta.get("val")
    return [str(size) for size in value.shape] if isinstance(value, torch.Tensor) else []


def _size_read(node: fx.Node) -> str | None:
    """Returns the expression of the size that a node reads from a tensor; None for other nodes."""
    if node.target is not torch.ops.aten.sym_size.int:
        return None
    source, axis = node.args
    assert isinstance(source, fx.Node)
    assert isinstance(axis, int)
    sizes = _sizes_of(source)
    return sizes[axis] if -len(sizes) <= axis < len(sizes) else None


def _sizes_behind(node: fx.Node, data: set[fx.Node]) -> set[str]:
    """Returns the sizes that are read from tensors in order to compute a node from its data."""
    found: set[str] = set()
    seen: set[fx.Node] = set()
    stack = list(node.all_input_nodes)
    while stack:
        source = stack.pop()
        if source in seen or source in data:
            continue
        seen.add(source)
        size = _size_read(source)
        if size is None:
            stack.extend(source.all_input_nodes)
        elif not size.isdecimal():
            found.add(size)
    return found


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
