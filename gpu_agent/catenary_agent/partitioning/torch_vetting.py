"""The rules for graphs of exported programs: operators must be listed, and tensors small.

`torch_operators.txt` names every overload that is accepted (`census` makes it). Everything but
tensors computed from tensors is refused: files, random numbers, memory by address, nested graphs,
objects, changes of weights. All of this is read from the archive's JSON before PyTorch sees a byte
of it. The texts of sizes have their own rules, in `torch_sizes`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from catenary_agent.partitioning.torch_sizes import (
    LARGEST_INTEGER,
    MOST_BITS,
    SIZE_BITS,
    SizeRules,
)
from catenary_agent.words import words
from catenary_services.errors import InvalidInput

_OPERATORS = Path(__file__).with_name("torch_operators.txt")
_ATEN = "torch.ops."
_OF_SIZES = words("""
    torch.ops.aten.sym_size.int torch.ops.aten.sym_stride.int torch.ops.aten.sym_numel.default
    torch.ops.aten.sym_storage_offset.default torch.ops.aten._assert_scalar.default
    torch.ops.aten._assert_tensor_metadata.default torch.ops.aten.sym_constrain_range.default
    torch.ops.aten.sym_constrain_range_for_size.default
    _operator.add _operator.sub _operator.mul _operator.floordiv _operator.truediv _operator.mod
    _operator.neg _operator.pos _operator.abs _operator.eq _operator.ne _operator.lt _operator.le
    _operator.gt _operator.ge _operator.and_ _operator.or_ _operator.not_ _operator.getitem
    math.ceil math.floor math.trunc
    torch.sym_max torch.sym_min torch.sym_not torch.sym_int torch.sym_float torch.sym_ite
    torch.sym_sum
""")
"""Functions that exporters use to compute and check sizes."""
_CHANGING = {
    "aten.dropout.default": "train",
    "aten.feature_dropout.default": "train",
    "aten.batch_norm.default": "training",
    "aten.lstm.input": "train",
    "aten.gru.input": "train",
    "aten.rnn_tanh.input": "train",
    "aten.rnn_relu.input": "train",
}
"""The argument of each operator that has to be false, or else it draws random numbers or changes
statistics."""
_FALSE = {"as_bool": False}
_MAKERS = words("""
    zeros ones full arange eye linspace new_zeros new_ones new_full expand repeat tile
    broadcast_to constant_pad_nd pad upsample one_hot repeat_interleave tril_indices
    triu_indices logspace
""")
_SIZE_ARGUMENTS = words("""
    size repeats dims pad end start n m steps output_size num_classes scale_factor scale_factors
""")
_ARGUMENTS = words("""
    as_none as_tensor as_tensors as_int as_ints as_float as_floats as_string as_sym_int
    as_sym_ints as_scalar_type as_memory_format as_layout as_device as_bool as_bools as_sym_bool
    as_sym_bools as_optional_tensors as_sym_float as_sym_floats as_optional_tensor as_complex
    as_int_lists as_float_lists
""")
_INPUTS = words("user_input parameter buffer tensor_constant constant_input")
_OUTPUTS = frozenset({"user_output"})

_MOST_NODES = 50_000
_LARGEST_MADE = 1 << 28
"""The most elements that a constant size may ask for."""
_MOST_DIMENSIONS = 64

_TREES = frozenset({None, "builtins.tuple", "builtins.list", "builtins.dict"})


@cache
def pure_operators() -> frozenset[str]:
    """Returns the overloads that only compute new tensors, with names such as "aten.add.Tensor"."""
    return frozenset(_OPERATORS.read_text("utf-8").split())


def check_graph(file: str, document: Any, *, in_place: bool) -> None:
    """Checks that a graph consists of operators and sizes that may be run.

    Args:
        file: The name of the archive in errors.
        document: The archive's JSON.
        in_place: Whether to accept operators that change their arguments, if the operator that
            makes a new tensor instead is listed. The caller rewrites them and checks what was
            changed.

    Raises:
        InvalidInput: It does not; the operator or the size is named.
    """
    try:
        _Vetting(file, in_place).check(document)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise InvalidInput(file, f"has a graph of another form: {error!r}") from error


class _Vetting:
    def __init__(self, file: str, in_place: bool) -> None:
        self._file = file
        self._in_place = in_place
        self._bits: dict[str, int] = {}
        """The most bits that each computed size can have, by name."""
        self._sizes = SizeRules(file)

    def check(self, document: Any) -> None:
        module = document["graph_module"]
        graph, signature = module["graph"], module["signature"]
        self._check_signature(signature)
        if graph.get("custom_obj_values"):
            raise self._refused("holds objects that are no tensors")
        if len(graph["nodes"]) > _MOST_NODES or len(graph["tensor_values"]) > 2 * _MOST_NODES:
            raise self._refused(f"has more than {_MOST_NODES} nodes")
        for value in graph["tensor_values"].values():
            self._check_tensor(value)
        for node in graph["nodes"]:
            self._check_node(node)
        for name, limits in document.get("range_constraints", {}).items():
            self._sizes.check_size(name)  # of products of sizes, too
            if not all(limit is None or abs(limit) <= LARGEST_INTEGER for limit in limits.values()):
                raise self._refused(f"has a size that is not arithmetic: {name[:200]!r}")
        self._check_texts(document)

    def _check_signature(self, signature: Any) -> None:
        for specs, allowed in (("input_specs", _INPUTS), ("output_specs", _OUTPUTS)):
            for spec in signature[specs]:
                unknown = {kind for kind, value in spec.items() if value is not None} - allowed
                if unknown:
                    kind = sorted(unknown)[0]
                    raise self._refused(f"has the {kind[:100]} of a program that keeps state")

    def _check_tensor(self, value: Any) -> None:
        sizes = value["sizes"]
        if len(sizes) > _MOST_DIMENSIONS:
            raise self._refused(f"has a tensor of more than {_MOST_DIMENSIONS} dimensions")
        known = math.prod(size["as_int"] for size in sizes if "as_int" in size)
        if known >= 1 << SIZE_BITS:
            raise self._refused(f"has a tensor of {known} elements")

    def _check_node(self, node: Any) -> None:
        target = node["target"]
        name = target.removeprefix(_ATEN)
        if target not in _OF_SIZES and not (
            target.startswith(_ATEN) and (name in pure_operators() or self._has_twin(name))
        ):
            raise self._refused(
                f"calls {target[:200]!r}, which is none of the operators that are run"
            )
        given = {each["name"]: each["arg"] for each in node["inputs"]}
        for argument in given.values():
            unknown = {kind for kind, value in argument.items() if value is not None} - _ARGUMENTS
            if unknown:
                kind = sorted(unknown)[0]
                raise self._refused(f"gives {target!r} something that is no tensor: {kind[:100]}")
        self._check_mode(target, name, given)
        self._check_made(target, name, given)
        self._note_bits(target, node)

    def _has_twin(self, name: str) -> bool:
        packet, _, overload = name.removeprefix("aten.").partition(".")
        is_twin = f"aten.{packet.removesuffix('_')}.{overload}" in pure_operators()
        return self._in_place and packet.endswith("_") and is_twin

    def _check_mode(self, target: str, name: str, given: dict[str, Any]) -> None:
        functional = name.replace("_.", ".", 1)
        changing = _CHANGING.get(functional)
        training = changing is not None and given.get(changing) != _FALSE
        if functional == "aten.instance_norm.default":
            keeps_stats = not _is_none(given.get("running_mean", {}))
            training = keeps_stats and given.get("use_input_stats") != _FALSE
        if functional == "aten.scaled_dot_product_attention.default":
            training = given.get("dropout_p", {"as_float": 0.0}) != {"as_float": 0.0}
        if training:
            raise self._refused(f"calls {target!r} as in training")

    def _check_made(self, target: str, name: str, given: dict[str, Any]) -> None:
        for argument in given.values():
            for number in _integers(argument):
                if abs(number) > LARGEST_INTEGER:
                    raise self._refused(f"calls {target!r} with a number of too many digits")
        packet = name.removeprefix("aten.").partition(".")[0].removesuffix("_")
        if packet not in _MAKERS and not packet.startswith("upsample"):
            return
        sizes = [
            number
            for key, argument in given.items()
            if key in _SIZE_ARGUMENTS
            for number in _integers(argument)
        ]
        if math.prod(max(1, abs(size)) for size in sizes) > _LARGEST_MADE:
            raise self._refused(f"calls {target!r} for more than {_LARGEST_MADE} elements")

    def _note_bits(self, target: str, node: Any) -> None:
        if not target.startswith(("_operator.", "torch.sym_", "math.")):
            return
        known = [self._bits_of(each["arg"]) for each in node["inputs"]]
        bits = sum(known) if target == "_operator.mul" else max(known, default=0) + 1
        if bits > MOST_BITS:
            raise self._refused(f"computes a size of more than {MOST_BITS} bits")
        for output in node["outputs"]:
            for value in output.values():
                if isinstance(value, dict) and isinstance(value.get("as_name"), str):
                    self._bits[value["as_name"]] = bits

    def _bits_of(self, argument: Any) -> int:
        names = [text for key, text in _texts(argument, "") if key == "as_name"]
        numbers = [number.bit_length() for number in _integers(argument)]
        return max([*(self._bits.get(name, SIZE_BITS) for name in names), *numbers], default=0)

    def _check_texts(self, document: Any) -> None:
        for key, text in _texts(document, ""):
            if key == "expr_str":
                self._sizes.check_size(text)
            elif key == "guards_code":
                self._sizes.check_guard(text)
            elif key in ("in_spec", "out_spec") and text and not _is_plain_tree(json.loads(text)):
                raise self._refused("takes or returns something other than plain containers")

    def _refused(self, message: str) -> InvalidInput:
        return InvalidInput(self._file, message)


def _is_none(argument: Any) -> bool:
    return bool(argument.get("as_none")) or argument == {"as_optional_tensor": {"as_none": True}}


def _integers(value: Any) -> Iterator[int]:
    """Yields every integer within an argument."""
    for below in _nodes(value):
        if isinstance(below, int) and not isinstance(below, bool):
            yield below


def _texts(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """Yields every text within `value`, with the name of the field (or of the list) it is in."""
    if isinstance(value, dict):
        for name, below in value.items():
            yield from _texts(below, name)
    elif isinstance(value, list):
        for below in value:
            yield from _texts(below, key)
    elif isinstance(value, str):
        yield key, value


def _is_plain_tree(spec: Any) -> bool:
    return all(
        node["type"] in _TREES for node in _nodes(spec) if isinstance(node, dict) and "type" in node
    )


def _nodes(value: Any) -> Iterator[Any]:
    yield value
    inside = value.values() if isinstance(value, dict) else value
    for below in inside if isinstance(value, dict | list) else ():
        yield from _nodes(below)
