"""Stages about single kernels: attention, CUDA graphs, a vision part."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.gpu.models.models import decode_items, decoder, prompt, random_tokens, small
from benchmarks.gpu.models.plain_flash import flash_of_the_tensors
from benchmarks.gpu.models.vision_model import image_part
from benchmarks.gpu.stage import Context

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
    Heads("SmolLM2-135M", 9, 3, 64),
)
# New tokens of each session, and tokens it has cached: a mixed step, and one of single tokens.
_STEPS = {
    "mixed": ((1, 7, 1, 130), (33, 4, 900, 60)),
    "decode": ((1, 1, 1, 1), (33, 4, 900, 60)),
}
_TINY_STEPS = {"mixed": ((1, 7, 1), (33, 4, 0)), "decode": ((1, 1, 1), (33, 4, 5))}


def flash(here: Context) -> None:
    """Compares every attention kernel with float64, for the heads of real models."""
    from catenary_agent.decoders.torch.torch_attention import AttentionKernel

    kernels = (
        [AttentionKernel.FLASH, AttentionKernel.PADDED]
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
                    here.row(what, error, "", at_most=bound)


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
    from catenary_agent.decoders.torch.torch_cache import SlotPool, TokenCacheShape

    counts, cached = step
    device = here.torch_device
    dtype = torch.float16 if here.is_cuda else torch.float32
    pool = SlotPool(
        len(counts) + 1,
        1100 if here.is_cuda else 64,
        1,
        TokenCacheShape(heads.keys, heads.size, dtype, device),
    )
    random = torch.Generator(device).manual_seed(1)
    pool.keys.normal_(generator=random)
    pool.values.normal_(generator=random)
    caches = [pool.open(0) for _ in counts][::-1]  # in another order than in memory
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
    """Compares replayed decode steps with eager ones, at every bucket and one session below it.

    On a CPU no graph is captured: the same padded steps run eagerly, with attention computed from
    exactly the tensors that the kernel would get.
    """
    from catenary_agent.decoders.torch import torch_attention, torch_graphs
    from catenary_agent.decoders.torch.torch_attention import AttentionKernel

    buckets = torch_graphs.BUCKETS if here.is_cuda else torch_graphs.BUCKETS[:3]
    with ExitStack() as stack:
        if not here.is_cuda:
            stack.enter_context(mock.patch.object(torch_attention, "_flash", flash_of_the_tensors))
        executor = decoder(here, small(here), max(buckets), 96)
        executor._kernel = AttentionKernel.FLASH
        for session in range(max(buckets)):
            length = 3 + session * 7 % 40
            prompt(executor, session, random_tokens(executor, length, session), "nothing")
        for bucket in buckets:
            for sessions in {bucket, max(1, bucket - 1)}:
                exact = sessions == bucket and here.is_cuda
                unequal, distance = _replayed(here, executor, sessions)
                what = f"bucket {bucket}, {sessions} sessions"
                here.row(f"{what}: values that differ", unequal, at_most=0 if exact else None)
                here.row(f"{what}: distance", distance, at_most=2e-2 if here.is_cuda else 1e-5)


def _replayed(here: Context, executor: Any, sessions: int) -> tuple[int, float]:
    """Returns how many logits of a replayed step differ from an eager one, and how far."""
    import torch

    from catenary_agent.decoders.torch.torch_attention import AttentionMetadata
    from catenary_agent.decoders.torch.torch_graphs import DecodeGraphs, StaticStep, bucket_of

    items = decode_items(executor, sessions)
    plan = AttentionMetadata(
        [executor._caches[item.session] for item in items],
        [1] * sessions,
        [item.position for item in items],
    )
    with executor._on_stream(), torch.inference_mode():
        joining = executor._joining(items)
        if here.is_cuda:
            made = DecodeGraphs(executor._model, executor._pool, executor.table.hidden_size)
            replayed = made.run(plan, joining[0])
            assert replayed is not None, "no graph was captured"
            logits = replayed[1].clone()
        else:
            size = bucket_of(sessions)
            assert size is not None
            step = StaticStep(executor._model, executor._pool, size, executor.table.hidden_size)
            step.fill(plan, joining[0])
            logits = step.run()[1][:sessions]
        # The same step runs again, and writes the same rows of the cache.
        eager = executor._model.logits(executor._run_eagerly(plan, joining))
        here.sync()
        distance = (logits - eager).norm() / eager.norm()
        return int((logits != eager).sum()), float(distance)


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


def quantised(here: Context) -> None:
    """Compares products with weights of eight and four bits with float64, and times them."""
    import torch

    from catenary_agent.decoders.torch.torch_quantised import (
        FourBitLinear,
        numbers_of,
        quantised,
        step_dtype,
    )

    outputs, inputs = (14_336, 4_096) if here.is_cuda else (64, 128)
    device = here.torch_device
    half = torch.float16 if here.is_cuda else torch.float32
    random = torch.Generator().manual_seed(5)
    weight = torch.randn(outputs, inputs, generator=random) / inputs**0.5
    plain = weight.to(device, half)
    for precision in ("int8", "int4"):
        dtype = step_dtype(device, half, precision)
        layer, kept = (
            quantised(weight.to(place), None, precision, dtype)
            for place in (device, torch.device("cpu"))
        )
        assert layer is not None
        assert kept is not None
        here.row(f"{precision}: has a kernel of PyTorch", str(layer._has_kernel))
        four = isinstance(kept, FourBitLinear)
        numbers = numbers_of(kept.codes, kept.steps) if four else kept.codes * kept.scales[:, None]
        for count in (1, 16, 64, 512) if here.is_cuda else (1, 3):
            rows = torch.randn(count, inputs, generator=random).to(device)
            with torch.inference_mode():
                made = layer(rows).double().cpu()
                wanted = rows.double().cpu() @ numbers.double().T
                taken = here.time(partial(layer, rows), 20)
                beside = here.time(partial(torch.mm, rows.to(half), plain.T), 20)
            error = float((made - wanted).norm() / wanted.norm())
            what = f"{precision}, {count} rows"
            here.row(f"{what}: distance", error, at_most=_FLOAT16_ERROR)
            note = f"{taken.span_s * 1e6:.0f} us, plain {beside.span_s * 1e6:.0f} us"
            here.row(f"{what}: time over plain", taken.span_s / beside.span_s, "", note=note)
