"""Attention whose scores are capped or whose heads have sinks, step by step.

No kernel of PyTorch knows these formulas. Scores are computed over some keys at a time, and the
softmax is corrected by each part, as FlashAttention does (Dao, arXiv 2307.08691), so that memory is
bounded whatever the context. A sink is what the softmax begins with.
"""

from __future__ import annotations

import torch

from catenary_agent.decoders.model_files.sizes import SCORED_BYTES, SCORED_ROWS

ScoreFormula = tuple[float, int | None, float | None, torch.Tensor | None]
"""The factor of scores, the window, the cap and the sinks; see `torch_attention.attend`."""
_NOTHING_SEEN = -1e30
"""A score below all others, whose differences are numbers."""


def chunk_by_formula(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    within: tuple[int, ScoreFormula],
) -> torch.Tensor:
    """Returns `by_formula` for the last rows of a session, some at a time."""
    used, how = within
    new = query.shape[2]
    parts = []
    for first in range(0, new, SCORED_ROWS):
        rows = query[:, :, first : first + SCORED_ROWS]
        end = used - new + first + rows.shape[2]
        # A single row attends to all that the caller gives.
        seen = chunk_mask(rows.shape[2], end, how[1], query.device)[None] if new > 1 else None
        parts.append(by_formula(rows, keys[:, :, :end], values[:, :, :end], seen, how))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def by_formula(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    seen: torch.Tensor | None,
    how: ScoreFormula,
) -> torch.Tensor:
    """Attends with capped scores and sinks, over some keys at a time.

    Args:
        query: [sessions, heads, rows, head size].
        keys: [sessions, key-value heads, tokens, head size].
        values: The same shape as `keys`.
        seen: The tokens that each row attends to: bool [sessions or 1, rows, tokens]; None for all.
        how: The formula.

    Returns:
        The same shape and datatype as `query`.
    """
    scaling, _, cap, sinks = how
    sessions, heads, rows, size = query.shape
    groups, used = keys.shape[1:3]
    parts = (sessions, groups, heads // groups, rows)
    # The heads that share a key head become rows of one query.
    grouped = query.reshape(sessions, groups, -1, size).float() * scaling
    best = grouped.new_full((*parts, 1), _NOTHING_SEEN)
    if sinks is not None:
        best = best.copy_(sinks.float().view(1, groups, -1, 1, 1))
    best = best.view(*grouped.shape[:3], 1)
    total = torch.full_like(best, 0.0 if sinks is None else 1.0)
    result = torch.zeros_like(grouped)
    step = max(1, SCORED_BYTES // (sessions * 16 * (heads * rows + groups * size)))
    for first in range(0, used, step):
        scores = grouped @ keys[:, :, first : first + step].float().transpose(2, 3)
        if cap is not None:
            scores.div_(cap).tanh_().mul_(cap)
        if seen is not None:
            hidden = ~seen[:, None, None, :, first : first + step]
            scores.view(*parts, -1).masked_fill_(hidden, -torch.inf)
        most = torch.maximum(best, scores.amax(-1, keepdim=True))
        weights = scores.sub_(most).exp_()
        shrunk = best.sub_(most).exp_()
        total.mul_(shrunk).add_(weights.sum(-1, keepdim=True))
        result.mul_(shrunk).add_(weights @ values[:, :, first : first + step].float())
        best = most
    return result.div_(total).view(query.shape).to(query.dtype)


def chunk_mask(new: int, used: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Returns bool [new, used]: the cached tokens that each of the `new` last ones attends to."""
    rows = torch.arange(used - new, used, device=device)[:, None]
    columns = torch.arange(used, device=device)
    seen = columns <= rows
    return seen & (columns > rows - window) if window else seen
