"""A program that makes `torch_operators.txt`, the operators that `torch.export` writes for models.

    python -m catenary_agent.partitioning.census

Every module of `census_examples` is exported with a free batch, once as it is and once rewritten
without in-place operations. Of the operators seen, the pure ones are kept: see `is_pure`.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from catenary_agent.partitioning.census_examples import examples
from catenary_agent.words import words

LIST = Path(__file__).with_name("torch_operators.txt")
QUIET = words("""
    aten.dropout.default aten.feature_dropout.default aten.batch_norm.default
    aten.instance_norm.default aten.scaled_dot_product_attention.default aten.lstm.input
    aten.gru.input aten.rnn_tanh.input aten.rnn_relu.input
""")
"""Operators that are pure only with certain arguments, which `torch_vetting` checks."""
_NEVER = tuple(
    words("""
        aten.empty aten.new_empty aten.as_strided aten.from_file aten.set aten.resize aten.item
        aten._local_scalar_dense aten.nonzero aten._unsafe_index aten._unsafe_masked_index
        aten.record_stream aten.rand aten.normal aten.bernoulli aten.multinomial aten.unique
        aten._efficient
    """)
)
"""Operators that return uninitialised memory, memory by address, unchecked indices, or sizes that
depend on data."""


def is_pure(operator: Any) -> bool:
    """Returns True if an operator reads its tensors, makes new ones and does nothing else.

    This is decided by its schema: no argument is written to, none is a generator, a file, a stream
    or an output, and it draws no random numbers.
    """
    name = str(operator)
    if name.startswith(_NEVER):
        return False
    schema = operator._schema
    for argument in schema.arguments:
        kind = str(argument.type)
        if argument.alias_info is not None and argument.alias_info.is_write:
            return False
        if argument.is_out or argument.name in ("out", "filename", "source"):
            return False
        if any(word in kind for word in ("Generator", "Stream", "Storage", "__torch__")):
            return False
    # Such an operator's size depends on data. That of an index by a mask may, too, but other
    # indexing is written with the same operator.
    if torch.Tag.dynamic_output_shape in operator.tags and name != "aten.index.Tensor":
        return False
    seeded = torch.Tag.nondeterministic_seeded in operator.tags
    return not schema.is_mutable and (not seeded or name in QUIET)


def functional_of(operator: Any) -> Any | None:
    """Returns the operator that makes a new tensor where an in-place one changes its argument.

    The result is None if there is none.
    """
    packet, _, overload = str(operator).removeprefix("aten.").partition(".")
    twin = getattr(torch.ops.aten, packet.removesuffix("_"), None)
    return getattr(twin, overload, None) if packet.endswith("_") else None


def census() -> set[str]:
    """Returns the names of the pure operators in all exported examples."""
    found: set[str] = set()
    for module, arguments in examples():
        for operator in _operators(module, arguments):
            for each in (operator, functional_of(operator)):
                if each is not None and str(each).startswith("aten.") and is_pure(each):
                    found.add(str(each))
    return found


def _operators(module: nn.Module, arguments: tuple[torch.Tensor, ...]) -> Iterator[Any]:
    batch = torch.export.Dim("batch", min=1, max=64)
    for dynamic in (tuple({0: batch} for _ in arguments), None):
        try:
            program = torch.export.export(
                module.eval(), arguments, dynamic_shapes=dynamic, strict=False
            )
        except Exception:  # some modules fix their batch; they are exported with a fixed one
            continue
        # A decomposition without rules only replaces in-place operations.
        for each in (program, copy.deepcopy(program).run_decompositions({})):
            for graph in [m.graph for m in each.graph_module.modules() if hasattr(m, "graph")]:
                for node in graph.nodes:
                    if isinstance(node.target, torch._ops.OpOverload):
                        yield node.target
        return


if __name__ == "__main__":
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        operators = sorted(census())
    LIST.write_text("\n".join(operators) + "\n")
    print(f"{len(operators)} operators in {LIST}")
