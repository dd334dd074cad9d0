"""Tiny decoder models of every family, with random weights, as a model repository has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from catenary_agent.decoders.model_files.sizes import all_tensors, table_from
from catenary_services.domain.decoder import DecoderTable
from catenary_services.domain.ids import ModelKey
from catenary_services.domain.model import ModelManifest
from catenary_services.models.model_repository import ModelRepository

LAYERS = 4
VOCABULARY = 256

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,  # random weights of the usual size say the same for any prompt
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "tie_word_embeddings": False},
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True},
    "llama3": {
        "model_type": "llama",
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "mistral-window": {"model_type": "mistral", "sliding_window": 9},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
    "qwen3-window": {
        "model_type": "qwen3",
        "head_dim": 16,
        "use_sliding_window": True,
        "sliding_window": 7,
        "max_window_layers": 2,
    },
}


_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
EVERY_FAMILY: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 9},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 32, "rope_parameters": _YARN},
    "phi3": {"sliding_window": 11},
    "olmo2": {},
    "starcoder2": {"sliding_window": None, "use_bias": True, "hidden_act": "gelu_pytorch_tanh"},
    "glm": {"head_dim": 16, "partial_rotary_factor": 0.5, "attention_bias": True},
    "glm4": {"head_dim": 16, "partial_rotary_factor": 0.5},
    "smollm3": {"no_rope_layers": [1, 0, 1, 0]},
    "ministral": {
        "head_dim": 16,
        "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "seed_oss": {"head_dim": 16, "attention_bias": True},
    "granite": {
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.5,
        "residual_multiplier": 0.7,
        "attention_multiplier": 0.3,
    },
    "cohere": {"logit_scale": 0.25, "use_qk_norm": False},
    "cohere2": {
        "logit_scale": 0.5,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
}
"""Of each `model_type` that PyTorch agents run, values that use what is special about it."""


def make_tiny_decoder(
    root: Path, family: str, shards: int = 1, values: dict[str, Any] | None = None
) -> tuple[ModelRepository, ModelKey]:
    """Writes a tiny model of a family into a repository.

    Args:
        root: Of the repository.
        family: One of `FAMILIES`, or a `model_type` if `values` are given.
        shards: More than 1: the weights are cut into several files.
        values: Of the configuration, beside the usual ones; None: those of `FAMILIES`.

    Returns:
        The repository and the model's key.
    """
    import torch
    import transformers

    values = {
        **_COMMON,
        **(FAMILIES[family] if values is None else {"model_type": family, **values}),
    }
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    repository = ModelRepository(root)
    key = ModelKey(family, "1")
    size = sum(p.nbytes for p in model.parameters()) // shards + 1
    model.save_pretrained(repository.folder(key), max_shard_size=size if shards > 1 else "1GB")
    files = sorted(repository.folder(key).glob("*.safetensors"))
    repository.write_manifest(
        ModelManifest(key, "decoder", files[0].name, 10**9, 8, False, "fp32", 128)
    )
    repository.write_decoder_table(key, _table(repository, key))
    return repository, key


def reference_model(repository: ModelRepository, key: ModelKey) -> Any:
    """Returns the whole model as `transformers` runs it."""
    import transformers

    folder = repository.folder(key)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()


def unlike_ones(model: Any) -> None:
    """Gives norms and biases random values: nobody would notice them missing."""
    import torch

    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.normal_(1.0, 0.3)


def reference_tokens(model: Any, prompt: list[int], count: int) -> list[int]:
    """Returns what `transformers.generate` says greedily after a prompt, end tokens or not."""
    import torch

    ids = torch.tensor([prompt])
    with torch.inference_mode():
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=count,
            min_new_tokens=0,
            eos_token_id=None,
            pad_token_id=0,
        )
    return [int(token) for token in output[0, len(prompt) :]]


def prompts(count: int, longest: int, seed: int = 0) -> list[list[int]]:
    """Returns prompts of random tokens and lengths."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, longest + 1, count)
    return [[int(token) for token in rng.integers(3, VOCABULARY, size)] for size in lengths]


def _table(repository: ModelRepository, key: ModelKey) -> DecoderTable:
    folder = repository.folder(key)
    config = json.loads((folder / "config.json").read_text())
    return table_from(
        config,
        all_tensors(folder),
        model_hash=repository.model_hash(key),
        end_token_ids=(2,),
    )
