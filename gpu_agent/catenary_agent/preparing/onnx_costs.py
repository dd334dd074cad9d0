"""Counts of the work in an ONNX model's blocks: convolutions, matrix products, the rest by size.

Shapes are those that values had in a run with one row, so no shape inference can fail. Recurrent
operations count as their matrix products. Whatever else has no formula counts as one operation per
element written, which is right for element-wise work and too small for the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from catenary_agent.partitioning.onnx_graph import extract_part, load_onnx
from catenary_agent.partitioning.signature import PartitionSignature
from catenary_agent.preparing.costs import Operation, kernels_of
from catenary_agent.preparing.onnx_probe import OnnxProbe
from catenary_agent.words import words
from catenary_services.domain.model import BlockCosts, BlockTable, KernelCost
from catenary_services.domain.tensors import ARRAY_DTYPE_OF, BYTES, zeros

Shapes = Mapping[str, tuple[int, ...]]

_ELEMENT_WISE = words("""
    Abs Add And BatchNormalization Cast Ceil Clip Cos Div Elu Equal Erf Exp Floor Gelu Greater
    GreaterOrEqual HardSigmoid HardSwish LeakyRelu Less LessOrEqual Log Max Min Mish Mul Neg Not
    Or PRelu Pow Reciprocal Relu Round Selu Sigmoid Sign Sin Softplus Softsign Sqrt Sub Sum Tanh
    Where
""")
_FREE = words("Dropout Flatten Identity Pad Reshape Shape Squeeze Unsqueeze")
"""Operations that rename or reshape. Padding becomes part of the convolution behind it in runtimes
that fuse."""
_FEW_CHANNELS = 16
"""Convolutions with fewer input channels per group do not fill tensor cores."""


def count_onnx(file: Path, table: BlockTable, parts: Sequence[PartitionSignature]) -> BlockCosts:
    """Returns the kernels of every block for one row."""
    source = load_onnx(file)
    example = {
        spec.name: _example(spec.datatype, shape)
        for spec, shape in zip(parts[0].inputs, parts[0].example_inputs, strict=True)
    }
    with OnnxProbe(source, file.name) as probe:
        shapes = {name: array.shape for name, array in probe.run(example).items()}
    data = {value.name for node in source.data_nodes for value in node.outputs}
    data.update(source.inputs)
    blocks = []
    for given, wanted in zip(table.boundaries[:-1], table.boundaries[1:], strict=True):
        names = {spec.name for spec in given.tensors}
        made = [spec for spec in wanted.tensors if spec.name not in names]
        part = extract_part(source, given.tensors, made)
        blocks.append(_block(part.graph, shapes, data, {spec.name for spec in made}))
    return tuple(blocks)


def _example(datatype: str, shape: tuple[int, ...]) -> np.ndarray:
    if datatype == BYTES:
        return zeros(datatype, shape)
    dtype = ARRAY_DTYPE_OF[datatype]
    values = (
        np.random.default_rng(0).standard_normal(shape) if dtype.kind == "f" else np.ones(shape)
    )
    return values.astype(dtype)


def _block(
    graph: ir.Graph, shapes: Shapes, data: set[str | None], outputs: set[str]
) -> tuple[KernelCost, ...]:
    operations = []
    for node in graph:
        written = tuple(v.name for v in node.outputs if v.name)
        if not data.intersection(written):
            continue  # constant arithmetic is computed once, when the model is loaded
        given = [value for value in node.inputs if value is not None]
        operations.append(
            Operation(
                reads=tuple(v.name for v in given if v.name in data and v.name),
                writes=written,
                flops=_flops(node, shapes),
                weight_elements=sum(_elements(v) for v in given if v.name not in data),
                dense=_is_dense(node, shapes),
                element_wise=node.op_type in _ELEMENT_WISE,
                free=node.op_type in _FREE,
            )
        )
    sizes = {name: float(math.prod(shape)) for name, shape in shapes.items()}
    return kernels_of(operations, sizes, outputs)


def _elements(weight: ir.Value) -> float:
    return float(weight.const_value.size) if weight.const_value is not None else 0.0


def _shape(node: ir.Node, index: int, shapes: Shapes) -> tuple[int, ...]:
    """Returns the shape of an input, from the run or of a weight; () if it is unknown."""
    value = node.inputs[index] if index < len(node.inputs) else None
    if value is None:
        return ()
    if value.name in shapes:
        return shapes[value.name or ""]
    return tuple(value.const_value.shape.numpy()) if value.const_value is not None else ()


def _written(node: ir.Node, shapes: Shapes) -> float:
    return float(sum(math.prod(shapes.get(v.name or "", (0,))) for v in node.outputs))


def _attribute(node: ir.Node, name: str, default: int) -> int:
    return int(node.attributes[name].as_int()) if name in node.attributes else default


def _kernel_size(node: ir.Node, shapes: Shapes) -> int:
    if "kernel_shape" in node.attributes:
        return math.prod(node.attributes["kernel_shape"].as_ints())
    return math.prod(_shape(node, 1, shapes)[2:])


def _flops(node: ir.Node, shapes: Shapes) -> float:
    formula = _FORMULAS.get(node.op_type)
    if node.op_type in _FREE:
        return 0.0
    return _written(node, shapes) if formula is None else formula(node, shapes)


def _convolution(node: ir.Node, shapes: Shapes) -> float:
    channels = _shape(node, 0, shapes)[1] // _attribute(node, "group", 1)
    return 2.0 * _written(node, shapes) * channels * _kernel_size(node, shapes)


def _transposed_convolution(node: ir.Node, shapes: Shapes) -> float:
    """Returns the operations of a transposed convolution.

    Every element read contributes to the kernel and the output channels of its group.
    """
    written = shapes[node.outputs[0].name or ""][1] // _attribute(node, "group", 1)
    read = math.prod(_shape(node, 0, shapes))
    return 2.0 * read * written * _kernel_size(node, shapes)


def _matrix_product(node: ir.Node, shapes: Shapes) -> float:
    left = _shape(node, 0, shapes)
    inner = left[0] if node.op_type == "Gemm" and _attribute(node, "transA", 0) else left[-1]
    return 2.0 * _written(node, shapes) * inner


def _recurrent(gates: int) -> Callable[[ir.Node, Shapes], float]:
    def flops(node: ir.Node, shapes: Shapes) -> float:
        steps, rows, width = _shape(node, 0, shapes)
        hidden = _attribute(node, "hidden_size", 1)
        directions = _shape(node, 1, shapes)[:1] or (1,)
        return 2.0 * steps * rows * gates * hidden * (width + hidden) * directions[0]

    return flops


def _pooling(node: ir.Node, shapes: Shapes) -> float:
    return _written(node, shapes) * max(1, _kernel_size(node, shapes))


def _reduction(node: ir.Node, shapes: Shapes) -> float:
    return float(math.prod(_shape(node, 0, shapes)))


_FORMULAS: Mapping[str, Callable[[ir.Node, Shapes], float]] = {
    "AveragePool": _pooling,
    "Conv": _convolution,
    "ConvTranspose": _transposed_convolution,
    "GRU": _recurrent(3),
    "Gemm": _matrix_product,
    "GlobalAveragePool": _reduction,
    "LSTM": _recurrent(4),
    "MatMul": _matrix_product,
    "MaxPool": _pooling,
    "RNN": _recurrent(1),
    "ReduceMax": _reduction,
    "ReduceMean": _reduction,
    "ReduceSum": _reduction,
}


def _is_dense(node: ir.Node, shapes: Shapes) -> bool:
    if node.op_type in ("Conv", "ConvTranspose"):
        return _shape(node, 0, shapes)[1] // _attribute(node, "group", 1) >= _FEW_CHANNELS
    return node.op_type in ("Gemm", "MatMul", "LSTM", "GRU", "RNN")
