"""Tiny decoder models of every family, with random weights, as a model repository has them."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from functools import cache
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
_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_ALTERNATING = ["sliding_attention", "full_attention"] * 2
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
_MIXED = {"num_local_experts": 4, "num_experts_per_tok": 2}
_LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0],
    "original_max_position_embeddings": 64,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
    "llama, linear": {"rope_parameters": _PLAIN_ROPE | {"rope_type": "linear", "factor": 3.0}},
    "llama, dynamic": {"rope_parameters": _PLAIN_ROPE | {"rope_type": "dynamic", "factor": 3.0}},
    "llama, llama3": FAMILIES["llama3"],
    "llama, yarn": {"rope_parameters": _YARN | {"beta_fast": 16.0, "attention_factor": 1.3}},
    "mistral": {"sliding_window": None},
    "mistral, window": {"sliding_window": 9},
    "ministral": {"head_dim": 16, "sliding_window": 7, "layer_types": _ALTERNATING},
    "qwen2": {"tie_word_embeddings": True},
    "qwen2, window": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2},
    "qwen2_moe": {
        **_EXPERTS,
        "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 56,
        "mlp_only_layers": [1],
        "norm_topk_prob": True,
    },
    "qwen3": {"head_dim": 32},
    "qwen3, yarn": {"head_dim": 32, "rope_parameters": _YARN},
    "qwen3_moe": {**_EXPERTS, "head_dim": 16, "moe_intermediate_size": 40},
    "mixtral": {**_MIXED, "sliding_window": 9},
    "olmoe": {**_EXPERTS, "clip_qkv": 0.8},
    "gemma": {"head_dim": 32},
    "gemma2": {
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "sliding_window": 7,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 5.0,
    },
    "gemma3_text": {
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "sliding_window": 7,
        "layer_types": _ALTERNATING,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": _PLAIN_ROPE,
        },
    },
    "gemma3_text, capped": {"head_dim": 16, "sliding_window": 7, "final_logit_softcapping": 5.0},
    "phi3": {"original_max_position_embeddings": 512},
    "phi3, window": {"sliding_window": 11, "original_max_position_embeddings": 512},
    "phi3, partial": {
        "original_max_position_embeddings": 512,
        "rope_parameters": _PLAIN_ROPE | {"partial_rotary_factor": 0.5},
    },
    "phi3, longrope": {"original_max_position_embeddings": 64, "rope_parameters": _LONG_ROPE},
    "olmo2": {},
    "olmo3": {
        "sliding_window": 7,
        "layer_types": _ALTERNATING,
        "rope_parameters": {"full_attention": _YARN, "sliding_attention": _PLAIN_ROPE},
    },
    "granite": {
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.5,
        "residual_multiplier": 0.7,
        "attention_multiplier": 0.3,
    },
    "granitemoe": {
        **_MIXED,
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.5,
        "residual_multiplier": 0.7,
        "attention_multiplier": 0.3,
    },
    "glm": {"head_dim": 16, "partial_rotary_factor": 0.5, "attention_bias": True},
    "glm4": {"head_dim": 16, "partial_rotary_factor": 0.5},
    "smollm3": {"no_rope_layers": [1, 0, 1, 0]},
    "smollm3, window": {
        "no_rope_layers": [1, 0, 1, 0],
        "use_sliding_window": True,
        "sliding_window": 6,
    },
    "starcoder2": {"sliding_window": None, "use_bias": True, "hidden_act": "gelu_pytorch_tanh"},
    "cohere": {"logit_scale": 0.25, "use_qk_norm": False},
    "cohere2": {"logit_scale": 0.5, "sliding_window": 8, "layer_types": _ALTERNATING},
    "seed_oss": {"head_dim": 16, "attention_bias": True},
    "gpt_oss": {
        **_MIXED,
        "head_dim": 16,
        "sliding_window": 7,
        "rope_parameters": _YARN | {"truncate": False, "beta_fast": 32.0, "beta_slow": 1.0},
    },
    "arcee": {"mlp_bias": True},
    "helium": {"head_dim": 16},
    "ernie4_5": {"head_dim": 16, "use_bias": True},
    "exaone4": {"sliding_window": 7, "layer_types": _ALTERNATING},
}
"""Of each family that PyTorch agents run, `model_type` first, values that use what is special."""


def usual_values() -> dict[str, Any]:
    """Returns the values of configurations that all tiny models have."""
    return dict(_COMMON)


@cache
def shared_variant(variant: str) -> tuple[ModelRepository, ModelKey]:
    """Returns one of `VARIANTS`, made once for all tests of this process, which only read it."""
    root = Path(tempfile.mkdtemp(prefix="cat-variant-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return make_variant(root, variant)


def make_variant(root: Path, variant: str) -> tuple[ModelRepository, ModelKey]:
    """Writes one of `VARIANTS` into a repository, with numbers that all show in the result."""
    family = variant.partition(",")[0]
    repository, key = make_tiny_decoder(root, family, values=VARIANTS[variant])
    model = reference_model(repository, key)
    unlike_ones(model)
    model.save_pretrained(repository.folder(key))
    return repository, key


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
        **(FAMILIES[family] if values is None else {"model_type": family} | values),
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
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or name.endswith("bias"):
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
