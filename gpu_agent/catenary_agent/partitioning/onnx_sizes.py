"""Sizes that an ONNX file names, such as `batch` and `length`.

Where the file names the sizes inside of the model as well, they and what is computed of them alone
are no data: every part that needs them gets a copy, with each size read from an input of the part
that has it. Otherwise sizes would cross every boundary of a transformer, and what has no batch
dimension cannot be sent in batches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import onnx_ir as ir


def values_read(node: ir.Node) -> list[ir.Value]:
    """Returns the inputs of a node, and what its nested bodies capture from outside."""
    found = {value: None for value in node.inputs if value is not None}
    for body in _bodies(node):
        inside = set(body.inputs) | set(body.initializers.values())
        for inner in body:
            found.update((value, None) for value in values_read(inner) if value not in inside)
            inside.update(inner.outputs)
        found.update((v, None) for v in body.outputs if v not in inside)
    return list(found)


def _size_names(value: ir.Value) -> list[str]:
    """Returns the name of every size of a value; "" for those without one."""
    sizes = value.shape.dims if value.shape is not None else ()
    return ["" if isinstance(size, int) else str(size.value or "") for size in sizes]


def sizes_of(value: ir.Value) -> set[str]:
    """Returns the names of the sizes of a value."""
    return set(_size_names(value)) - {""}


def named_sizes(graph: ir.Graph) -> frozenset[str]:
    """Returns the names of sizes of the inputs; none if most values have no sizes in the file."""
    values = [value for node in graph for value in node.outputs]
    described = sum(value.shape is not None for value in values)
    if 2 * described <= len(values):
        return frozenset()
    return frozenset(name for value in graph.inputs for name in sizes_of(value))


def sizes_read(node: ir.Node, known: frozenset[str]) -> list[str]:
    """Returns the names of the sizes that a node reads of its input; none if one is not known."""
    if node.op_type != "Shape" or node.domain or not node.inputs or node.inputs[0] is None:
        return []
    names = _size_names(node.inputs[0])
    first = node.attributes["start"].as_int() if "start" in node.attributes else 0
    last = node.attributes["end"].as_int() if "end" in node.attributes else len(names)
    names = names[first:last]
    return names if names and known.issuperset(names) else []


def sizes_behind(value: ir.Value, data: Collection[ir.Value], known: frozenset[str]) -> set[str]:
    """Returns the names of the sizes that a value is computed of, unless it is data.

    Args:
        value: The value.
        data: The values that are data.
        known: The names of sizes that are known.
    """
    found: set[str] = set()
    seen: set[ir.Value] = set()
    stack = [value]
    while stack:
        each = stack.pop()
        if each in seen or each in data:
            continue
        seen.add(each)
        node = each.producer()
        if node is not None:
            names = sizes_read(node, known)
            found.update(names)
            stack.extend(() if names else values_read(node))
    return found


@dataclass(frozen=True, slots=True)
class PartInputs:
    """The values and nodes met on the way back from the outputs of a part to its inputs."""

    needed: set[str]
    """The inputs that the part needs."""
    sizes: list[tuple[ir.Node, list[tuple[ir.Value, int]]]]
    """The nodes that read sizes, and the inputs that have these sizes, with the axes."""


def walk_back(
    graph: ir.Graph, inputs: Sequence[str], wanted: Sequence[str], known: frozenset[str]
) -> PartInputs:
    """Walks back from values, and stops at the inputs and at sizes that the inputs have.

    Args:
        graph: The whole model.
        inputs: The names of the inputs of a part.
        wanted: The names of the values that it computes.
        known: The names of sizes that are known.
    """
    values = ir.convenience.create_value_mapping(graph, include_subgraphs=False)
    given = set(inputs)
    places: dict[str, tuple[ir.Value, int]] = {}
    for each in inputs:
        for axis, name in enumerate(_size_names(values[each])):
            if name in known:
                places.setdefault(name, (values[each], axis))
    walk = PartInputs(set(), [])
    seen: set[ir.Value] = set()
    stack = [values[name] for name in wanted]
    while stack:
        value = stack.pop()
        if value in seen:
            continue
        seen.add(value)
        if value_name(value) in given:
            walk.needed.add(value_name(value))
            continue
        node = value.producer()
        if node is None:
            continue
        names = sizes_read(node, known)
        is_given = (
            node.inputs and node.inputs[0] is not None and value_name(node.inputs[0]) in given
        )
        if names and not is_given and places.keys() >= set(names):
            found = [places[name] for name in names]
            walk.sizes.append((node, found))
            walk.needed.update(value_name(place) for place, _ in found)
        else:
            stack.extend(values_read(node))
    return walk


@contextlib.contextmanager
def sizes_read_there(graph: ir.Graph, walk: PartInputs) -> Iterator[None]:
    """Has sizes read from a part's own inputs within the block; after it the graph is as before."""
    added: list[ir.Node] = []
    swapped: list[tuple[ir.Value, ir.Value]] = []
    try:
        for index, (node, places) in enumerate(walk.sizes):
            reads = [
                ir.node("Shape", [value], {"start": axis, "end": axis + 1})
                for value, axis in places
            ]
            outputs = [read.outputs[0] for read in reads]
            made = [*reads, ir.node("Concat", outputs, {"axis": 0})] if len(reads) > 1 else reads
            for at, each in enumerate(made):
                each.outputs[0].name = f"catenary_size_{index}_{at}"
            # The inputs of the part come before its first node, wherever they are computed.
            graph.insert_before(graph[0], made)
            added.extend(made)
            swapped.append((node.outputs[0], made[-1].outputs[0]))
            ir.convenience.replace_all_uses_with(*swapped[-1], replace_graph_outputs=True)
        yield
    finally:
        for old, new in swapped:
            ir.convenience.replace_all_uses_with(new, old, replace_graph_outputs=True)
        graph.remove(added[::-1], safe=True)


def _bodies(node: ir.Node) -> Iterator[ir.Graph]:
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            yield attribute.as_graph()
        elif attribute.type == ir.AttributeType.GRAPHS:
            yield from attribute.as_graphs()


def value_name(value: ir.Value) -> str:
    """Returns the name of a value; "" if it has none."""
    return value.name or ""
