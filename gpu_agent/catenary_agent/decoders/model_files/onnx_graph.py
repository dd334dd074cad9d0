"""Cutting of a Llama-family ONNX graph, made by the onnxruntime-genai builder, by decoder block.

Between two blocks the builder's graph passes two tensors: the residual stream, and the same
normalised for the next block. One fused node, SkipSimplifiedLayerNormalization, makes both. At a
cut it is replaced by Add and SimplifiedLayerNormalization, so that only the residual stream, the
"hidden states", crosses (measured: no cost). Weights stay in the builder's external data file; a
part refers to the ranges it needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir
from onnx_ir.convenience import extract

from catenary_agent.partitioning.onnx_file import read_onnx
from catenary_services.errors import InvalidInput

GRAPH_FILE = "model.onnx"
HIDDEN_IN = "hidden_in"
HIDDEN_OUT = "hidden_out"
LOGITS = "logits"
_ATTENTION = "GroupQueryAttention"
_SCALES = ".MatMul.weight_scales"
_ANGLES = ("cos_cache", "sin_cache")
WeightRanges = dict[str, list[tuple[int, int]]]
"""The offset and length of every weight, by file name."""
_PAST_KEY, _PAST_VALUE, _LENGTHS, _TOTAL = 3, 4, 5, 6
"""Input indices of a GroupQueryAttention node."""


@dataclass(frozen=True, slots=True)
class BlockGraph:
    """Blocks `[first, last)` as a serialised graph, with the names of its inputs and outputs."""

    content: bytes
    lengths: str
    """Name of the input int32 [batch]: the tokens of each row after this call, minus one."""
    total: str
    """Name of the input int32 scalar: the largest number of tokens after this call."""
    past: tuple[str, ...]
    """Names of the inputs float32 [batch, heads, session tokens, head size]: key and value of each
    block."""
    present: tuple[str, ...]
    """Names of the outputs, which are bound to the same memory as `past`."""
    weights: WeightRanges
    """The ranges that the graph reads of the files beside it."""


def cut_blocks(folder: Path, first: int, last: int) -> BlockGraph:
    """Returns blocks `[first, last)` of the graph in `folder`, without embedding and head.

    The inputs are `HIDDEN_IN`, float32 [batch, tokens, hidden], lengths and caches; the output is
    `HIDDEN_OUT`.

    Raises:
        InvalidInput: The graph does not consist of decoder blocks with grouped-query attention.
    """
    model = _load(folder)
    attention = _attention_nodes(model)
    if not 0 <= first < last <= len(attention):
        raise InvalidInput("partition", f"[{first}, {last}) of {len(attention)} blocks")
    entry = _hidden_before(model, first, len(attention))
    leaving = _hidden_before(model, last, len(attention))
    nodes = attention[first:last]
    past = [_given(node, index) for node in nodes for index in (_PAST_KEY, _PAST_VALUE)]
    present = [node.outputs[index] for node in nodes for index in (1, 2)]
    lengths, total = _given(nodes[0], _LENGTHS), _given(nodes[0], _TOTAL)
    for value in (lengths, total):
        value.type = ir.TensorType(ir.DataType.INT32)
    lengths.shape, total.shape = ir.Shape(["batch"]), ir.Shape([])
    graph = extract(model.graph, [entry, lengths, total, *past], [leaving, *present])
    _rename(graph)
    return BlockGraph(
        content=_serialise(graph, model),
        lengths=str(lengths.name),
        total=str(total.name),
        past=tuple(str(value.name) for value in past),
        present=tuple(str(value.name) for value in present),
        weights=_ranges(graph),
    )


def cut_head(folder: Path) -> tuple[bytes, WeightRanges]:
    """Returns the last norm and the projection as a graph, and the weight ranges it reads.

    It maps `HIDDEN_IN`, float32 [batch, tokens, hidden], to `LOGITS`.
    """
    model = _load(folder)
    blocks = len(_attention_nodes(model))
    graph = extract(model.graph, [_hidden_before(model, blocks, blocks)], [model.graph.outputs[0]])
    _rename(graph, LOGITS)
    return _serialise(graph, model), _ranges(graph)


def part_bytes(folder: Path) -> tuple[list[int], int]:
    """Returns the bytes of each block's weights, and of the head's, as ONNX Runtime keeps them.

    They are the sizes in the graph, except that the scales of quantised matrices count twice: they
    are packed together with the matrix and also kept as they were (measured with version 1.31).
    """
    model = _load(folder)
    blocks = len(_attention_nodes(model))
    sizes, head = [0] * blocks, 0
    for name, value in model.graph.initializers.items():
        parts = name.split(".")
        size = value.const_value.nbytes if value.const_value is not None else 0
        size *= 2 if name.endswith(_SCALES) else 1
        if name.startswith("model.layers.") and int(parts[2]) < blocks:
            sizes[int(parts[2])] += size
        elif name.startswith(("model.layers.", "lm_head.")):
            head += size
    return sizes, head


def angle_bytes(folder: Path) -> int:
    """Returns the bytes of the position angles, which every range of blocks holds once."""
    values = _load(folder).graph.initializers.items()
    return sum(
        value.const_value.nbytes
        for name, value in values
        if name in _ANGLES and value.const_value is not None
    )


def _load(folder: Path) -> ir.Model:
    try:
        return read_onnx(folder / GRAPH_FILE, takes_links=True)
    except FileNotFoundError:
        raise InvalidInput(folder.name, f"has no {GRAPH_FILE}: import the model again") from None


def _attention_nodes(model: ir.Model) -> list[ir.Node]:
    nodes = [node for node in model.graph if node.op_type == _ATTENTION]
    if not nodes:
        raise InvalidInput(GRAPH_FILE, f"has no {_ATTENTION}: this family is not supported")
    return nodes


def _given(node: ir.Node, index: int) -> ir.Value:
    value = node.inputs[index]
    if value is None:
        raise InvalidInput(GRAPH_FILE, f"{node.name} has no input {index}")
    return value


def _hidden_before(model: ir.Model, block: int, blocks: int) -> ir.Value:
    """Returns the hidden states before a block, or before the head for `blocks`; cuts there."""
    kind = "input_layernorm" if block < blocks else "final_norm_layernorm"
    prefix = f"/model/layers.{block}/{kind}/"
    found = [node for node in model.graph if (node.name or "").startswith(prefix)]
    if len(found) != 1 or not found[0].op_type.endswith("SimplifiedLayerNormalization"):
        raise InvalidInput(GRAPH_FILE, f"cannot be cut in front of block {block}")
    node = found[0]
    hidden = _split(model.graph, node) if node.op_type.startswith("Skip") else _given(node, 0)
    hidden.type = ir.TensorType(ir.DataType.FLOAT)
    hidden.shape = ir.Shape(["batch", "tokens", "hidden"])
    return hidden


def _split(graph: ir.Graph, node: ir.Node) -> ir.Value:
    """Replaces a Skip..Normalization by Add and ..Normalization; returns the value in between."""
    add = ir.node("Add", [_given(node, 0), _given(node, 1)])
    attributes = {
        "epsilon": node.attributes["epsilon"].as_float(),
        "axis": -1,
        "stash_type": 1,
    }
    norm = ir.node(
        "SimplifiedLayerNormalization",
        [add.outputs[0], _given(node, 2)],
        attributes=attributes,
    )
    for new, of in ((norm.outputs[0], 0), (add.outputs[0], 3)):
        if of < len(node.outputs):
            new.name = f"{node.name}/cut_{of}"
            new.type = ir.TensorType(ir.DataType.FLOAT)
            node.outputs[of].replace_all_uses_with(new)
    graph.insert_before(node, [add, norm])
    graph.remove(node, safe=True)
    return add.outputs[0]


def _rename(graph: ir.Graph, out: str = HIDDEN_OUT) -> None:
    graph.inputs[0].name = HIDDEN_IN
    graph.outputs[0].name = out


def _ranges(graph: ir.Graph) -> WeightRanges:
    ranges: WeightRanges = {}
    for value in graph.initializers.values():
        tensor = value.const_value
        if isinstance(tensor, ir.ExternalTensor):
            span = (tensor.offset or 0, tensor.length or tensor.nbytes)
            ranges.setdefault(str(tensor.location), []).append(span)
    return ranges


def _serialise(graph: ir.Graph, model: ir.Model) -> bytes:
    part = ir.Model(graph, ir_version=model.ir_version)
    return bytes(ir.to_proto(part).SerializeToString())
