"""Executors of decoders compared with whole models."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from catenary_agent.decoders.base import DecoderExecutor, StepItem
from catenary_agent.decoders.model_files.families import REASONS
from catenary_agent.decoders.model_files.sizes import all_tensors, graph_bytes, table_from
from catenary_services.domain.ids import ModelKey
from catenary_services.models.model_repository import ModelRepository
from small_models.tiny_decoders import VOCABULARY, make_variant

CHUNKS = ((12, 3), (1, 10), (16, 1), (1, 3))
"""The tokens of two prompts in each step: chunks and single tokens, mixed."""
GENERATED = 12
GRAPHS = (
    "llama",
    "llama, llama3",
    "llama, dynamic",
    "mistral",
    "qwen2",
    "qwen2, window",
    "qwen3",
    "gemma",
    "gemma2",
    "phi3",
    "granite",
    "ernie4_5",
)
"""Those of `VARIANTS` whose graphs compute the same."""


@dataclass(frozen=True, slots=True)
class Compared:
    """What two sessions got, and what the whole model says."""

    difference: float
    """The largest difference of logits, as a part of the largest logit."""
    tokens: list[list[int]]
    expected_tokens: list[list[int]]


def compared_logits(ends: Sequence[DecoderExecutor], model: Any) -> Compared:
    """Returns what a ring of executors, with sessions 0 and 1 open, makes of two prompts.

    The whole model runs over each finished text at once, without a cache.
    """
    import torch

    random = np.random.default_rng(1)
    prompts = [random.integers(3, VOCABULARY, sum(each)) for each in zip(*CHUNKS, strict=True)]
    texts: list[list[int]] = [[], []]
    logits: list[dict[int, np.ndarray]] = [{}, {}]
    for sizes in (*CHUNKS, *[(1, 1)] * GENERATED):
        parts = []
        for session, size in enumerate(sizes):
            text, prompt = texts[session], prompts[session]
            new = prompt[len(text) : len(text) + size].tolist()
            new = new or [int(logits[session][len(text)].argmax())]
            parts.append(np.array(new))
        made = _through(ends, [len(text) for text in texts], parts)
        for session, part in enumerate(parts):
            texts[session] += part.tolist()
            logits[session][len(texts[session])] = made[session]
    difference = 0.0
    tokens, expected = [], []
    for session, text in enumerate(texts):
        with torch.inference_mode():
            whole = model(torch.tensor([text]), use_cache=False).logits[0].float().numpy()
        assert np.abs(whole).max() > 0.1  # a comparison with nothing says nothing
        first = len(prompts[session])
        tokens.append(text[first:])
        expected.append(whole[first - 1 : -1].argmax(1).tolist())
        for at, found in logits[session].items():
            apart = np.abs(found - whole[at - 1]).max() / np.abs(whole).max()
            difference = max(difference, float(apart))
    return Compared(difference, tokens, expected)


def make_graph(root: Path, variant: str) -> tuple[ModelRepository, ModelKey]:
    """Writes one of `VARIANTS` with its graph, as an import for agents on a CPU does."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    from catenary_agent.decoders.onnx.graph_worker import build_graph

    repository, key = make_variant(root, variant)
    folder = repository.folder(key)
    words = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    build_graph(folder, "fp32", folder)
    table = table_from(
        json.loads((folder / "config.json").read_text()),
        all_tensors(folder),
        model_hash=repository.model_hash(key),
        graphs={"fp32": graph_bytes(folder / "onnx-fp32")},
    )
    repository.write_decoder_table(key, table)
    return repository, key


def _through(
    ends: Sequence[DecoderExecutor], positions: list[int], parts: list[np.ndarray]
) -> list[np.ndarray]:
    """Runs a step of both sessions through all executors; returns the logits of each."""
    for end in ends:
        want = "logits" if end is ends[-1] else "hidden"
        items = [
            StepItem(session, positions[session], part, want)  # type: ignore[arg-type]
            for session, part in enumerate(parts)
        ]
        results = end.step(items)
        assert all(result is not None for result in results)
        parts = [result for result in results if result is not None]
    return parts


# ---- what is refused ----

_LLAMA = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 256}
_LINEAR = {"type": "linear", "factor": 2.0}
_SWITCHED_ON = {"model_type": "qwen3_moe", "max_window_layers": 4}
_CONFIGS: dict[str, dict[str, Any]] = {
    **{name: {"model_type": name} for name in REASONS},
    "gpt2": {"model_type": "gpt2"},
    "no family": {},
    "llama, an unknown key": _LLAMA | {"attn_output_gate": True},
    "llama, a window": _LLAMA | {"sliding_window": 4096},
    "llama, experts": _LLAMA | {"num_experts": 8},
    "llama, a part of each head rotated": _LLAMA | {"partial_rotary_factor": 0.5},
    "llama, a scale of logits": _LLAMA | {"logit_scale": 0.5},
    "llama, mrope": _LLAMA | {"rope_scaling": {"type": "mrope", "factor": 2.0}},
    "llama, linear, a key of longrope": _LLAMA | {"rope_scaling": _LINEAR | {"long_mscale": 1.2}},
    "llama, rotary embeddings by kind": _LLAMA | {"rope_parameters": {"full_attention": {}}},
    "gemma3_text, one rotary embedding": {
        "model_type": "gemma3_text",
        "rope_parameters": {"factor": 2},
    },
    "gemma3_text, capped scores": {"model_type": "gemma3_text", "attn_logit_softcapping": 50.0},
    "gemma, attention to both sides": {
        "model_type": "gemma",
        "use_bidirectional_attention": True,
    },
    "gemma, two activations": {
        "model_type": "gemma",
        "hidden_act": "gelu",
        "hidden_activation": "silu",
    },
    "starcoder2, another norm": {"model_type": "starcoder2", "norm_type": "rms_norm"},
    "qwen3_moe, windows in some layers": _SWITCHED_ON,
    "gpt_oss, MXFP4": {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}},
    "llama, FP8": _LLAMA | {"quantization_config": {"quant_method": "fp8"}},
    "llama, bitsandbytes": _LLAMA | {"quantization_config": {"load_in_4bit": True}},
}
REFUSED: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    **{name: (config, {"target": "gpu"}) for name, config in _CONFIGS.items()},
    "mixtral, int8": ({"model_type": "mixtral"}, {"target": "gpu", "precision": "int8"}),
    "mixtral, for CPUs": ({"model_type": "mixtral"}, {"target": "cpu"}),
    "llama, linear, for CPUs": (_LLAMA | {"rope_scaling": _LINEAR}, {"target": "cpu"}),
}
"""By what is special of it, the content of a `config.json` and the options of an import."""
