"""Shapes of published language models, for `catenaryd make-model --like NAME`.

The configurations are those of the published `config.json` files; tensors have the names that
`transformers` gives them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Any

from catenary_services.errors import InvalidInput

_LLAMA_3_ROPE = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_BIAS_SPREAD = 0.02


@dataclass(frozen=True, slots=True)
class RandomTensor:
    """A tensor of a model that is to be written."""

    name: str
    shape: tuple[int, ...]
    spread: float
    """Standard deviation of its values; 0 if all are one."""


def _model(  # noqa: PLR0913, PLR0917  (the columns of a table)
    family: str,
    hidden: int,
    inner: int,
    layers: int,
    heads: int,
    groups: int,
    words: int,
    context: int,
    theta: float,
    *,
    head: int = 0,
    tied: bool = False,
    **others: Any,
) -> dict[str, Any]:
    """Returns a configuration; `groups` are the key-value heads, `inner` the width of the MLP."""
    return {
        "architectures": [_ARCHITECTURES[family]],
        "model_type": family,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": head or hidden // heads,
        "vocab_size": words,
        "max_position_embeddings": context,
        "rope_theta": theta,
        "rms_norm_eps": 1e-6 if family.startswith("qwen") else 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        **others,
    }


_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
SHAPES: Mapping[str, dict[str, Any]] = {
    "tiny": _model("llama", 64, 128, 4, 4, 2, 512, 4096, 1e4),
    "smollm2-135m": _model("llama", 576, 1536, 30, 9, 3, 49152, 8192, 1e5, tied=True),
    "smollm2-360m": _model("llama", 960, 2560, 32, 15, 5, 49152, 8192, 1e5, tied=True),
    "smollm2-1.7b": _model("llama", 2048, 8192, 24, 32, 32, 49152, 8192, 1.3e5, tied=True),
    "llama-3.2-1b": _model(
        "llama", 2048, 8192, 16, 32, 8, 128256, 131072, 5e5, tied=True, rope_scaling=_LLAMA_3_ROPE
    ),
    "llama-3.2-3b": _model(
        "llama", 3072, 8192, 28, 24, 8, 128256, 131072, 5e5, tied=True, rope_scaling=_LLAMA_3_ROPE
    ),
    "llama-2-7b": _model("llama", 4096, 11008, 32, 32, 32, 32000, 4096, 1e4),
    "llama-2-13b": _model("llama", 5120, 13824, 40, 40, 40, 32000, 4096, 1e4),
    "llama-3-8b": _model("llama", 4096, 14336, 32, 32, 8, 128256, 8192, 5e5),
    "llama-3-70b": _model("llama", 8192, 28672, 80, 64, 8, 128256, 8192, 5e5),
    "mistral-7b": _model("mistral", 4096, 14336, 32, 32, 8, 32768, 32768, 1e6, sliding_window=None),
    "qwen2.5-0.5b": _model("qwen2", 896, 4864, 24, 14, 2, 151936, 32768, 1e6, tied=True),
    "qwen2.5-7b": _model("qwen2", 3584, 18944, 28, 28, 4, 152064, 32768, 1e6),
    "qwen3-0.6b": _model("qwen3", 1024, 3072, 28, 16, 8, 151936, 40960, 1e6, head=128, tied=True),
    "qwen3-4b": _model("qwen3", 2560, 9728, 36, 32, 8, 151936, 40960, 1e6, head=128, tied=True),
    "qwen3-8b": _model("qwen3", 4096, 12288, 36, 32, 8, 151936, 40960, 1e6, head=128),
    "qwen3-14b": _model("qwen3", 5120, 17408, 40, 40, 8, 151936, 40960, 1e6, head=128),
}


def shape_of(name: str, layers: int = 0) -> dict[str, Any]:
    """Returns the configuration of a published model.

    Args:
        name: One of `SHAPES`.
        layers: Number of layers; 0 for that of the published model.

    Raises:
        InvalidInput: The name is unknown.
    """
    if name not in SHAPES:
        raise InvalidInput("like", f"{name!r} is none of {', '.join(SHAPES)}")
    config = dict(SHAPES[name])
    if layers:
        config["num_hidden_layers"] = layers
    return config


def tensors_of(config: Mapping[str, Any]) -> Iterator[RandomTensor]:
    """Yields every tensor of a configuration made by `shape_of`, in the order of the layers.

    Matrices have a standard deviation of 1 / sqrt(inputs), so that their outputs are as large as
    their inputs. For those that add to the residual stream it is divided by the square root of the
    number of such additions.
    """
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    head, layers, words = config["head_dim"], config["num_hidden_layers"], config["vocab_size"]
    family = config["model_type"]
    plain, adding = 1 / sqrt(hidden), 1 / sqrt(2 * layers)
    yield RandomTensor("model.embed_tokens.weight", (words, hidden), plain)
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        yield RandomTensor(prefix + "input_layernorm.weight", (hidden,), 0)
        for name, count in (("q", heads), ("k", groups), ("v", groups)):
            matrix = f"{prefix}self_attn.{name}_proj."
            yield RandomTensor(matrix + "weight", (count * head, hidden), plain)
            if family == "qwen2":
                yield RandomTensor(matrix + "bias", (count * head,), _BIAS_SPREAD)
        if family == "qwen3":
            yield RandomTensor(prefix + "self_attn.q_norm.weight", (head,), 0)
            yield RandomTensor(prefix + "self_attn.k_norm.weight", (head,), 0)
        leaving = adding / sqrt(heads * head)
        yield RandomTensor(prefix + "self_attn.o_proj.weight", (hidden, heads * head), leaving)
        yield RandomTensor(prefix + "post_attention_layernorm.weight", (hidden,), 0)
        yield RandomTensor(prefix + "mlp.gate_proj.weight", (inner, hidden), plain)
        yield RandomTensor(prefix + "mlp.up_proj.weight", (inner, hidden), plain)
        yield RandomTensor(prefix + "mlp.down_proj.weight", (hidden, inner), adding / sqrt(inner))
    yield RandomTensor("model.norm.weight", (hidden,), 0)
    if not config["tie_word_embeddings"]:
        yield RandomTensor("lm_head.weight", (words, hidden), plain)
