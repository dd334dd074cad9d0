"""Tests of the kernel for single queries on a device: whether it is right, and whether faster."""

from __future__ import annotations

from collections.abc import Callable

import torch

from catenary_agent.decoders.torch.torch_attention import (
    AttentionKernel,
    AttentionMetadata,
    LayerCall,
    StepTensors,
    attend_stored,
)
from catenary_agent.decoders.torch.torch_cache import CachePool, TokenCacheShape
from catenary_services.log import get_logger

_log = get_logger("catenary_agent.decoders")
_TOLERANCE = 2e-3
"""The largest difference accepted, relative to the largest number: four steps of float16."""
_TIMED_TOKENS = 1024
_TIMED_SESSIONS = 64
_TIMED_BYTES = 256 << 20
"""The most bytes of caches that are read to compare times: more than a device keeps close by."""
_CALLS = 8
"""The calls that are captured together, as the layers of a step are."""


def is_split_right(shape: TokenCacheShape, query_heads: int) -> bool:
    """Returns whether single queries can have the kernel of their own; logs why if not."""
    reason = why_not_split(shape, query_heads)
    if reason is not None:
        _log.warning("split_attention_unavailable", reason=reason)
    return reason is None


def why_not_split(shape: TokenCacheShape, query_heads: int) -> str | None:
    """Runs the kernel on slots in arbitrary order and compares it with plain attention.

    Args:
        shape: Shape and format of the caches.
        query_heads: Number of heads of the queries.

    Returns:
        None if the kernel works, else the reason why it does not.
    """
    if shape.dtype is not torch.float16:
        return f"caches are of {shape.dtype}"
    try:
        from catenary_agent.decoders.triton_kernels.split_attention import MOST_GROUP, MOST_SIZE

        if shape.head_size > MOST_SIZE or query_heads > MOST_GROUP * shape.heads:
            return f"{query_heads} heads of {shape.head_size} numbers are too many or too large"
        # Sessions in one part, and in several.
        worst = max(difference(shape, query_heads, tokens) for tokens in (40, 700))
    except Exception as error:  # a compiler's, a driver's, or a want of memory
        text = (str(error).splitlines() or [""])[0][:200]
        return f"{type(error).__name__} on {shape.device}: {text}"
    return None if worst < _TOLERANCE else f"it is off by {worst:.3g} on {shape.device}"


def difference(shape: TokenCacheShape, query_heads: int, tokens: int) -> float:
    """Returns the largest relative difference of the kernel and plain attention.

    Args:
        shape: Shape and format of the caches.
        query_heads: Number of heads of the queries.
        tokens: Number of rows of a slot.
    """
    plan, pool, query = random_decoding(shape, query_heads, [tokens, 1, tokens // 2 + 1], tokens)
    worst = 0.0
    for window in (None, tokens // 3):
        results = []
        for kernel in (AttentionKernel.SPLIT, AttentionKernel.EACH):
            call = LayerCall(StepTensors.of(plan, pool, kernel), 0, 3)
            how = shape.head_size**-0.5, window, None, None
            with torch.inference_mode():
                results.append(attend_stored(call, query, how).float())
        found, expected = results
        error = float((found - expected).abs().max() / expected.abs().max())
        # What is not a number is not right either, and `max` would pass over it.
        worst = max(worst, error) if error == error else float("inf")  # noqa: PLR0124
    return worst


def is_split_faster(shape: TokenCacheShape, query_heads: int) -> bool:
    """Returns whether the kernel takes less time than FlashAttention for many sessions."""
    try:
        flash, split = _times(shape, query_heads)
    except Exception as error:  # a driver's, or a want of memory
        text = (str(error).splitlines() or [""])[0][:200]
        _log.warning("split_attention_not_timed", reason=f"{type(error).__name__}: {text}")
        return False
    finally:
        torch.cuda.empty_cache()
    _log.info("attention_timed", flash_ms=round(flash, 4), split_ms=round(split, 4))
    return split < flash


def _times(shape: TokenCacheShape, query_heads: int) -> list[float]:
    """Returns the milliseconds of a layer's attention by FlashAttention and by the kernel."""
    row_bytes = 2 * shape.heads * shape.head_size * shape.dtype.itemsize
    most = max(1, _TIMED_BYTES // (row_bytes * _TIMED_TOKENS))
    used = [_TIMED_TOKENS] * min(_TIMED_SESSIONS, most)
    plan, pool, query = random_decoding(shape, query_heads, used, _TIMED_TOKENS)
    times = []
    for kernel in (AttentionKernel.FLASH, AttentionKernel.SPLIT):
        call = LayerCall(StepTensors.of(plan, pool, kernel), 0, len(used))

        def attend(call: LayerCall = call) -> None:
            for _ in range(_CALLS):
                attend_stored(call, query, (shape.head_size**-0.5, None, None, None))

        with torch.inference_mode():
            times.append(captured_milliseconds(attend) / _CALLS)
    return times


def random_decoding(
    shape: TokenCacheShape, query_heads: int, used: list[int], tokens: int
) -> tuple[AttentionMetadata, CachePool, torch.Tensor]:
    """Returns a step of single queries, random caches in which it looks, and the queries."""
    random = torch.Generator(shape.device).manual_seed(0)
    pool = CachePool((len(used) + 1) * tokens, tokens, 1, shape)
    pool.keys.normal_(generator=random)
    pool.values.normal_(generator=random)
    opened = pool.opened([tokens] * len(used))
    caches = [*opened[1::2], *opened[::2]]
    size = 1, query_heads, len(used), shape.head_size
    query = torch.empty(size, dtype=shape.dtype, device=shape.device).normal_(generator=random)
    return AttentionMetadata(caches, [1] * len(used), [each - 1 for each in used]), pool, query


def captured_milliseconds(run: Callable[[], object]) -> float:
    """Returns the shortest of some times of a captured run on the current device."""
    run()  # compiles, and lets libraries do what they must not do during a capture
    torch.cuda.current_stream().synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    times: list[float] = []
    for _ in range(4):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        began.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        times.append(float(began.elapsed_time(ended)))
    return min(times)
