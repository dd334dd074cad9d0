"""ONNX files written by hand: what exporters other than PyTorch's do, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from catenary_services.models.model_repository import ModelRepository
from compared_models.graphs import KEY, Answers, Arrays, GraphCase, whole
from small_models.text_models import write_words

FLOAT = TensorProto.FLOAT
OPSETS = (13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23)
_TYPES = {"FP16": np.float16, "FP64": np.float64, "INT8": np.int8, "INT32": np.int32}


def made(
    repository: ModelRepository,
    nodes: Sequence[onnx.NodeProto],
    weights: Sequence[onnx.TensorProto] = (),
    functions: Sequence[onnx.FunctionProto] = (),
    opsets: Mapping[str, int] | None = None,
    shape: Sequence[object] = ("n", 8),
    kind: int = FLOAT,
) -> None:
    """Writes a model from "x" to "y"."""
    x = helper.make_tensor_value_info("x", kind, shape)
    y = helper.make_tensor_value_info("y", FLOAT, None)
    graph = helper.make_graph(list(nodes), "g", [x], [y], list(weights))
    domains = {"": 18} | dict(opsets or {})
    model = helper.make_model(
        graph,
        functions=list(functions),
        ir_version=10,
        opset_imports=[helper.make_opsetid(name, version) for name, version in domains.items()],
    )
    onnx.save(model, repository.model_file(KEY))


def function(name: str, body: Sequence[onnx.NodeProto], **domains: int) -> onnx.FunctionProto:
    opsets = [
        helper.make_opsetid("" if domain == "main" else domain, version)
        for domain, version in domains.items()
    ]
    return helper.make_function("own", name, ["a"], ["b"], list(body), opsets)


def _weight(name: str, *shape: int) -> onnx.TensorProto:
    values = np.random.default_rng(len(name)).normal(size=shape).astype(np.float32)
    return numpy_helper.from_array(values, name)


def several_domains(repository: ModelRepository) -> None:
    inner = function("Softer", [helper.make_node("Softsign", ["a"], ["b"])], main=18)
    outer = function(
        "Twice",
        [
            helper.make_node("Softer", ["a"], ["c"], domain="own"),
            helper.make_node("Softer", ["c"], ["b"], domain="own"),
        ],
        main=18,
        own=1,
    )
    nodes = [
        helper.make_node("Twice", ["x"], ["h0"], domain="own"),
        helper.make_node("Gelu", ["h0"], ["h1"], domain="com.microsoft"),
        helper.make_node("Normalizer", ["h1"], ["h2"], domain="ai.onnx.ml", norm="L2"),
        helper.make_node("Twice", ["h2"], ["y"], domain="own"),
    ]
    domains = {"own": 1, "com.microsoft": 1, "ai.onnx.ml": 3}
    made(repository, nodes, functions=[inner, outer], opsets=domains)


def bfloat16_inside(repository: ModelRepository) -> None:
    nodes = [
        helper.make_node("Softsign", ["x"], ["h0"]),
        helper.make_node("Cast", ["h0"], ["h1"], to=TensorProto.BFLOAT16),
        helper.make_node("Cast", ["h1"], ["h2"], to=TensorProto.FLOAT),
        helper.make_node("Softsign", ["h2"], ["y"]),
    ]
    made(repository, nodes)


def branching(repository: ModelRepository) -> None:
    """Writes a model whose branches have weights of their own, in a file beside the graph."""

    def branch(name: str) -> onnx.GraphProto:
        out = helper.make_tensor_value_info(f"{name}_out", FLOAT, None)
        node = helper.make_node("MatMul", ["h", f"w_{name}"], [f"{name}_out"])
        return helper.make_graph([node], name, [], [out], [_weight(f"w_{name}", 8, 8)])

    nodes = [
        helper.make_node("Softsign", ["x"], ["h"]),
        helper.make_node("ReduceSum", ["h"], ["sum"], keepdims=0),
        helper.make_node("Greater", ["sum", "zero"], ["positive"]),
        helper.make_node(
            "If", ["positive"], ["c"], then_branch=branch("then"), else_branch=branch("other")
        ),
        helper.make_node("Softsign", ["c"], ["y"]),
    ]
    made(repository, nodes, [numpy_helper.from_array(np.array(0, np.float32), "zero")])
    _beside(repository, "w.data")


def _layers(repository: ModelRepository, opset: int = 18, kind: int = FLOAT) -> None:
    """Writes layers that have a projection, a softmax and a residual connection."""
    nodes = [helper.make_node("Cast", ["x"], ["h0"], to=FLOAT)]
    weights = []
    for at in range(3):
        out = f"h{at + 1}" if at < 2 else "y"
        weights += [_weight(f"weight_{at}", 8, 8), _weight(f"bias_number_{at}", 8)]
        nodes += [
            helper.make_node("MatMul", [f"h{at}", f"weight_{at}"], [f"m{at}"]),
            helper.make_node("Add", [f"m{at}", f"bias_number_{at}"], [f"a{at}"]),
            helper.make_node("Softmax", [f"a{at}"], [f"s{at}"], axis=-1),
            helper.make_node("Add", [f"s{at}", f"h{at}"], [out]),
        ]
    made(repository, nodes, weights, opsets={"": opset}, kind=kind)


def _of_type(name: str, repository: ModelRepository) -> None:
    _layers(repository, kind=helper.np_dtype_to_tensor_dtype(np.dtype(_TYPES[name])))


def quantised_by_rows_at_once(repository: ModelRepository) -> None:
    """Writes what ONNX Runtime's quantisation at run time makes: one scale for all rows."""
    nodes = []
    weights = [numpy_helper.from_array(np.array(0.02, np.float32), "step")]
    for at in range(2):
        name, out = f"codes_{at}", f"h{at + 1}" if at < 1 else "y"
        codes = np.random.default_rng(at).integers(-127, 128, (8, 8)).astype(np.int8)
        weights.append(numpy_helper.from_array(codes, name))
        given = "x" if at == 0 else f"h{at}"
        nodes += [
            helper.make_node("DynamicQuantizeLinear", [given], [f"q{at}", f"s{at}", f"z{at}"]),
            helper.make_node("MatMulInteger", [f"q{at}", name, f"z{at}"], [f"i{at}"]),
            helper.make_node("Cast", [f"i{at}"], [f"f{at}"], to=FLOAT),
            helper.make_node("Mul", [f"f{at}", f"s{at}"], [f"m{at}"]),
            helper.make_node("Mul", [f"m{at}", "step"], [out]),
        ]
    made(repository, nodes, weights)


def _by_runtime(write: Callable[[ModelRepository], object], repository: ModelRepository) -> Answers:
    write(repository)
    return partial(whole, repository.model_file(KEY))


def _rows(*sizes: int, kind: type[np.generic] = np.float32) -> list[Arrays]:
    generator = np.random.default_rng(5)
    return [{"x": (2 * generator.normal(size=(rows, 8))).astype(kind)} for rows in sizes]


def _words(repository: ModelRepository) -> Answers:
    file = write_words(repository, KEY)

    def answers(inputs: Arrays) -> list[np.ndarray]:
        texts = np.vectorize(bytes.decode, otypes=[np.object_])(inputs["words"])
        return whole(file, {"words": texts})

    return answers


def _texts() -> list[Arrays]:
    words = [[b"Cat", b"dog"], ["Übung".encode(), b""], [b"dog", b"a\0b"]]
    return [{"words": np.array(words[:rows], np.object_)} for rows in (3, 1)]


def _case(
    write: Callable[[ModelRepository], object],
    kind: type[np.generic] = np.float32,
    batched: bool = True,
) -> GraphCase:
    return GraphCase(partial(_by_runtime, write), partial(_rows, 3, 1, kind=kind), batched)


CASES = {
    **{("ONNX", f"opset {opset}"): _case(partial(_layers, opset=opset)) for opset in OPSETS},
    **{("ONNX", name): _case(partial(_of_type, name), kind) for name, kind in _TYPES.items()},
    ("ONNX", "texts"): GraphCase(_words, _texts),
    ("ONNX", "functions and several domains"): _case(several_domains),
    ("ONNX", "bfloat16 inside"): _case(bfloat16_inside),
    ("ONNX", "branches, weights beside the graph"): _case(branching, batched=False),
    ("ONNX", "quantised at run time"): _case(quantised_by_rows_at_once, batched=False),
}
"""By the form of the file and what is special of it, as docs/families.md has them."""


# ---- what is refused ----


def _beside(repository: ModelRepository, name: str) -> Path:
    file = repository.model_file(KEY)
    model = onnx.load(file)
    onnx.save(model, file, save_as_external_data=True, location=name, size_threshold=0)
    return file.with_name(name)


def unknown_operator(repository: ModelRepository) -> None:
    node = helper.make_node("Mystery", ["x"], ["y"], domain="com.example", name="the_odd_one")
    made(repository, [node], opsets={"com.example": 1})


def unknown_standard_operator(repository: ModelRepository) -> None:
    made(repository, [helper.make_node("Mystery", ["x"], ["y"], name="the_odd_one")])


def wrong_attribute(repository: ModelRepository) -> None:
    node = helper.make_node("Concat", ["x", "x"], ["y"], name="the_odd_one", axis=7)
    made(repository, [node])


def function_of_another_opset(repository: ModelRepository) -> None:
    body = [helper.make_node("Softsign", ["a"], ["b"])]
    call = helper.make_node("Older", ["x"], ["y"], domain="own", name="the_odd_one")
    made(repository, [call], functions=[function("Older", body, main=13)], opsets={"own": 1})


def function_that_calls_itself(repository: ModelRepository) -> None:
    body = [helper.make_node("Endless", ["a"], ["b"], domain="own")]
    call = helper.make_node("Endless", ["x"], ["y"], domain="own", name="the_odd_one")
    endless = function("Endless", body, main=18, own=1)
    made(repository, [call], functions=[endless], opsets={"own": 1})


def a_name_used_twice(repository: ModelRepository) -> None:
    # PyTorch writes this where a name in `output_names` is that of a value inside.
    nodes = [
        helper.make_node("Softsign", ["x"], ["y"], name="first"),
        helper.make_node("Softsign", ["y"], ["y"], name="the_odd_one"),
    ]
    made(repository, nodes)


def _one_weight(repository: ModelRepository, name: str) -> Path:
    made(repository, [helper.make_node("Add", ["x", "w"], ["y"])], [_weight("w", 8)])
    return _beside(repository, name)


def a_hard_link(repository: ModelRepository) -> None:
    file = _one_weight(repository, "w.data")
    file.with_name("other").hardlink_to(file)


def weights_of_a_hidden_file(repository: ModelRepository) -> None:
    _one_weight(repository, ".w")


def weights_cut_short(repository: ModelRepository) -> None:
    _one_weight(repository, "w.data").write_bytes(b"12345678")


def future_opset(repository: ModelRepository) -> None:
    made(repository, [helper.make_node("Softsign", ["x"], ["y"])], opsets={"": 400})


def bfloat16_input(repository: ModelRepository) -> None:
    node = helper.make_node("Cast", ["x"], ["y"], to=FLOAT)
    made(repository, [node], kind=TensorProto.BFLOAT16)


def a_sequence_as_input(repository: ModelRepository) -> None:
    made(repository, [helper.make_node("SequenceAt", ["x", "i"], ["y"])])
    model = onnx.load(repository.model_file(KEY))
    model.graph.input[0].CopyFrom(helper.make_tensor_sequence_value_info("x", FLOAT, ["n"]))
    model.graph.initializer.append(numpy_helper.from_array(np.array(0), "i"))
    onnx.save(model, repository.model_file(KEY))


REFUSED: dict[str, Callable[[ModelRepository], None]] = {
    "an unknown operator of another domain": unknown_operator,
    "an unknown operator": unknown_standard_operator,
    "a wrong attribute": wrong_attribute,
    "a function written for another opset": function_of_another_opset,
    "a function that calls itself": function_that_calls_itself,
    "an opset of the future": future_opset,
    "a name used twice": a_name_used_twice,
    "weights in a hard link": a_hard_link,
    "weights in a hidden file": weights_of_a_hidden_file,
    "weights cut short": weights_cut_short,
    "a sequence as input": a_sequence_as_input,
    "bfloat16 as input": bfloat16_input,
}
"""By what is special of the file."""
