"""ONNX front end: a model file becomes a `CutGraph` and, for any range of blocks, a smaller model.

Exporters store weights in many forms (Constant nodes, ConstantOfShape arithmetic, graph inputs of
IR version 3); `load_onnx` converts all of them to one form. Separating what ONNX Runtime would fuse
costs time, so a convolution and what directly follows it are bonded.

Sizes that the file names are no data (`onnx_sizes`). Where no tensor at a position has a size that
is needed behind it, the model is not cut.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import onnx_ir as ir
from onnx_ir.passes import common as passes

from catenary_agent.partitioning.graph import CutGraph, GraphNode
from catenary_agent.partitioning.onnx_file import external_tensors, first_line, read_onnx
from catenary_agent.partitioning.onnx_sizes import (
    named_sizes,
    sizes_behind,
    sizes_of,
    sizes_read,
    sizes_read_there,
    value_name,
    values_read,
    walk_back,
)
from catenary_agent.words import words
from catenary_services.domain.tensors import ANY, BYTES, DTYPE_OF, TensorSpec
from catenary_services.errors import InvalidInput

_HEAVY = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
_NORMS = frozenset({"BatchNormalization", "InstanceNormalization"})
_ACTIVATIONS = words("""
    Clip Elu Gelu HardSigmoid HardSwish LeakyRelu Mish PRelu Relu Selu Sigmoid Softplus Swish
    Tanh
""")
_ARITHMETIC = frozenset({"Add", "Mul", "Sum"})
_PLAIN = frozenset({"Identity", "Dropout"})
_DOMAINS = words("ai.onnx ai.onnx.ml ai.onnx.preview com.microsoft") | {""}
"""The domains whose operators ONNX Runtime has; functions of others are inlined."""
_NODE = "block_node_"
_NODE_NUMBER = re.compile(rf"{_NODE}(\d+)")


@dataclass(frozen=True, slots=True)
class OnnxModel:
    """A normalised ONNX model and the nodes in it that depend on its inputs."""

    model: ir.Model
    data_nodes: tuple[ir.Node, ...]
    """The nodes in topological order; named "block_node_<index>" so that profiles can refer to
    them."""
    node_names: tuple[str, ...]
    """The names that the file has for them, each with its operator, for messages."""
    named_sizes: frozenset[str]
    """The names of sizes of the inputs, if values inside of the model have them, too."""

    def with_names(self, text: str) -> str:
        """Returns a message about this model with its nodes named as in the file."""

        def name_of(match: re.Match[str]) -> str:
            index = int(match[1])
            return self.node_names[index] if index < len(self.node_names) else match[0]

        return _NODE_NUMBER.sub(name_of, text)

    @property
    def inputs(self) -> tuple[str, ...]:
        return tuple(value_name(value) for value in self.model.graph.inputs)

    @property
    def outputs(self) -> tuple[str, ...]:
        return tuple(value_name(value) for value in self.model.graph.outputs)

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
        if not self.named_sizes:
            return
        values = ir.convenience.create_value_mapping(self.model.graph, include_subgraphs=False)
        data = {value for node in self.data_nodes for value in node.outputs}
        data.update(self.model.graph.inputs)
        needed = {
            name
            for value in self.model.graph.outputs
            for name in sizes_behind(value, data, self.named_sizes)
        }
        sets = graph.crossing_sets()
        for position in range(len(self.data_nodes) - 1, 0, -1):
            for value in values_read(self.data_nodes[position]):
                needed.update(sizes_behind(value, data, self.named_sizes))
            if not needed <= {name for each in sets[position] for name in sizes_of(values[each])}:
                yield position

    def _whole_graph(
        self, value_bytes: Mapping[str, int], cost_ns: Sequence[float], immovable: frozenset[str]
    ) -> CutGraph:
        computed = {value_name(v) for node in self.data_nodes for v in node.outputs} | set(
            self.inputs
        )
        nodes = tuple(
            GraphNode(
                reads=tuple(n for n in map(value_name, values_read(node)) if n in computed),
                writes=tuple(value_name(value) for value in node.outputs if value.name),
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


def load_onnx(path: Path) -> OnnxModel:
    """Returns the normalised model at `path`.

    Raises:
        FileNotFoundError: There is no such file.
        InvalidInput: It is not an ONNX model, or refers to weights outside its folder.
    """
    model = read_onnx(path)
    steps = (
        passes.InlinePass(),
        passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        passes.LiftSubgraphInitializersToMainGraphPass(),
        passes.RemoveInitializersFromInputsPass(),
        passes.RemoveUnusedNodesPass(),
        passes.TopologicalSortPass(),
    )
    for step in steps:
        try:
            model = step(model).model
        except Exception as error:
            # A function that calls itself, was written for another opset, or forms a cycle; or
            # whatever else the library finds where it uses it.
            raise InvalidInput(path.name, f"cannot be cut: {first_line(error)}") from error
    _check(model, path.name)
    model.ir_version = max(model.ir_version, 8)
    sizes = named_sizes(model.graph)
    data_nodes = tuple(_reachable(model.graph, sizes))
    names = tuple(f"{node.name or 'a node'} ({node.op_type})" for node in data_nodes)
    for index, node in enumerate(data_nodes):
        node.name = f"{_NODE}{index}"
    return OnnxModel(model, data_nodes, names, sizes)


def extract_part(
    source: OnnxModel, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]
) -> ir.Model:
    """Returns the part of a model that computes `outputs` from `inputs`, with its weights only.

    Args:
        source: The whole model.
        inputs: The given tensors. Those the part does not need are left out.
        outputs: The tensors to compute; none of them may be among the inputs.
    """
    whole, wanted = source.model.graph, [spec.name for spec in outputs]
    walk = walk_back(whole, [spec.name for spec in inputs], wanted, source.named_sizes)
    used = [spec for spec in inputs if spec.name in walk.needed]
    with sizes_read_there(whole, walk):
        graph = ir.convenience.extract(whole, [spec.name for spec in used], wanted)
    # Shapes noted by the exporter may hold only for its own example; the runtime infers them again.
    for node in graph:
        for value in node.outputs:
            value.shape = None
    for values, specs in ((graph.inputs, used), (graph.outputs, outputs)):
        for value, spec in zip(values, specs, strict=True):
            value.type = ir.TensorType(_type_of(spec.datatype))
            value.shape = ir.Shape([None if size == ANY else size for size in spec.shape])
    graph.opset_imports.update(whole.opset_imports)
    return ir.Model(graph, ir_version=source.model.ir_version, producer_name="catenary")


def with_float16_ends(
    part: ir.Model, inputs: Collection[str], outputs: Collection[str], suffix: str
) -> None:
    """Adds casts so that the named float32 inputs and outputs enter and leave as float16.

    The casts run inside the session: no pass over the data in Python, and outputs are written as
    float16 directly into the buffer they are bound to. A cast tensor's name ends in `suffix`.
    """
    graph = part.graph
    half = ir.TensorType(ir.DataType.FLOAT16)
    for index, value in enumerate(list(graph.inputs)):
        if value_name(value) in inputs:
            outer = ir.Value(name=f"{value.name}{suffix}", shape=value.shape, type=half)
            cast = ir.node("Cast", [outer], {"to": ir.DataType.FLOAT})
            inner = cast.outputs[0]
            inner.name, inner.type = f"{value.name}.float32", value.type
            ir.convenience.replace_all_uses_with(value, inner)
            graph.inputs[index] = outer
            graph.insert_before(graph[0], cast)
    for index, value in enumerate(list(graph.outputs)):
        if value_name(value) in outputs:
            cast = ir.node("Cast", [value], {"to": ir.DataType.FLOAT16})
            outer = cast.outputs[0]
            outer.name, outer.type, outer.shape = f"{value.name}{suffix}", half, value.shape
            graph.append(cast)
            graph.outputs[index] = outer


def _check(model: ir.Model, file: str) -> None:
    """Checks what ONNX Runtime would refuse without saying where.

    Raises:
        InvalidInput: An operator is of no known domain, or the outputs are not distinct values.
    """
    for node in model.graph.all_nodes():
        if node.domain not in _DOMAINS:
            text = f"has {node.domain}::{node.op_type} at node {node.name!r}: nobody can run that"
            raise InvalidInput(file, text)
    weights = model.graph.initializers.values()
    outer = {id(value.const_value) for value in weights}
    for tensor in external_tensors(model):
        if id(tensor) not in outer:  # nothing moves those of a branch from file to file
            raise InvalidInput(file, f"keeps {tensor.name!r}, which is inside of a node, beside it")
    outputs = Counter(value_name(value) for value in model.graph.outputs)
    for name, times in outputs.items():
        if times > 1:
            raise InvalidInput(file, f"has the output {name!r} {times} times")
    if not outputs or not model.graph.inputs:
        raise InvalidInput(file, "has no inputs or no outputs")


def _reachable(graph: ir.Graph, sizes: frozenset[str]) -> Iterator[ir.Node]:
    """Yields the nodes that depend on the inputs, and not on their named sizes alone."""
    reached = set(graph.inputs)
    for node in graph:
        if not reached.isdisjoint(values_read(node)) and not sizes_read(node, sizes):
            reached.update(node.outputs)
            yield node


def _bonds(nodes: Sequence[ir.Node]) -> Iterator[tuple[int, int]]:
    """Yields pairs the runtime fuses: Conv-BatchNorm-(Add)-activation, MatMul-bias, x*sigmoid(x).

    An Add or Mul belongs to what precedes it only if nothing else reads that value: the output of a
    residual block is also read by the next convolution, and is the best place to cut.
    """
    position = {node: index for index, node in enumerate(nodes)}
    chain: set[ir.Node] = set()
    for index, node in enumerate(nodes):
        kind = node.op_type
        for value in node.inputs:
            producer = value.producer() if value is not None else None
            if value is None or producer not in position:
                continue
            sole = len(value.uses()) == 1 and not value.is_graph_output()
            opened = producer in chain
            if opened and (
                kind in _ACTIVATIONS or (sole and kind in _ARITHMETIC | _NORMS | _PLAIN)
            ):
                chain.add(node)
                yield position[producer], index
            elif producer.op_type in _ACTIVATIONS and sole and kind == "Mul":
                yield position[producer], index
        if kind in _HEAVY or kind in _NORMS:
            chain.add(node)
        elif kind in _ACTIVATIONS:
            chain.discard(node)


def _type_of(datatype: str) -> ir.DataType:
    if datatype == BYTES:
        return ir.DataType.STRING
    return ir.DataType.from_numpy(DTYPE_OF[datatype])
