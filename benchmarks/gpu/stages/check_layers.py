"""A stage about fused layers: their kernels at real sizes, whole models, and launches."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from benchmarks.gpu.models.layers import unfused
from benchmarks.gpu.models.models import decode_items, decoder, prompt, random_tokens, small
from benchmarks.gpu.stage import Context

_ROUNDED = 1e-3
"""Two steps of float16."""
_WHOLE = 2e-2
_HIDDEN, _INNER, _QUERIES, _KEYS, _SIZE = 4096, 14_336, 32, 8, 128
"""The sizes of Llama-3-8B."""


def layers(here: Context) -> None:
    """Compares fused layers with those of `transformers`, kernel by kernel and as a model."""
    if here.is_cuda:
        compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
        here.row("a C compiler, which Triton needs", compiler or "none")
        _kernels(here)
    _models(here)


def _kernels(here: Context) -> None:
    """Compares and times each kernel; rows are of usual size, and some beyond float16."""
    import torch

    from catenary_agent.decoders.torch.fused import gates, norms, rotations

    random = torch.Generator(here.torch_device).manual_seed(7)

    def drawn(*shape: int) -> Any:
        return torch.randn(shape, generator=random, device=here.torch_device)

    weight = drawn(_HIDDEN).half()
    rotation = rotations.RotationKernel(_QUERIES, _KEYS, _SIZE)
    with torch.inference_mode():
        for count in (1, 64, 512):
            large = torch.where(torch.arange(count, device=here.torch_device) % 4 == 3, 1e6, 1.0)
            hidden, added = drawn(count, _HIDDEN) * large[:, None], drawn(count, _HIDDEN)
            product = drawn(count, 2 * _INNER) * large[:, None]
            entered = drawn(count, 1).abs() + 1
            heads = drawn(count, (_QUERIES + 2 * _KEYS) * _SIZE)
            turns = drawn(1, count, _SIZE // 2).repeat(1, 1, 2)
            angles = turns.cos(), turns.sin()
            writes = torch.randperm(2048, device=here.torch_device)[None]
            pool = torch.zeros((2, 2049, _KEYS, _SIZE), dtype=torch.half, device=here.torch_device)
            beside = pool.clone()

            def plainly_summed(hidden: Any = hidden, added: Any = added) -> Any:
                return norms.plainly_normed(hidden + added, weight, 1e-5)

            def summed(hidden: Any = hidden, added: Any = added) -> Any:
                return norms.sum_normed(hidden, added, weight, 1e-5)[1]

            _one(
                here,
                f"norm, {count} rows",
                partial(norms.normed, hidden, weight, 1e-5),
                partial(norms.plainly_normed, hidden, weight, 1e-5),
            )
            _one(here, f"sum and norm, {count} rows", summed, plainly_summed)
            _one(
                here,
                f"gate, {count} rows",
                partial(gates.gated, product, entered),
                partial(gates.plainly_gated, product, entered),
            )
            given = heads, entered, angles, (writes, 0)
            _one(
                here,
                f"rotation, {count} rows",
                partial(rotation, *given, (pool[0], pool[1])),
                partial(rotation.plainly, *given, (beside[0], beside[1])),
            )
            here.row(
                f"keys and values, {count} rows: distance",
                _distance(pool, beside),
                at_most=_ROUNDED,
            )
        hidden = drawn(1, _HIDDEN)
        for name, call in (
            ("a fused norm", partial(norms.normed, hidden, weight, 1e-5)),
            ("a copy by PyTorch", partial(torch.add, hidden, hidden)),
        ):
            here.row(f"{name}: host time of a call", _host_s(here, call) * 1e6, "us")


def _one(here: Context, what: str, fused: Callable[[], Any], plain: Callable[[], Any]) -> None:
    made, wanted = fused(), plain()
    here.row(f"{what}: distance", _distance(_numbers(made), _numbers(wanted)), at_most=_ROUNDED)
    ours, theirs = here.time(fused, 20), here.time(plain, 20)
    note = f"{ours.span_s * 1e6:.0f} us, by PyTorch {theirs.span_s * 1e6:.0f} us"
    here.row(f"{what}: time over PyTorch's", ours.span_s / theirs.span_s, "", note=note)


def _numbers(made: Any) -> Any:
    """Returns what rows stand for, relative to the largest number of each."""
    if not hasattr(made, "rows"):
        return made.float()
    whole = made.rows.double() * made.scale
    return whole / whole.abs().amax(1, keepdim=True)


def _distance(found: Any, wanted: Any) -> float:
    import torch

    found, wanted = found.double(), wanted.double()
    return float(torch.linalg.vector_norm(found - wanted) / torch.linalg.vector_norm(wanted))


def _host_s(here: Context, call: Callable[[], Any], runs: int = 500) -> float:
    """Returns the seconds that the host takes for a call, without waiting for the device."""
    for _ in range(20):
        call()
    here.sync()
    began = time.perf_counter()
    for _ in range(runs):
        call()
    taken = time.perf_counter() - began
    here.sync()
    return taken / runs


def _models(here: Context) -> None:
    """Compares the logits of prompts and of mixed decode steps, with and without fused layers."""
    executor = decoder(here, small(here), 4, 96)
    blocks = executor._model.blocks
    fused = sum(hasattr(each, "plain") for each in blocks.layers)
    wanted = len(blocks.layers) if here.is_cuda else 0  # a CPU has no Triton
    here.row("layers that are fused", fused, at_least=wanted)
    results = []
    for session in (0, 1):
        results.append(_answer(executor, session))
    with unfused(executor):
        results += [_answer(executor, session) for session in (2, 3)]
    for ours, theirs in ((results[0], results[2]), (results[1], results[3])):
        distance = np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)
        here.row("logits, fused and not: distance", float(distance), at_most=_WHOLE)


def _answer(executor: Any, session: int) -> np.ndarray:
    """Returns the logits of a prompt, long for even sessions, and of some tokens behind it."""
    count = 40 if session % 2 == 0 else 7
    made = [prompt(executor, session, random_tokens(executor, count, session % 2))]
    for _ in range(4):
        item = decode_items(executor, session + 1)[session]
        made.append(executor.step([item])[0])
    return np.stack(made)
