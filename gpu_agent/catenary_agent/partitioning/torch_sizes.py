"""The rules for the sizes and guards of exported programs: short arithmetic with small numbers.

PyTorch evaluates these texts when it loads a program. They are parsed here, never evaluated, and
what is no size is refused. Numbers are bounded in their written form: `Mod(9**9**9, 7)` would
never finish once evaluated.
"""

from __future__ import annotations

import ast
import re

from catenary_agent.words import words
from catenary_services.errors import InvalidInput

NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,127}")
LARGEST_INTEGER = 1 << 63
MOST_BITS = 512
"""The most bits that a computed size may have."""
SIZE_BITS = 40
"""The most bits of a size that a tensor has."""

_MOST_EXPRESSION_NODES = 512
_MOST_NODES_DIVIDED = 128
"""The most nodes of an expression with a quotient: finding common factors of large ones is slow."""
_MOST_NODES_OF_ALL = 500_000
_DEEPEST = 64
_MOST_SYMBOLS = 16
_LONGEST_TEXT = 16_384
_ASKED_OF_TENSORS = words("size shape stride storage_offset ndim dim")
_QUOTIENTS = words("""
    Mod FloorDiv CleanDiv CeilDiv PythonMod ModularIndexing IntTrueDiv FloatTrueDiv
""")
_FUNCTIONS = _QUOTIENTS | words("""
    Symbol Integer Float Rational Add Mul Pow Max Min Abs Eq Ne Lt Le Gt Ge And Or Not
    floor ceiling ToFloat TruncToInt TruncToFloat RoundToInt Where Identity max min abs
""")
_LARGEST_POWER = 4
_BINARY = (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod, ast.Div)


class SizeRules:
    """The rules for the sizes and guards of one program, which are also limited in all.

    Args:
        file: The name of the archive in errors.
    """

    def __init__(self, file: str) -> None:
        self._file = file
        self._nodes_read = 0

    def check_size(self, text: str) -> None:
        """Checks a size, such as `s0*(s1 + 1)` in calls of named functions."""
        tree = self._parsed(text)
        names = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)}
        symbols = {name for name in names if isinstance(name, str)}
        if len(symbols) > _MOST_SYMBOLS or not self._is_size(tree.body, 0):
            raise self._refused(f"has a size or guard that is not arithmetic: {text[:200]!r}")
        if _bits(tree.body) > MOST_BITS:
            raise self._refused(f"has a size of more than {MOST_BITS} bits: {text[:200]!r}")

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
                fits = abs(number) <= LARGEST_INTEGER
            case ast.Name(id=name):
                fits = NAME.fullmatch(name) is not None and name not in _FUNCTIONS
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

    def check_guard(self, text: str) -> None:
        """Checks a guard: arithmetic and comparisons of sizes of tensors."""
        tree = self._parsed(text)
        if not all(_is_harmless(node) for node in ast.walk(tree)):
            raise self._refused(f"has a size or guard that is not arithmetic: {text[:200]!r}")

    def _refused(self, message: str) -> InvalidInput:
        return InvalidInput(self._file, message)


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
        and NAME.fullmatch(value) is not None
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
            return max(below, default=SIZE_BITS) + len(below).bit_length()
    return SIZE_BITS


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
            return abs(number) <= LARGEST_INTEGER
        case ast.Constant(value=str() as text):
            # `sympify` parses texts as expressions, so only names are allowed.
            return NAME.fullmatch(text) is not None
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
