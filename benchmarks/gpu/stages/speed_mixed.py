"""Stages about captured steps: prompts beside decode rows, and the price of padding."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from benchmarks.gpu.models.models import (
    close_all,
    decode_items,
    decoder,
    pretend_context,
    random_tokens,
)
from benchmarks.gpu.models.plain_flash import emulated_graphs
from benchmarks.gpu.stage import Context
from benchmarks.gpu.stages.speed_steps import large
from catenary_agent.decoders.base import CacheLayout, StepItem, set_layout
from catenary_services.domain.decoder import LargestStep

_ROOM = 64


def mixed(here: Context) -> None:
    """Times steps of decode rows and a prompt chunk, and decode steps between the old buckets."""
    if here.is_cuda:
        _mixed(here)
    else:
        with emulated_graphs():
            _mixed(here)


def _mixed(here: Context) -> None:
    sessions, context = (64, 1024) if here.is_cuda else (3, 16)
    longest = context + (512 if here.is_cuda else 16) + _ROOM
    executor = decoder(here, large(here), sessions + 1, longest)
    kept = capture_time(here, executor, sessions + 1)
    pretend_context(executor, sessions + 1, context)
    for chunk in (256, 64, 512) if here.is_cuda else (8,):
        tokens = random_tokens(executor, chunk, chunk)
        for mode in ("graph", "eager"):
            executor._graphs = kept if mode == "graph" else None

            def run(tokens: Any = tokens) -> None:
                for session in range(sessions + 1):
                    executor._book.cached[session] = context
                prompt = StepItem(sessions, context, tokens, "nothing")
                executor.step([*decode_items(executor, sessions, "nothing"), prompt])

            what = f"{sessions} decoding x {context} + a chunk of {chunk}, {mode}"
            _row(here, executor, what, run)
    executor._graphs = kept
    close_all(executor, sessions + 1)
    sizes, context = ((48, 64, 96, 128, 160, 192, 256), 128) if here.is_cuda else ((2, 3), 16)
    blocks = executor.table.blocks
    set_layout(executor, CacheLayout(max(sizes) * blocks, context + _ROOM, (0,)))
    pretend_context(executor, max(sizes), context)
    for size in sizes:

        def decode(size: int = size) -> None:
            for session in range(size):
                executor._book.cached[session] = context
            executor.step(decode_items(executor, size, "nothing"))

        _row(here, executor, f"decode {size} x {context}, graph of its own", decode)


def _row(here: Context, executor: Any, what: str, run: Any) -> None:
    cpu = time.process_time()
    taken = here.time(run, 8, 2, executor._stream)
    used = (time.process_time() - cpu) / (10 if here.is_cuda else 3)
    here.row(
        what,
        taken.wall_s * 1e3,
        "ms",
        note=f"on the device {taken.span_s * 1e3:.2f} ms, {used * 1e3:.2f} CPU-ms",
    )


def capture_time(here: Context, executor: Any, sessions: int) -> Any:
    """Captures the steps of an executor anew; returns them, and notes time and memory.

    On a CPU the steps stand for graphs.
    """
    from catenary_agent.decoders.torch.torch_attention import AttentionKernel

    executor._graphs = None
    free = 0
    if here.is_cuda:
        import torch

        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0]
    else:
        executor._kernel = AttentionKernel.FLASH
    here.sync()
    began = time.perf_counter()
    with executor._on_stream():
        executor._renew_graphs(capture=True)
    here.sync()
    seconds = time.perf_counter() - began
    captured = executor._graphs
    assert captured is not None
    count = len(captured.buckets)
    note = f"{count} graphs, {seconds / count * 1e3:.0f} ms each"
    here.row("capturing steps", seconds, "s", note=note)
    if here.is_cuda:
        torch.cuda.empty_cache()
        taken = free - torch.cuda.mem_get_info()[0]
        step = LargestStep(sessions, executor._chunk_tokens, executor.layout.session_tokens)
        sizes = executor.sizes
        counted = sizes.step_bytes(step) - replace(sizes, has_graphs=False).step_bytes(step)
        note = f"{taken / 1e6:.0f} MB, {taken / count / 1e6:.1f} a graph"
        here.row("memory of graphs over what the table says", taken / counted, note=note)
    return captured
