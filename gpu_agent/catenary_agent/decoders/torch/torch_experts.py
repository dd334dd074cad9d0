"""Experts of a block, as the experts function of `transformers` modules.

Routers and experts come from `transformers`, and all experts of a block are in it. Their modules
call `compute_experts`, which multiplies the rows of each expert with its matrices, in any number
format: what enters a matrix is rounded as for all others (`torch_wide`).
"""

from __future__ import annotations

from typing import Any

import torch

from catenary_agent.decoders.torch.torch_wide import product, rounded

EXPERTS = "catenary"
"""The name under which `compute_experts` is registered with `transformers`."""


def compute_experts(
    module: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Returns the weighted sum of what the chosen experts make of each row.

    Args:
        module: A module with the matrices of all experts, stacked.
        hidden: [rows, hidden size].
        chosen: The experts of each row: int64 [rows, experts per row].
        weights: Their weights, of the same shape.
    """
    each = chosen.shape[1]
    experts = chosen.flatten()
    # Sorted by expert, in the order of the rows.
    order = torch.argsort(experts, stable=True)
    counts = torch.bincount(experts, minlength=module.num_experts).tolist()
    factors = weights.flatten()
    result = torch.zeros_like(hidden)
    begin = 0
    for expert, count in enumerate(counts):
        if not count:
            continue
        places = order[begin : begin + count]
        begin += count
        rows = places // each
        inner = module._apply_gate(_times(module, "gate_up_proj", expert, hidden[rows]))
        made = _times(module, "down_proj", expert, inner)
        result.index_add_(0, rows, made.mul_(factors[places, None]))
    return result


def _times(module: Any, name: str, expert: int, rows: torch.Tensor) -> torch.Tensor:
    """Returns float32 [n, outputs]: rows times one of an expert's matrices, plus its bias."""
    weight = getattr(module, name)[expert]
    if module.is_transposed:
        weight = weight.t()
    result = product(rounded(rows, weight.dtype), weight)
    if module.has_bias:
        result += getattr(module, f"{name}_bias")[expert]
    return result
