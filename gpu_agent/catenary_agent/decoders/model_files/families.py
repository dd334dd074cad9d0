"""The families of language models that the executors compute correctly, and the rejected ones.

A family is a `model_type` of `config.json`. The executors themselves compute what surrounds the
layers (embedding, scales, last norm, projection), so a family is correct only if nothing else
happens there. `tests/gpu_agent/decoders/model_files/test_families.py` compares each one with
`transformers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FAMILIES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "phi3",
    "olmo2",
    "starcoder2",
    "glm",
    "glm4",
    "smollm3",
    "ministral",
    "seed_oss",
    "granite",
    "cohere",
    "cohere2",
)
"""The families that PyTorch agents run."""
GRAPH_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""The families of which a graph can be made, which agents on a CPU need."""
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_REASONS = {
    "gpt_oss": "its attention has sinks, which ours has not",
    "gemma": "it scales embeddings as ours does not",
    "gemma2": "its attention scores are capped, which ours are not",
    "gemma3_text": "its layers have rotary embeddings of two kinds",
    "olmo3": "its layers have rotary embeddings of two kinds",
}


def why_not(config: Mapping[str, Any], families: tuple[str, ...] = FAMILIES) -> str | None:
    """Returns why a model cannot be run, as a phrase to follow its name; None if it can.

    Args:
        config: The content of its `config.json`.
        families: The families that can be run.
    """
    family = config.get("model_type")
    experts = next((name for name in _EXPERTS if (config.get(name) or 0) not in (0, 1)), None)
    if experts is not None:
        return f"{family!r} with {config[experts]} experts: mixtures of experts cannot be run"
    if family in families:
        return None
    if family in FAMILIES:
        return f"{family!r} is none of {', '.join(families)}, which agents on a CPU run"
    said = f"{family!r} is none of {', '.join(families)}"
    return f"{said}: {_REASONS[family]}" if family in _REASONS else said


def embedding_scale(config: Any) -> float:
    """Returns the factor of embedding rows in a `transformers` configuration; usually 1."""
    return float(getattr(config, "embedding_multiplier", 1.0) or 1.0)


def logit_scale(config: Any) -> float:
    """Returns the factor of logits in a `transformers` configuration; usually 1."""
    if config.model_type == "granite":
        return 1.0 / float(config.logits_scaling)
    if config.model_type in {"cohere", "cohere2"}:
        return float(config.logit_scale)
    return 1.0
