"""Stages about single kernels: attention, CUDA graphs, a vision part."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.gpu.models.models import decoder, prompt, random_tokens, small
from benchmarks.gpu.models.plain_flash import emulated_graphs
from benchmarks.gpu.models.vision_model import image_part
from benchmarks.gpu.stage import Context
from benchmarks.gpu.stages.speed_mixed import capture_time

_FLOAT16_ERROR = 1e-2
_FLOAT32_ERROR = 1e-5
_WINDOW = 20


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of a model's attention."""

    model: str
    queries: int
    keys: int
    size: int


SHAPES = (
    Heads("Llama-3-8B", 32, 8, 128),
    Heads("Llama-3-70B", 64, 8, 128),
    Heads("Qwen3-0.6B", 16, 8, 128),
    Heads("Phi-3-mini", 32, 32, 96),
    Heads("Gemma-7B", 16, 16, 256),
    Heads("SmolLM2-135M", 9, 3, 64),
)
# New tokens of each session, and tokens it has cached: a mixed step, and one of single tokens.
_STEPS = {
    "mixed": ((1, 7, 1, 130), (33, 4, 900, 60)),
    "decode": ((1, 1, 1, 1), (33, 4, 900, 60)),
    "long": ((1, 1), (16_383, 4_000)),
}
_TINY_STEPS = {"mixed": ((1, 7, 1), (33, 4, 0)), "decode": ((1, 1, 1), (33, 4, 5))}


def flash(here: Context) -> None:
    """Compares every attention kernel with float64, for the heads of real models."""
    from catenary_agent.decoders.torch.torch_attention import AttentionKernel

    kernels = (
        [
            AttentionKernel.FLASH,
            AttentionKernel.FLASH_AND_SPLIT,
            AttentionKernel.SPLIT,
            AttentionKernel.PADDED,
        ]
        if here.is_cuda
        else [AttentionKernel.EACH, AttentionKernel.PADDED]
    )
    bound = _FLOAT16_ERROR if here.is_cuda else _FLOAT32_ERROR
    for heads in SHAPES if here.is_cuda else SHAPES[-1:]:
        for kernel in kernels:
            for name, step in (_STEPS if here.is_cuda else _TINY_STEPS).items():
                for window in (None, _WINDOW):
                    error = attention_error(here, heads, kernel, step, window)
                    seen = f", window {window}" if window else ""
                    what = f"{heads.model} {kernel.value} {name}{seen}"
                    exact = kernel is AttentionKernel.SPLIT and name != "mixed"
                    here.row(what, error, "", at_most=1e-3 if exact else bound)


def attention_error(
    here: Context, heads: Heads, kernel: Any, step: Any, window: int | None
) -> float:
    """Returns the relative distance (2-norm) of a step's attention from float64."""
    import torch

    from catenary_agent.decoders.torch.torch_attention import (
        AttentionMetadata,
        LayerCall,
        StepTensors,
        attend,
    )
    from catenary_agent.decoders.torch.torch_cache import CachePool, TokenCacheShape

    counts, cached = step
    device = here.torch_device
    dtype = torch.float16 if here.is_cuda else torch.float32
    tokens = max(1100, *cached) + 1 if here.is_cuda else 64
    pool = CachePool(
        (len(counts) + 1) * tokens,
        tokens,
        1,
        TokenCacheShape(heads.keys, heads.size, dtype, device),
    )
    random = torch.Generator(device).manual_seed(1)
    pool.keys.normal_(generator=random)
    pool.values.normal_(generator=random)
    caches = pool.opened([tokens] * len(counts))[::-1]  # in another order than in memory
    plan = AttentionMetadata(caches, counts, cached)
    query, key, value = (
        torch.empty(1, count, sum(counts), heads.size, dtype=dtype, device=device)
        for count in (heads.queries, heads.keys, heads.keys)
    )
    for each in (query, key, value):
        each.normal_(generator=random)
    scaling = heads.size**-0.5
    call = LayerCall(StepTensors.of(plan, pool, kernel), 0, len(counts))
    with torch.inference_mode():
        made, _ = attend(
            torch.nn.Identity(), query, key, value, None, scaling, window, catenary=call
        )
    wanted = _exactly(pool, plan, query, scaling, window)
    distance = torch.linalg.vector_norm(made[0].double() - wanted)
    return float(distance / torch.linalg.vector_norm(wanted))


def _exactly(pool: Any, plan: Any, query: Any, scaling: float, window: int | None) -> Any:
    """Returns attention in float64, [rows, heads, head size], one session after the other."""
    import torch

    parts = []
    for index, (new, used) in enumerate(zip(plan.counts, plan.used, strict=True)):
        start = int(plan.starts[0, index])
        group = query.shape[1] // pool.keys.shape[1]
        keys, values = (
            rows[start : start + used].double().repeat_interleave(group, 1).transpose(0, 1)
            for rows in (pool.keys, pool.values)
        )
        rows = slice(plan.bounds[index], plan.bounds[index + 1])
        scores = query[0, :, rows].double() @ keys.transpose(1, 2) * scaling
        at = torch.arange(used - new, used, device=query.device)[:, None]
        behind = torch.arange(used, device=query.device)
        hidden = behind > at
        if window is not None:
            hidden |= behind <= at - window
        scores.masked_fill_(hidden, float("-inf"))
        parts.append((scores.softmax(-1) @ values).transpose(0, 1))
    return torch.cat(parts)


def graphs(here: Context) -> None:
    """Compares replayed steps with eager ones, in every bucket, filled and not quite.

    On a CPU no graph is captured: the same padded steps run eagerly, with attention computed from
    exactly the tensors that the kernel would get.
    """
    sessions, tokens = (256, 700) if here.is_cuda else (4, 96)
    with ExitStack() as stack:
        if not here.is_cuda:
            stack.enter_context(emulated_graphs())
        executor = decoder(here, small(here), sessions, tokens)
        captured = capture_time(here, executor, sessions)
        for session in range(sessions):
            length = 3 + session * 7 % 40
            prompt(executor, session, random_tokens(executor, length, session), "nothing")
        for bucket in captured.buckets:
            for rows in {bucket.rows, max(1, bucket.rows - 1)}:
                if bucket.chunks and rows <= 2:
                    continue
                counts = _counts(bucket, rows)
                replayed, eager, distance = _differences(executor, captured, counts)
                kind = "mixed" if bucket.chunks else "decode"
                what = f"{kind} of {bucket.rows}, {rows} rows"
                here.row(f"{what}: replayed differs in", replayed, at_most=0)
                # Single rows of mixed steps have another kernel than in eager ones.
                exact = rows == bucket.rows and not bucket.chunks and here.is_cuda
                here.row(f"{what}: eager differs in", eager, at_most=0 if exact else None)
                here.row(f"{what}: distance", distance, at_most=2e-2 if here.is_cuda else 1e-5)


def _counts(bucket: Any, rows: int) -> list[int]:
    """Returns the new tokens of a step of so many rows: two prompts beside as many single ones."""
    if not bucket.chunks:
        return [1] * rows
    singles = min(bucket.singles - 2, rows // 2)
    chunk = rows - singles
    return [1] * singles + ([chunk // 2, chunk - chunk // 2] if chunk > 3 else [chunk])


def _differences(executor: Any, captured: Any, counts: list[int]) -> tuple[int, int, float]:
    """Returns how a replayed step differs from the same launches and from the eager step.

    Returns:
        The numbers of its states that differ from those of the same launches without a graph, and
            from those of the eager step, and the distance from these.
    """
    import torch

    from catenary_agent.decoders.torch.torch_attention import AttentionMetadata
    from catenary_agent.decoders.torch.torch_static import StaticStep

    sessions = range(len(counts))
    cached = [executor._book.cached[session] for session in sessions]
    with executor._on_stream():
        for session in sessions:
            tokens = cached[session] + counts[session]
            executor._pool.grow(executor._caches[session], tokens)
    plan = AttentionMetadata([executor._caches[session] for session in sessions], counts, cached)
    inputs = [random_tokens(executor, counts[session], 1000 + session) for session in sessions]
    bucket = captured.bucket_of(plan)
    assert bucket is not None
    with executor._on_stream(), torch.inference_mode():
        output = captured.run(plan, inputs, [])
        assert output is not None, "no graph was captured"
        replayed = output.hidden.clone()
        # The same step runs again, and writes the same rows of the cache.
        StaticStep(captured.buffers, bucket).run()
        launched = captured.buffers.leaving[: len(replayed)].clone()
        tokens = torch.from_numpy(np.concatenate(inputs)).to(replayed.device)
        eager = executor._run_eagerly(plan, {0: tokens})
        distance = float((replayed - eager).norm() / eager.norm())
        return int((replayed != launched).sum()), int((replayed != eager).sum()), distance


def vision(here: Context) -> None:
    """Compares a vision part with the same part on a CPU."""
    from catenary_agent.executors.device import Device

    there = image_part(here, here.device)
    ours = image_part(here, Device("cpu"))
    random = np.random.default_rng(3)
    for rows in (1, 4) if here.is_cuda else (1, 2):
        images = random.normal(size=(rows, *ours.inputs[0].shape[1:])).astype(np.float32)
        made, wanted = there.run([images])[0], ours.run([images])[0]
        distance = np.linalg.norm(made - wanted) / np.linalg.norm(wanted)
        here.row(f"vision part, {rows} images: distance", float(distance), at_most=1e-2)
        again = there.run([images])[0]
        here.row(f"vision part, {rows} images: a second run differs in", int((made != again).sum()))


def sampling(here: Context) -> None:
    """Compares tokens with NumPy's: filters of every kind, peaked and flat logits, equal values."""
    import torch

    from catenary_agent.decoders.sampling.kernel_sampler import torch_chooser
    from catenary_agent.decoders.sampling.numpy_arrays import numpy_chooser
    from small_models.sampling_cases import random_logits, random_sampler

    words, cases, rows = (128_256, 500, 20) if here.is_cuda else (999, 40, 10)
    random = np.random.default_rng(6)
    chooser, host = torch_chooser(here.torch_device, words), numpy_chooser(words)
    is_kernel = type(chooser).__name__ == "KernelSampler"
    here.row("kernels choose", int(is_kernel), at_least=1 if here.is_cuda else None)
    different = plain = 0
    for _ in range(cases // rows):
        logits = random_logits(random, rows, words)
        asked = [(number, random_sampler(random, words)) for number in range(rows)]
        plain += sum(way.is_plain for _, way in asked)
        made = chooser.choose(torch.from_numpy(logits).to(here.torch_device), asked, range(rows))
        wanted = host.choose(logits, asked, range(rows))
        different += sum(ours != theirs for ours, theirs in zip(made, wanted, strict=True))
        for number, _ in asked:
            chooser.forget(number)
    note = f"{plain} of them without changes of logits"
    here.row(f"tokens of {cases} that differ", different, at_most=0, note=note)
