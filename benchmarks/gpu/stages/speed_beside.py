"""Stages beside decoder steps: choice of tokens, transformers on the same model, vision parts."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import numpy as np

from benchmarks.gpu.models.choosing import next_tokens, sampler
from benchmarks.gpu.models.vision_model import image_part
from benchmarks.gpu.stage import Context
from benchmarks.gpu.stages.speed_steps import large
from catenary_agent.decoders.sampling.numpy_arrays import numpy_chooser
from catenary_agent.decoders.sampling.torch_arrays import torch_chooser


def sampling(here: Context) -> None:
    """Times the choice of tokens where a step leaves its logits, and on the host."""
    import torch

    words, most = (128_256, 64) if here.is_cuda else (512, 4)
    random = np.random.default_rng(0)
    logits = (3 * random.standard_normal((most, words))).astype(np.float32)
    device = here.torch_device
    places = (
        ("PyTorch", torch.from_numpy(logits).to(device), torch_chooser(device, words)),
        ("NumPy", logits, numpy_chooser(words)),
    )
    for where, rows_of, chooser in places:
        for rows in (1, 16, 64) if here.is_cuda else (1, 4):
            for name, temperature, top_p in (("greedy", 0.0, 1.0), ("T 0.7, top_p 0.9", 0.7, 0.9)):
                ways = [sampler(np.arange(3), seed, temperature, top_p) for seed in range(rows)]
                cpu = time.process_time()
                runs = 5 if here.is_cuda else 2
                work = partial(next_tokens, rows_of[:rows], ways, chooser)
                taken = here.time(work, runs)
                used = (time.process_time() - cpu) / rows / (runs + (2 if here.is_cuda else 1))
                here.row(
                    f"choosing for {rows} x {words}, {name}, {where}",
                    taken.wall_s * 1e3,
                    "ms",
                    note=f"{used * 1e3:.2f} CPU-ms a session",
                )


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
    """Times a vision part as agents run it, from host array to host array."""
    part = image_part(here, here.device)
    random = np.random.default_rng(0)
    for rows in (1, 2, 4, 8, 16) if here.is_cuda else (1, 2):
        images = random.normal(size=(rows, *part.inputs[0].shape[1:])).astype(np.float32)
        outputs = part.run([images])
        taken = here.time(
            lambda images=images, outputs=outputs: part.run([images], outputs), 20, 5, part._stream
        )
        note = f"{taken.wall_s * 1e3:.2f} ms, on the device {taken.span_s * 1e3:.2f}"
        here.row(f"vision part, {rows} images", rows / taken.wall_s, "img/s", note=note)
