"""Stages beside decoder steps: choice of tokens, transformers on the same model, vision parts."""

from __future__ import annotations

import contextlib
import time
from functools import partial
from typing import Any

import numpy as np

from benchmarks.gpu.models.choosing import next_tokens, sampler
from benchmarks.gpu.models.plain_flash import emulated_graphs
from benchmarks.gpu.models.vision_model import formed_part, image_part
from benchmarks.gpu.stage import Context
from benchmarks.gpu.stages.speed_steps import large
from catenary_agent.decoders.sampling.choosing import TokenSampler
from catenary_agent.decoders.sampling.kernel_sampler import torch_chooser
from catenary_agent.decoders.sampling.numpy_arrays import numpy_chooser
from catenary_agent.decoders.sampling.torch_arrays import TorchArrayBackend


def sampling(here: Context) -> None:
    """Times the choice of tokens where a step leaves its logits, and on the host.

    "PyTorch" is what agents use, with kernels where they work; "plain PyTorch" is without them.
    """
    import torch

    words, most = (128_256, 64) if here.is_cuda else (512, 4)
    random = np.random.default_rng(0)
    flat = random.standard_normal((most, words)).astype(np.float32)
    peaked = 3 * flat
    peaked[:, :40] += random.exponential(6.0, (most, 40)).astype(np.float32)
    device = here.torch_device
    plain = TokenSampler(TorchArrayBackend(device, words), words)
    here.row("sampler of PyTorch", type(torch_chooser(device, words)).__name__)
    for form, logits in (("peaked", peaked), ("flat", flat)):
        there = torch.from_numpy(logits).to(device)
        places = (
            ("PyTorch", there, torch_chooser(device, words)),
            ("plain PyTorch", there, plain),
            ("NumPy", logits, numpy_chooser(words)),
        )
        for rows in (1, 16, 64) if here.is_cuda else (1, 4):
            for name, filters in _FILTERS.items():
                for where, rows_of, chooser in places:
                    if where == "NumPy" and (name not in _ON_THE_HOST or form == "flat"):
                        continue
                    what = f"{rows} x {words} {form}, {name}, {where}"
                    _choosing(here, what, filters, (rows_of[:rows], chooser))


_FILTERS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "T 0.7": {"temperature": 0.7},
    "T 0.7, top_p 0.9": {"temperature": 0.7, "top_p": 0.9},
    "T 0.7, top_k 50": {"temperature": 0.7, "top_k": 50},
    "T 0.7, top_k 50, top_p 0.9": {"temperature": 0.7, "top_k": 50, "top_p": 0.9},
    "T 0.7, min_p 0.05": {"temperature": 0.7, "min_p": 0.05},
}
_ON_THE_HOST = ("greedy", "T 0.7, top_p 0.9")


def _choosing(
    here: Context, what: str, filters: dict[str, float], given: tuple[Any, TokenSampler]
) -> None:
    """Notes the time of one choice of tokens."""
    logits, chooser = given
    ways = [sampler(np.arange(3), seed, **{"top_p": 1.0, **filters}) for seed in range(len(logits))]
    runs = 5 if here.is_cuda else 2
    cpu = time.process_time()
    taken = here.time(partial(next_tokens, logits, ways, chooser), runs)
    used = (time.process_time() - cpu) / len(logits) / (runs + (2 if here.is_cuda else 1))
    note = f"{used * 1e3:.2f} CPU-ms a session, on the device {taken.span_s * 1e3:.2f} ms"
    here.row(f"choosing for {what}", taken.wall_s * 1e3, "ms", note=note)


def transformers(here: Context) -> None:
    """Times greedy decoding by `transformers` itself, without Catenary's executor."""
    began = time.perf_counter()
    whole = _whole_model(here)
    here.sync()
    here.row("transformers: loading", time.perf_counter() - began, "s")
    context, tokens = (1024, 32) if here.is_cuda else (16, 4)
    for sessions in (1, 64, 8) if here.is_cuda else (1, 2):
        _generate(here, whole, sessions, context, tokens)


def _whole_model(here: Context) -> Any:
    """Returns the model as `transformers` runs it, with the weights of the same files."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM

    repository, key = large(here)
    folder, device = repository.folder(key), here.torch_device
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    dtype = torch.bfloat16 if here.is_cuda else torch.float32
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype)
    state = {}
    for file in sorted(folder.glob("*.safetensors")):
        state |= load_file(file, device=str(device))
    whole.load_state_dict({name: each.to(dtype) for name, each in state.items()}, assign=True)
    # The rotary angles are in no file.
    whole.model.rotary_emb = type(whole.model.rotary_emb)(config=config).to(device)
    return whole.eval()


def _generate(here: Context, whole: Any, sessions: int, context: int, tokens: int) -> None:
    """Notes the rate of the tokens behind the first one."""
    import torch

    ids = torch.randint(3, whole.config.vocab_size, (sessions, context), device=here.torch_device)
    with torch.inference_mode():
        made = whole(ids, use_cache=True, logits_to_keep=1)
        token = made.logits[:, -1:].argmax(-1)
        past = made.past_key_values
        here.sync()
        began = time.perf_counter()
        for _ in range(tokens):
            made = whole(token, past_key_values=past, use_cache=True)
            token = made.logits[:, -1:].argmax(-1)
        here.sync()
    seconds = time.perf_counter() - began
    here.row(
        f"transformers: decode {sessions} x {context}",
        sessions * tokens / seconds,
        "tok/s",
        note=f"{seconds / tokens * 1e3:.2f} ms a step",
    )


def vision(here: Context) -> None:
    """Times a vision part as agents run it, from host array to host array, and its forms."""
    part = image_part(here, here.device)
    random = np.random.default_rng(0)
    batches = {
        rows: random.normal(size=(rows, *part.inputs[0].shape[1:])).astype(np.float32)
        for rows in ((1, 2, 4, 8, 16) if here.is_cuda else (1, 2))
    }
    for rows, images in batches.items():
        outputs = part.run([images])
        taken = here.time(
            lambda images=images, outputs=outputs: part.run([images], outputs), 20, 5, part._stream
        )
        note = f"{taken.wall_s * 1e3:.2f} ms, on the device {taken.span_s * 1e3:.2f}"
        here.row(f"vision part, {rows} images", rows / taken.wall_s, "img/s", note=note)
    with contextlib.nullcontext() if here.is_cuda else emulated_graphs():
        _forms(here, batches)


def _forms(here: Context, batches: dict[int, np.ndarray]) -> None:
    """Times every form of the vision part, up to results on the device."""
    import torch

    from catenary_agent.executors.torch_device import PartForm, PartRuns

    formed = formed_part(here)
    weights = formed.weights()
    for form in PartForm:
        formed.take(form, weights)
        runs = PartRuns(formed, here.torch_device)
        for rows, images in batches.items():
            given = [torch.from_numpy(images)]
            taken = here.time(lambda given=given, runs=runs: runs.run(given), 20, 5)
            what = f"vision part, {form}, {rows} images, without the way back"
            here.row(what, taken.wall_s * 1e3, "ms")
