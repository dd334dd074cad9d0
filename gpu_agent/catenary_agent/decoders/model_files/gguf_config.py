"""The configuration of a model in a GGUF file, read from the file's metadata and tensors.

Metadata are held to the rule of `config_keys`: a key of the architecture is understood, or changes
nothing, or is refused by its name. `transformers` would ignore it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from catenary_agent.words import words
from catenary_services.errors import InvalidInput

ARCHITECTURES: Mapping[str, str] = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""The architectures of llama.cpp that are read, with their classes in `transformers`. The file of a
Mistral says "llama"."""
ROTATION_FACTORS = "rope_freqs.weight"
"""The tensor that has the factors of the wavelengths of rotary embeddings, as Llama 3.1 does."""

_SIZES = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
_UNDERSTOOD = words("""
    attention.head_count_kv attention.key_length attention.value_length
    attention.layer_norm_rms_epsilon attention.sliding_window vocab_size
    rope.dimension_count rope.freq_base rope.scale_linear rope.scaling.type rope.scaling.factor
    rope.scaling.original_context_length rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow
""")
_WITHOUT_EFFECT = words("tensor_data_layout rope.scaling.finetuned")
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "rope.scaling.attn_factor": (0, 1),
    "rope.scaling.yarn_ext_factor": (1,),
    "rope.scaling.yarn_attn_factor": (1,),
}
"""Values with which a key changes nothing."""
_END_TOKENS = ("eos_token_id", "eot_token_id", "eom_token_id")
"""The tokens at which llama.cpp ends a text."""
_USUAL_BASE = 10000.0
_LLAMA_3: Mapping[str, float] = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_CLOSE = 1e-4


def config_of(reader: Any) -> dict[str, Any]:
    """Returns what `config.json` says of the model in a GGUF file.

    Args:
        reader: The `GGUFReader` of the file.

    Raises:
        InvalidInput: The metadata say something that is not computed, or lack a size.
    """
    architecture = _architecture(reader)
    said = _keys_of(reader, architecture)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config: dict[str, Any] = {
        "model_type": architecture,
        "architectures": [ARCHITECTURES[architecture]],
        # Some architectures have lists, with a number for each layer: these are not read.
        **{ours: int(_number(said, architecture, theirs)) for theirs, ours in _SIZES.items()},
        "rms_norm_eps": _number(said, architecture, "attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "hidden_act": "silu",
    }
    if architecture == "llama":
        config["mlp_bias"] = "blk.0.ffn_up.bias" in tensors
    elif architecture == "qwen2":
        del config["attention_bias"]  # it always has those of queries, keys and values
    layers = config["num_hidden_layers"]
    if layers > len(tensors):
        text = f"is {layers}, and the file has {len(tensors)} tensors"
        raise InvalidInput(f"{architecture}.block_count", text)
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    keys = int(_number(said, architecture, "attention.head_count_kv", heads))
    config["num_key_value_heads"] = keys
    config["head_dim"] = _head_size(said, architecture, hidden // heads)
    config["vocab_size"] = _vocabulary(said, architecture, tensors)
    config["rope_parameters"] = _rotation(said, architecture, config, tensors)
    context = config["max_position_embeddings"]
    window = said.get("attention.sliding_window") or context
    if not isinstance(window, int) or window < context:
        raise _refused(architecture, "attention.sliding_window", window)
    return config | _tokens(reader)


def _architecture(reader: Any) -> str:
    if reader.byte_order != "I":
        raise InvalidInput("byte order", "is that of other machines")
    kind = _value(reader, "general.type", "model")
    if kind != "model":
        raise InvalidInput("general.type", f"is {kind!r}, which is no model")
    pieces = _value(reader, "split.count", 1)
    if pieces > 1:
        raise InvalidInput("split.count", f"is {pieces}: join the files with llama-gguf-split")
    architecture = str(_value(reader, "general.architecture", ""))
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise InvalidInput("general.architecture", f"{architecture!r} is none of {known}")
    return architecture


def _value(reader: Any, key: str, absent: Any) -> Any:
    field = reader.fields.get(key)
    return absent if field is None else _contents(key, field)


def _contents(key: str, field: Any) -> Any:
    try:
        return field.contents()
    except UnicodeDecodeError:
        raise InvalidInput(key, "is no text in UTF-8") from None


def _keys_of(reader: Any, architecture: str) -> dict[str, Any]:
    """Returns the values of the architecture's keys, each without its prefix."""
    said = {}
    for key, field in reader.fields.items():
        name = key.removeprefix(f"{architecture}.")
        if name == key or name in _WITHOUT_EFFECT:
            continue
        value = _contents(key, field)
        neutral = (0, False, "", *_NEUTRAL.get(name, ()))
        if name in _SIZES or name in _UNDERSTOOD:
            said[name] = value
        elif value not in neutral:
            raise _refused(architecture, name, value)
    return said


def _refused(architecture: str, name: str, value: Any) -> InvalidInput:
    text = repr(value)
    shown = text if len(text) <= 60 else text[:57] + "..."
    return InvalidInput(f"{architecture}.{name}", f"is {shown}, which is not understood")


def _number(
    said: Mapping[str, Any], architecture: str, name: str, absent: float | None = None
) -> float:
    value = said.get(name, absent)
    if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise InvalidInput(f"{architecture}.{name}", f"is {value!r}, which is no positive number")
    return float(value)


def _head_size(said: Mapping[str, Any], architecture: str, usual: int) -> int:
    size = int(_number(said, architecture, "attention.key_length", usual))
    for name in ("attention.value_length", "rope.dimension_count"):
        if name in said and said[name] != size:
            text = f"is {said[name]!r}, which is not the {size} of its heads"
            raise InvalidInput(f"{architecture}.{name}", text)
    return size


def _vocabulary(said: Mapping[str, Any], architecture: str, tensors: Mapping[str, Any]) -> int:
    embedding = tensors.get("token_embd.weight")
    if embedding is None:
        raise InvalidInput("token_embd.weight", "is not in the file")
    rows = int(embedding.shape[-1])
    if said.get("vocab_size", rows) != rows:
        text = f"is {said['vocab_size']!r}, and token_embd.weight has {rows} rows"
        raise InvalidInput(f"{architecture}.vocab_size", text)
    return rows


def _tokens(reader: Any) -> dict[str, Any]:
    prefix = "tokenizer.ggml."
    made: dict[str, int | list[int]] = {}
    for ours, theirs in (("bos_token_id", "bos_token_id"), ("pad_token_id", "padding_token_id")):
        value = _value(reader, prefix + theirs, None)
        if value is not None:
            made[ours] = int(value)
    found = (_value(reader, prefix + name, None) for name in _END_TOKENS)
    ends = list(dict.fromkeys(int(each) for each in found if each is not None))
    if ends:
        made["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    return made


def _rotation(
    said: Mapping[str, Any],
    architecture: str,
    config: Mapping[str, Any],
    tensors: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns the parameters of the rotary embedding, as llama.cpp reads them."""
    base = {"rope_theta": _number(said, architecture, "rope.freq_base", _USUAL_BASE)}
    # The former key counts where the newer one is absent, and a factor alone is a linear one.
    named = "rope.scaling.factor" if "rope.scaling.factor" in said else "rope.scale_linear"
    factor = 1.0 if said.get(named) == 0 else _number(said, architecture, named, 1.0)
    kind = said.get("rope.scaling.type", "linear")
    factors = tensors.get(ROTATION_FACTORS)
    if factors is not None:
        if kind != "none" and factor != 1.0:
            raise _refused(architecture, "rope.scaling.factor", factor)
        values = np.array(factors.data, np.float64)
        return base | _like_llama3(values, base["rope_theta"], config["head_dim"])
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return base | {"rope_type": "default"}
    if kind == "linear":
        return base | {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise _refused(architecture, "rope.scaling.type", kind)
    context = config["max_position_embeddings"]
    scaling = "rope.scaling"
    length = _number(said, architecture, f"{scaling}.original_context_length", context)
    return base | {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": int(length),
        "beta_fast": _number(said, architecture, f"{scaling}.yarn_beta_fast", 32.0),
        "beta_slow": _number(said, architecture, f"{scaling}.yarn_beta_slow", 1.0),
    }


def _like_llama3(factors: np.ndarray[Any, Any], base: float, head: int) -> dict[str, Any]:
    """Returns the parameters of which wavelengths have the given factors.

    The file has a factor for each wavelength: 1 for short ones, the largest for long ones, and one
    between them where the inverse factors are a linear function of frequency.

    Raises:
        InvalidInput: No parameters of the type "llama3" have these factors.
    """
    if factors.shape != (head // 2,) or not (np.isfinite(factors) & (factors > 0)).all():
        raise InvalidInput(ROTATION_FACTORS, f"is not a number for each of {head // 2} angles")
    if (factors == 1).all():
        return {"rope_type": "default"}
    frequencies = base ** (-np.arange(0, head, 2) / head) / (2 * np.pi)
    largest = float(factors.max())
    candidates = [_LLAMA_3]
    between = (factors > 1) & (factors < largest)
    if largest > 1 and between.sum() > 1:
        smooth = (1 / factors[between] - 1 / largest) / (1 - 1 / largest)
        slope, offset = np.polyfit(frequencies[between], smooth, 1)
        if slope > 0 > offset:
            high = 1 - 1 / float(offset)
            original = round(float(slope) * (high - 1))
            candidates.append(
                {
                    "low_freq_factor": 1.0,
                    "high_freq_factor": high,
                    "original_max_position_embeddings": original,
                }
            )
    for each in candidates:
        low, length = each["low_freq_factor"], each["original_max_position_embeddings"]
        smooth = (length * frequencies - low) / (each["high_freq_factor"] - low)
        made = 1 / (1 / largest + (1 - 1 / largest) * smooth.clip(0, 1))
        if np.allclose(made, factors, rtol=_CLOSE, atol=0):
            return {"rope_type": "llama3", "factor": largest, **each}
    raise InvalidInput(ROTATION_FACTORS, "has factors that are not those of Llama 3")
