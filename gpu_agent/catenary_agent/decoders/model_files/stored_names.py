"""The names and pieces that files have for tensors of `transformers` modules.

Modules have the matrices of all experts of a block in one tensor; most files have one tensor for
every expert, and its gate apart from its other half. Some families have other names in files.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from catenary_agent.decoders.model_files.embedding import EMBEDDING
from catenary_agent.decoders.model_files.families import ModelFamily

HEAD = "lm_head.weight"
_STACKED = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)")
_ROUTERS = re.compile(r".*\.(mlp|block_sparse_moe)\.(gate|router)(\.layer)?\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """A tensor of a file that is a part of a module's tensor, or all of it."""

    name: str
    shape: tuple[int, ...]
    expert: int | None = None
    """The expert whose matrix it is a part of; None for a whole tensor."""
    first_row: int = 0
    """The row of that matrix at which it begins."""


def pieces_of(
    name: str, shape: tuple[int, ...], family: ModelFamily, stored: Collection[str]
) -> list[TensorPiece]:
    """Returns the tensors in files that make up a tensor of a module.

    Args:
        name: The full name of the module's tensor.
        shape: Its shape.
        family: The family of the model.
        stored: The names of all tensors in files.
    """
    if name == HEAD and name not in stored:
        return [TensorPiece(EMBEDDING, shape)]  # a tied projection
    for ours, theirs in family.renamed:
        name = name.replace(ours, theirs)
    stacked = _STACKED.fullmatch(name)
    matrices = None if family.experts is None else family.experts.matrices
    if stacked is None or matrices is None or name in stored:
        return [TensorPiece(name, shape)]
    gate, other, down = matrices
    experts, rows, columns = shape
    names, each = ((down,), rows) if stacked[2] == "down_proj" else ((gate, other), rows // 2)
    return [
        TensorPiece(f"{stacked[1]}.{expert}.{part}.weight", (each, columns), expert, at * each)
        for expert in range(experts)
        for at, part in enumerate(names)
    ]


def is_router(name: str) -> bool:
    """Returns True for the weights that choose experts, by their name in a module or in a file.

    They stay in float32: a rounded score may choose another expert, which is another result.
    """
    return _ROUTERS.fullmatch(name) is not None
