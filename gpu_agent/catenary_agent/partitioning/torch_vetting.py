"""The rules for graphs of exported programs: operators must be listed, and sizes small.

`torch_operators.txt` names every overload that is accepted (`census` makes it). Everything but
tensors computed from tensors is refused: files, random numbers, memory by address, nested graphs,
objects, changes of weights. All of this is read from the archive's JSON before PyTorch sees a byte
of it. Numbers are bounded in their written form: `Mod(9**9**9, 7)` would never finish once
evaluated.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from catenary_services.errors import InvalidInput

_OPERATORS = Path(__file__).with_name("torch_operators.txt")
_ATEN = "torch.ops."
_OF_SIZES = frozenset(
    {
        *(
            f"torch.ops.aten.{name}"
            for name in (
                "sym_size.int",
                "sym_stride.int",
                "sym_numel.default",
                "sym_storage_offset.default",
                "_assert_scalar.default",
                "_assert_tensor_metadata.default",
                "sym_constrain_range.default",
                "sym_constrain_range_for_size.default",
            )
        ),
        *(
            f"_operator.{name}"
            for name in (
                "add",
                "sub",
                "mul",
                "floordiv",
                "truediv",
                "mod",
                "neg",
                "pos",
                "abs",
                "eq",
                "ne",
                "lt",
                "le",
                "gt",
                "ge",
                "and_",
                "or_",
                "not_",
                "getitem",
            )
        ),
        *(f"math.{name}" for name in ("ceil", "floor", "trunc")),
        *(f"torch.sym_{name}" for name in ("max", "min", "not", "int", "float", "ite", "sum")),
    }
)
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
_MAKERS = frozenset(
    {
        "zeros",
        "ones",
        "full",
        "arange",
        "eye",
        "linspace",
        "new_zeros",
        "new_ones",
        "new_full",
        "expand",
        "repeat",
        "tile",
        "broadcast_to",
        "constant_pad_nd",
        "pad",
        "upsample",
        "one_hot",
        "repeat_interleave",
        "tril_indices",
        "triu_indices",
        "logspace",
    }
)
_SIZE_ARGUMENTS = frozenset(
    {
        "size",
        "repeats",
        "dims",
        "pad",
        "end",
        "start",
        "n",
        "m",
        "steps",
        "output_size",
        "num_classes",
        "scale_factor",
        "scale_factors",
    }
)
_ARGUMENTS = frozenset(
    {
        "as_none",
        "as_tensor",
        "as_tensors",
        "as_int",
        "as_ints",
        "as_float",
        "as_floats",
        "as_string",
        "as_sym_int",
        "as_sym_ints",
        "as_scalar_type",
        "as_memory_format",
        "as_layout",
        "as_device",
        "as_bool",
        "as_bools",
        "as_sym_bool",
        "as_sym_bools",
        "as_optional_tensors",
        "as_sym_float",
        "as_sym_floats",
        "as_optional_tensor",
        "as_complex",
        "as_int_lists",
        "as_float_lists",
    }
)
_INPUTS = frozenset({"user_input", "parameter", "buffer", "tensor_constant", "constant_input"})
_OUTPUTS = frozenset({"user_output"})

_MOST_NODES = 50_000
_MOST_EXPRESSION_NODES = 512
_MOST_NODES_DIVIDED = 128
"""The most nodes of an expression with a quotient: finding common factors of large ones is slow."""
_MOST_NODES_OF_ALL = 500_000
_DEEPEST = 64
_MOST_SYMBOLS = 16
_MOST_BITS = 512
_LARGEST_INTEGER = 1 << 63
_SIZE_BITS = 40
_LARGEST_MADE = 1 << 28
"""The most elements that a constant size may ask for."""
_MOST_DIMENSIONS = 64
_LONGEST_TEXT = 16_384

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,127}")
_TREES = frozenset({None, "builtins.tuple", "builtins.list", "builtins.dict"})
_ASKED_OF_TENSORS = frozenset({"size", "shape", "stride", "storage_offset", "ndim", "dim"})
_QUOTIENTS = frozenset(
    {
        "Mod",
        "FloorDiv",
        "CleanDiv",
        "CeilDiv",
        "PythonMod",
        "ModularIndexing",
        "IntTrueDiv",
        "FloatTrueDiv",
    }
)
_FUNCTIONS = _QUOTIENTS | {
    "Symbol",
    "Integer",
    "Float",
    "Rational",
    "Add",
    "Mul",
    "Pow",
    "Max",
    "Min",
    "Abs",
    "Eq",
    "Ne",
    "Lt",
    "Le",
    "Gt",
    "Ge",
    "And",
    "Or",
    "Not",
    "floor",
    "ceiling",
    "ToFloat",
    "TruncToInt",
    "TruncToFloat",
    "RoundToInt",
    "Where",
    "Identity",
    "max",
    "min",
    "abs",
}
_LARGEST_POWER = 4
_BINARY = (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod, ast.Div)


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
        self._nodes_read = 0

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
            if not _NAME.fullmatch(name) or not all(
                limit is None or abs(limit) <= _LARGEST_INTEGER for limit in limits.values()
            ):
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
        if known >= 1 << _SIZE_BITS:
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
                if abs(number) > _LARGEST_INTEGER:
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
        if bits > _MOST_BITS:
            raise self._refused(f"computes a size of more than {_MOST_BITS} bits")
        for output in node["outputs"]:
            for value in output.values():
                if isinstance(value, dict) and isinstance(value.get("as_name"), str):
                    self._bits[value["as_name"]] = bits

    def _bits_of(self, argument: Any) -> int:
        names = [text for key, text in _texts(argument, "") if key == "as_name"]
        numbers = [number.bit_length() for number in _integers(argument)]
        return max([*(self._bits.get(name, _SIZE_BITS) for name in names), *numbers], default=0)

    def _check_texts(self, document: Any) -> None:
        for key, text in _texts(document, ""):
            if key == "expr_str":
                self._check_size(text)
            elif key == "guards_code":
                self._check_guard(text)
            elif key in ("in_spec", "out_spec") and text and not _is_plain_tree(json.loads(text)):
                raise self._refused("takes or returns something other than plain containers")

    def _check_size(self, text: str) -> None:
        tree = self._parsed(text)
        names = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)}
        symbols = {name for name in names if isinstance(name, str)}
        if len(symbols) > _MOST_SYMBOLS or not self._is_size(tree.body, 0):
            raise self._refused(f"has a size or guard that is not arithmetic: {text[:200]!r}")
        if _bits(tree.body) > _MOST_BITS:
            raise self._refused(f"has a size of more than {_MOST_BITS} bits: {text[:200]!r}")

    def _parsed(self, text: str) -> ast.Expression:
        if len(text) > _LONGEST_TEXT:
            raise self._refused(f"has a size of {len(text)} characters")
        try:
            tree = ast.parse(text, mode="eval")
        except (SyntaxError, MemoryError, ValueError):
            raise self._refused(
                f"has a size or guard that is not arithmetic: {text[:200]!r}"
            ) from None
        count = sum(1 for _ in ast.walk(tree))
        self._nodes_read += count
        if count > _MOST_EXPRESSION_NODES * 4 or self._nodes_read > _MOST_NODES_OF_ALL * 4:
            raise self._refused(f"has sizes that are too long: {text[:200]!r}")
        return tree

    def _is_size(self, node: ast.expr, depth: int) -> bool:
        """Returns True if an expression has the form of a size: nested calls of named functions."""
        below: list[ast.expr] = []
        match node:
            case ast.Constant(value=bool()):
                fits = True
            case ast.Constant(value=int() as number):
                fits = abs(number) <= _LARGEST_INTEGER
            case ast.Name(id=name):
                fits = _NAME.fullmatch(name) is not None and name not in _FUNCTIONS
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                fits, below = True, [operand]
            case ast.BinOp(op=operation, left=left, right=right):
                divides = isinstance(operation, ast.Mod | ast.FloorDiv | ast.Div)
                fits = isinstance(operation, _BINARY)
                fits = fits and (not divides or _count(node) <= _MOST_NODES_DIVIDED)
                below = [left, right]
            case ast.Call(func=ast.Name(id="Symbol" | "Float" as name)):
                fits = _is_leaf(node, name)
            case ast.Call(func=ast.Name(id="Pow"), args=[base, power], keywords=[]):
                fits, below = _is_small_power(power), [base]
            case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]):
                divides = name in _QUOTIENTS
                fits = name in _FUNCTIONS and name != "Pow"
                fits = fits and (not divides or _count(node) <= _MOST_NODES_DIVIDED)
                below = arguments
            case _:
                fits = False
        fits = fits and depth <= _DEEPEST
        return fits and all(self._is_size(each, depth + 1) for each in below)

    def _check_guard(self, text: str) -> None:
        tree = self._parsed(text)
        if not all(_is_harmless(node) for node in ast.walk(tree)):
            raise self._refused(f"has a size or guard that is not arithmetic: {text[:200]!r}")

    def _refused(self, message: str) -> InvalidInput:
        return InvalidInput(self._file, message)


def _is_none(argument: Any) -> bool:
    return bool(argument.get("as_none")) or argument == {"as_optional_tensor": {"as_none": True}}


def _is_leaf(node: ast.Call, name: str) -> bool:
    """Returns True for `Symbol('s0', positive=True)` and `Float('0.5', precision=53)`."""
    if len(node.args) != 1 or not isinstance(node.args[0], ast.Constant):
        return False
    value = node.args[0].value
    if name == "Float":
        plain = isinstance(value, str) and re.fullmatch(r"-?\d{1,40}(\.\d{1,40})?", value)
        return bool(plain) and all(
            each.arg == "precision"
            and isinstance(each.value, ast.Constant)
            and each.value.value == 53
            for each in node.keywords
        )
    return (
        isinstance(value, str)
        and _NAME.fullmatch(value) is not None
        and all(
            isinstance(each.value, ast.Constant) and isinstance(each.value.value, bool)
            for each in node.keywords
        )
    )


def _is_small_power(node: ast.expr) -> bool:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Integer":
        node = node.args[0] if len(node.args) == 1 else node
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        node = node.operand
    if not isinstance(node, ast.Constant) or not isinstance(node.value, int):
        return False
    return abs(node.value) <= _LARGEST_POWER


def _bits(node: ast.expr) -> int:  # noqa: PLR0911 - one case each
    """Returns the most bits that the value of a size can have."""
    match node:
        case ast.Constant(value=int() as number):
            return number.bit_length()
        case ast.UnaryOp(operand=operand):
            return _bits(operand)
        case ast.BinOp(op=ast.Mult(), left=left, right=right):
            return _bits(left) + _bits(right)
        case ast.BinOp(left=left, right=right):
            return max(_bits(left), _bits(right)) + 1
        case ast.Call(func=ast.Name(id="Pow"), args=[base, *_]):
            return _LARGEST_POWER * _bits(base)
        case ast.Call(func=ast.Name(id=name), args=arguments) if name != "Symbol":
            below = [_bits(each) for each in arguments]
            if name in ("Mul", "Rational"):
                return sum(below)
            return max(below, default=_SIZE_BITS) + len(below).bit_length()
    return _SIZE_BITS


def _count(node: ast.AST) -> int:
    return sum(1 for each in ast.walk(node) if isinstance(each, ast.expr)) // 2


def _is_harmless(node: ast.AST) -> bool:  # noqa: PLR0911 - one case each
    """Returns True for nodes allowed in a guard: arithmetic and comparisons of sizes."""
    match node:
        case ast.Name():
            return not node.id.startswith("__")
        case ast.Attribute():
            return node.attr in _ASKED_OF_TENSORS
        case ast.Call(func=ast.Name(id=name)):
            return name in _FUNCTIONS
        case ast.Call(func=ast.Attribute(attr=name)):
            return name in _ASKED_OF_TENSORS
        case ast.Call():
            return False
        case ast.Constant(value=bool() | None):
            return True
        case ast.Constant(value=int() | float() as number):
            return abs(number) <= _LARGEST_INTEGER
        case ast.Constant(value=str() as text):
            # `sympify` parses texts as expressions, so only names are allowed.
            return _NAME.fullmatch(text) is not None
        case ast.Pow() | ast.LShift() | ast.MatMult():
            return False
    return isinstance(
        node,
        ast.Expression
        | ast.BoolOp
        | ast.BinOp
        | ast.UnaryOp
        | ast.Compare
        | ast.keyword
        | ast.Load
        | ast.Subscript
        | ast.operator
        | ast.unaryop
        | ast.boolop
        | ast.cmpop
        | ast.Tuple,
    )


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
