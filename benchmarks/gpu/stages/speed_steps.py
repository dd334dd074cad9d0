"""Stages about steps of a decoder: loading, decode, prefill, kernels, caches."""

from __future__ import annotations

import gc
import time
from typing import Any

import numpy as np

from benchmarks.gpu.models.choosing import sampler
from benchmarks.gpu.models.layers import unfused
from benchmarks.gpu.models.models import (
    Made,
    Wanted,
    cache_bytes,
    close_all,
    decode_items,
    decoder,
    make,
    pretend_context,
    random_tokens,
    weight_bytes,
)
from benchmarks.gpu.stage import Context
from benchmarks.gpu.stages.lending import time_lending
from catenary_agent.decoders.base import CacheLayout, StepItem, Want, set_layout
from catenary_agent.decoders.torch.torch_skeleton import skeleton
from catenary_agent.generation.context import CacheLimits
from catenary_agent.kv.span import CacheSpan, pieces

GIGA = 1e9
_CHOICES = {
    "nothing": "no token chosen",
    "greedy": "greedy",
    "sampled": "sampled (T 0.7, top_p 0.9)",
}
_ROOM = 64
"""Tokens by which a session may grow while it is measured."""


def large(here: Context) -> Made:
    """Returns the model to measure: of Llama-3-8B's shape on a GPU."""
    like = "tiny" if here.tiny else "llama-3-8b"
    return make(here, Wanted(like, 8192, on_device=True))


def model(here: Context) -> None:
    """Writes the model, loads it as an agent does, and compares its memory with the table."""
    import torch

    began = time.perf_counter()
    made = large(here)
    here.row("writing random weights", time.perf_counter() - began, "s")
    free = torch.cuda.mem_get_info()[0] if here.is_cuda else 0
    began = time.perf_counter()
    skeleton(made[0].folder(made[1]), torch.float16, "the model")
    bare_s = time.perf_counter() - began
    for name, before_s in (("loading the weights", bare_s), ("loading them once more", 0.0)):
        began = time.perf_counter()
        executor = decoder(here, made, 1, 128)
        here.sync()
        seconds = before_s + time.perf_counter() - began
        held = executor.memory_bytes
        here.row(name, seconds, "s", note=f"{held / seconds / GIGA:.2f} GB/s")
        if before_s:
            here.row("of it imports, and a model without weights", bare_s, "s")
            executor.close()
            del executor
            gc.collect()
    form = "torch-float16" if here.is_cuda else "torch-float32"
    sizes = next(each for each in executor.table.forms if each.form == form)
    counted = sizes.weight_bytes(0, executor.table.blocks)
    here.row("weights held over what the table says", held / counted, at_most=1.0, note=f"{held}")
    if here.is_cuda:
        taken = free - torch.cuda.mem_get_info()[0]
        here.row("device memory taken over the weights", taken / held, at_most=1.1)


def decode(here: Context) -> None:
    """Times decode steps of various numbers of sessions and contexts, replayed and eager."""
    bandwidth = _bandwidth(here)
    executor = decoder(here, large(here), 1, 128)
    graphs_too = here.is_cuda and executor._graphs is not None
    contexts = (1024, 128, 4096) if here.is_cuda else (16,)
    sizes = (64, 1, 256, 8, 32, 128, 16, 2) if here.is_cuda else (1, 3)
    for context in contexts:
        fitting = [size for size in sizes if _fits(here, executor, size, context)]
        tokens, blocks = context + _ROOM, executor.table.blocks
        set_layout(executor, CacheLayout(max(fitting) * blocks, tokens, (0,)))
        pretend_context(executor, max(fitting), context)
        kept = executor._graphs
        for size in fitting:
            floor = (weight_bytes(executor) + size * context * cache_bytes(executor)) / bandwidth
            for mode in ("graph", "eager") if graphs_too else ("eager",):
                executor._graphs = kept if mode == "graph" else None
                only_steps = graphs_too and mode == "eager"
                for want in ("nothing",) if only_steps else tuple(_CHOICES):
                    _time_step(here, executor, size, context, (mode, want, floor))
        executor._graphs = kept
        if context == contexts[0]:
            _decode_unfused(here, executor, fitting[:3], (context, bandwidth))
        close_all(executor, max(fitting))


def _decode_unfused(
    here: Context, executor: Any, sizes: list[int], given: tuple[int, float]
) -> None:
    """Times the same steps with the layers of `transformers`."""
    context, bandwidth = given
    with unfused(executor):
        kept = executor._graphs
        for size in sizes:
            floor = (weight_bytes(executor) + size * context * cache_bytes(executor)) / bandwidth
            for mode in ("graph", "eager") if kept is not None else ("eager",):
                executor._graphs = kept if mode == "graph" else None
                _time_step(here, executor, size, context, (f"{mode}, unfused", "nothing", floor))


def _time_step(
    here: Context, executor: Any, size: int, context: int, how: tuple[str, Any, float]
) -> None:
    mode, want, floor = how
    ways = [sampler(np.arange(3), seed, 0.7 if want == "sampled" else 0.0) for seed in range(size)]
    result: Want = "nothing" if want == "nothing" else "token"
    for session in range(size):  # the same context again: sessions have room for few steps only
        executor._book.cached[session] = context
    taken = here.time(
        lambda: executor.step(decode_items(executor, size, result, ways)), 8, 2, executor._stream
    )
    here.row(
        f"decode {size} x {context}, {mode}, {_CHOICES[want]}",
        size / taken.wall_s,
        "tok/s",
        note=f"{taken.wall_s * 1e3:.2f} ms, on the device {taken.span_s * 1e3:.2f}, "
        f"floor {floor * 1e3:.2f}",
    )


def _bandwidth(here: Context) -> float:
    """Returns the bytes a second that a copy reads and writes on the device."""
    import torch

    count = (1 << 30) if here.is_cuda else (1 << 18)
    source = torch.empty(count, dtype=torch.bfloat16, device=here.torch_device).normal_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / here.time(lambda: target.copy_(source)).span_s


def _fits(here: Context, executor: Any, sessions: int, context: int) -> bool:
    """Returns True if the caches of `sessions` fit beside the weights, with some room to spare."""
    if not here.is_cuda:
        return True
    import torch

    pool = executor._pool
    free = torch.cuda.mem_get_info()[0] + pool.keys.nbytes + pool.values.nbytes
    return sessions * (context + _ROOM) * cache_bytes(executor) < 0.85 * free


def prefill(here: Context) -> None:
    """Times whole prompts, and a chunk of one behind a long context."""
    lengths = (512, 128, 1024, 2048, 4096) if here.is_cuda else (16, 32)
    executor = decoder(here, large(here), 1, max(lengths) + 1024)
    operations = 2 * weight_bytes(executor) / executor._shape.dtype.itemsize
    for length in lengths:
        tokens = random_tokens(executor, length, length)

        def run(tokens: np.ndarray = tokens) -> None:
            executor.open_session(0, 0)
            executor.step([StepItem(0, 0, tokens, "logits")])
            executor.close_session(0)

        kept = executor._graphs
        is_replayed = kept is not None and length <= kept.buckets[-1].rows
        for mode in ("", ", eager") if is_replayed else ("",):
            executor._graphs = None if mode else kept
            taken = here.time(run, 5, 2, executor._stream)
            rate = operations * length / taken.span_s / 1e12
            here.row(
                f"prompt of {length}{mode}",
                length / taken.wall_s,
                "tok/s",
                note=f"{taken.wall_s * 1e3:.1f} ms, {rate:.1f} TFLOP/s of products",
            )
        executor._graphs = kept
    behind = max(lengths) // 2
    chunk = random_tokens(executor, min(512, behind), 1)
    pretend_context(executor, 1, behind)

    def more() -> None:
        executor._book.cached[0] = behind
        executor.step([StepItem(0, behind, chunk, "logits")])

    taken = here.time(more, 5, 2, executor._stream)
    here.row(
        f"chunk of {len(chunk)} behind {behind}",
        len(chunk) / taken.wall_s,
        "tok/s",
        note=f"{taken.wall_s * 1e3:.1f} ms",
    )


def kernels(here: Context) -> None:
    """Names the kernels that take most of a step."""
    from torch.profiler import ProfilerActivity, profile

    executor = decoder(here, large(here), 64 if here.is_cuda else 2, 1024 + _ROOM)
    sessions, context = (64, 1024) if here.is_cuda else (2, 16)
    pretend_context(executor, sessions, context)
    kept = executor._graphs
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] * here.is_cuda)]
    modes = ("graph", "eager") if kept is not None else ("eager",)
    for mode, count in [(mode, count) for count in (sessions, 1) for mode in modes]:
        executor._graphs = kept if mode == "graph" else None
        ways = [sampler(np.arange(3), seed, 0.0) for seed in range(count)]
        for _ in range(3):
            executor.step(decode_items(executor, count, "token", ways))
        with profile(activities=activities) as found:
            for _ in range(5):
                executor.step(decode_items(executor, count, "token", ways))
            here.sync()
        _name_kernels(here, found, f"{mode} of {count}")


def _name_kernels(here: Context, found: Any, mode: str) -> None:
    """Notes the time that a step keeps the device busy, and the kernels that take it."""
    by_device = "self_device_time_total" if here.is_cuda else "self_cpu_time_total"
    events = [each for each in found.key_averages() if getattr(each, by_device) > 0]
    total = sum(getattr(each, by_device) for each in events)
    here.row(f"{mode}: device busy in a step", total / 5e3, "ms")
    best = sorted(events, key=lambda each: -getattr(each, by_device))
    for place, each in enumerate(best[:8]):
        share = 100 * getattr(each, by_device) / total
        here.row(
            f"{mode}: kernel {place + 1}",
            share,
            "%",
            note=f"{each.count / 5:.0f} calls, {each.key[:70]}",
        )


def caches(here: Context) -> None:
    """Times the export of sessions' caches from the device, and their import."""
    lengths = (1024, 4096) if here.is_cuda else (16, 32)
    executor = decoder(here, large(here), 1, max(lengths))
    pretend_context(executor, 1, max(lengths))
    for length in lengths:
        span = CacheSpan(0, executor.table.blocks, 0, length)
        rows = executor.export_cache(0, span)
        out = here.time(lambda span=span: executor.export_cache(0, span), 4)
        back = here.time(lambda span=span, rows=rows: executor.import_cache(0, span, rows), 4)
        here.row(
            f"cache of {length} tokens out",
            rows.nbytes / out.wall_s / GIGA,
            "GB/s",
            note=f"{rows.nbytes / 1e6:.1f} MB",
        )
        here.row(f"cache of {length} tokens in", rows.nbytes / back.wall_s / GIGA, "GB/s")
        _time_move(here, executor, span, rows)
    time_lending(here, executor, span, rows)


def _time_move(here: Context, executor: Any, span: CacheSpan, rows: np.ndarray) -> None:
    """Times the same in the parts in which a move exports caches, and in the frames it brings."""
    limits, row_bytes = CacheLimits(), executor.sizes.cache_bytes_per_token
    exports = list(pieces(span, row_bytes, limits.export_bytes))
    frames = [
        (each, rows[each.first_block : each.last_block, :, each.first_token : each.last_token])
        for each in pieces(span, row_bytes, limits.frame_bytes)
    ]

    def leave() -> None:
        for each in exports:
            executor.export_cache(0, each)

    def arrive() -> None:
        for each, part in frames:
            executor.import_cache(0, each, part)

    for name, call, parts in (("out", leave, exports), ("in", arrive, frames)):
        taken = here.time(call, 4)
        here.row(
            f"cache of {span.tokens} tokens {name}, as in a move",
            rows.nbytes / taken.wall_s / GIGA,
            "GB/s",
            note=f"{taken.wall_s * 1e3:.2f} ms in {len(parts)} parts",
        )
