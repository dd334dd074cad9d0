"""A test of whether FlashAttention works on a device: it is run and compared."""

from __future__ import annotations

import torch

from catenary_agent.decoders.torch.torch_attention import (
    AttentionKernel,
    AttentionMetadata,
    LayerCall,
    StepTensors,
    attend,
)
from catenary_agent.decoders.torch.torch_cache import CachePool, TokenCacheShape

_TOLERANCE = 0.05
"""The largest difference accepted: bfloat16 has 8 bits, and the compared values are about 1."""


def why_not_flash(shape: TokenCacheShape, query_heads: int) -> str | None:
    """Runs FlashAttention on slots in arbitrary order and compares it with plain attention.

    Args:
        shape: Shape and format of the caches.
        query_heads: Number of heads of the queries.

    Returns:
        None if FlashAttention works, else the reason why it does not.
    """
    if shape.device.type != "cuda":
        return f"FlashAttention needs a CUDA device, this is {shape.device}"
    try:
        # One mixed step, and one of single tokens, for which the kernel has another code path.
        worst = max(difference(shape, query_heads, counts) for counts in ((1, 7, 1), (1, 1, 1)))
    except (RuntimeError, TypeError, AttributeError) as error:
        return f"FlashAttention fails on {shape.device}: {str(error).splitlines()[0][:200]}"
    if not worst < _TOLERANCE:
        return f"FlashAttention on {shape.device} is off by {worst:.3g}"
    return None


def difference(shape: TokenCacheShape, query_heads: int, counts: tuple[int, int, int]) -> float:
    """Returns the largest difference of FlashAttention and plain attention for three sessions.

    Args:
        shape: Shape and format of the caches.
        query_heads: Number of heads of the queries.
        counts: Number of new tokens of each session.
    """
    device, dtype = shape.device, shape.dtype
    random = torch.Generator(device).manual_seed(0)
    pool = CachePool(160, 40, 1, shape)
    pool.keys.normal_(generator=random)
    pool.values.normal_(generator=random)
    first, _, second, third = pool.opened([40] * 4)
    caches = [second, first, third]
    plan = AttentionMetadata(caches, counts, (33, 4, 0))
    query, key = (
        torch.empty(1, heads, sum(counts), shape.head_size, dtype=dtype, device=device)
        for heads in (query_heads, shape.heads)
    )
    query.normal_(generator=random)
    key.normal_(generator=random)
    results = []
    for kernel in (AttentionKernel.FLASH, AttentionKernel.EACH):
        call = LayerCall(StepTensors.of(plan, pool, kernel), 0, len(counts))
        with torch.inference_mode():
            output, _ = attend(torch.nn.Identity(), query, key, key, None, 0.125, catenary=call)
        results.append(output.float())
    return float((results[0] - results[1]).abs().max())
