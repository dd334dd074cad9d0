"""A stage about attention of single queries: FlashAttention beside the kernel of our own."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu.stage import Context

_KEYS, _QUERIES, _SIZE = 8, 32, 128
"""The heads of Llama-3-8B."""
_POOL_BYTES = 1 << 28
"""The least bytes that the calls of a graph read together: more than a device keeps close by."""
_STEPS = (
    *((sessions, tokens) for tokens in (1024, 4096) for sessions in (1, 8, 64, 256)),
    (1, 16_384),
)
_TILES = ((64, 2, 4), (32, 4, 4), (128, 2, 4), (128, 2, 8))
"""Tokens, stages and warps of tiles other than the one in use."""
_TINY_STEPS = ((1, 16), (3, 32))


def attention(here: Context) -> None:
    """Times both kernels in CUDA graphs, over so many pools that no call finds its keys cached.

    A CPU has neither, and times the two that it has.
    """
    import torch

    for sessions, tokens in _STEPS if here.is_cuda else _TINY_STEPS:
        _rows(here, sessions, tokens)
        if here.is_cuda:
            torch.cuda.empty_cache()


def _rows(here: Context, sessions: int, tokens: int) -> None:
    import torch

    from catenary_agent.decoders.torch.kernel_checks.attention_choice import random_decoding
    from catenary_agent.decoders.torch.torch_attention import (
        AttentionKernel,
        LayerCall,
        StepTensors,
        attend_stored,
    )
    from catenary_agent.decoders.torch.torch_cache import TokenCacheShape

    dtype = torch.float16 if here.is_cuda else torch.float32
    shape = TokenCacheShape(_KEYS, _SIZE, dtype, here.torch_device)
    read = 2 * dtype.itemsize * _KEYS * _SIZE * sessions * tokens
    count = max(1, min(64, -(-_POOL_BYTES // read))) if here.is_cuda else 1
    steps = [random_decoding(shape, _QUERIES, [tokens] * sessions, tokens) for _ in range(count)]
    how = _SIZE**-0.5, None, None, None
    kernels = (AttentionKernel.EACH, AttentionKernel.PADDED)
    if here.is_cuda:
        kernels = (AttentionKernel.FLASH, AttentionKernel.SPLIT)
    for kernel in kernels:
        calls = [
            (LayerCall(StepTensors.of(plan, pool, kernel), 0, sessions), query)
            for plan, pool, query in steps
        ]

        def run(calls: list[tuple[Any, Any]] = calls) -> None:
            for call, query in calls:
                attend_stored(call, query, how)

        _row(here, f"{sessions} x {tokens}, {kernel.value}", run, count, read)
    if (sessions, tokens) not in {(64, 1024), (1, 16_384)}:
        return
    from catenary_agent.decoders.triton_kernels import split_attention

    for block, stages, warps in _TILES:
        tile = split_attention.AttentionTile(block, stages, warps)

        def tiled(tile: Any = tile) -> None:
            for call, query in calls:
                pool, step = call.step.pool, call.step
                split_attention.attend_singly(
                    query[0].transpose(0, 1),
                    (pool.keys, pool.values, pool.tokens),
                    (step.key_starts, 0, step.used),
                    (_SIZE**-0.5, None),
                    tile,
                )

        what = f"{sessions} x {tokens}, {block} tokens, {stages} stages, {warps} warps"
        _row(here, what, tiled, count, read)


def _row(here: Context, what: str, run: Any, count: int, read: int) -> None:
    import torch

    from catenary_agent.decoders.torch.kernel_checks.attention_choice import captured_milliseconds

    if not here.is_cuda:
        here.row(what, here.time(run).wall_s / count * 1e6, "us")
        return
    try:
        stream = torch.cuda.Stream()
        with torch.inference_mode(), torch.cuda.stream(stream):
            taken = captured_milliseconds(run) / count
    except Exception as error:  # a compiler's, or a want of shared memory
        here.row(what, f"{type(error).__name__}")
        return
    here.row(what, taken * 1e3, "us", note=f"{read / taken / 1e9:.2f} TB/s of caches")
