"""GGUF files of random models, as llama.cpp's converter writes them, and what is special of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from small_models.tiny_decoders import LAYERS, VOCABULARY

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_WIDE = {"hidden_size": 256, "intermediate_size": 512}
"""Sizes that come out even in blocks of 256 weights."""
_BIASES = {"attention_bias": True, "mlp_bias": True}
_ROPE = {"rope_theta": 10000.0}
_LLAMA_3 = _ROPE | {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = _ROPE | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
_SCALES = {"Q2_K": (80, 84), "Q3_K": (108, 110), "Q4_K": (0, 4), "Q5_K": (0, 4), "Q6_K": (208, 210)}
"""Where blocks have their scales in float16; the gguf library does not quantise to these types."""
KEPT = ("Q4_0", "Q4_1", "Q4_K")
"""The types of which PyTorch agents keep the codes."""


@dataclass(frozen=True, slots=True)
class GgufCase:
    """A file: a model of a family, and the type of its matrices."""

    family: str
    values: Mapping[str, Any] = field(default_factory=dict)
    kind: str = "F16"

    @property
    def precision(self) -> str:
        return "int4" if self.kind in KEPT else "fp32"


_BY_FAMILY = {
    "llama": GgufCase("llama", _BIASES),
    "llama, tied": GgufCase("llama", {"tie_word_embeddings": True}),
    "llama, wide heads": GgufCase("llama", {"head_dim": 32}),
    "llama, linear": GgufCase(
        "llama", {"rope_parameters": _ROPE | {"rope_type": "linear", "factor": 3.0}}
    ),
    "llama, llama3": GgufCase("llama", {"rope_parameters": _LLAMA_3}),
    "llama, yarn": GgufCase("llama", {"rope_parameters": _YARN}),
    "qwen2": GgufCase("qwen2", {"tie_word_embeddings": True}),
    "qwen2, yarn": GgufCase("qwen2", {"rope_parameters": _YARN}),
    "qwen3": GgufCase("qwen3", {"head_dim": 32}),
}
_BY_TYPE = {
    kind: GgufCase("llama", _WIDE if kind.endswith("_K") else {}, kind)
    for kind in (
        *("F32", "BF16", "Q8_0", "Q5_0", "Q5_1", "Q6_K", "Q5_K", "Q3_K", "Q2_K", "MXFP4"),
        *KEPT,
    )
}
CASES: dict[tuple[str, str], GgufCase] = {
    **{("GGUF F16", model): case for model, case in _BY_FAMILY.items()},
    **{(f"GGUF {kind}", "llama"): case for kind, case in _BY_TYPE.items()},
    ("GGUF Q4_K", "qwen2"): GgufCase("qwen2", _WIDE, "Q4_K"),
}
"""By the form of the file and the model, as docs/families.md has them."""
GRAPHS = (
    ("GGUF F16", "llama, llama3"),
    ("GGUF F16", "qwen2"),
    ("GGUF F16", "qwen3"),
    ("GGUF Q8_0", "llama"),
)
"""Those of `CASES` of which graphs are made."""


def random_model(family: str, values: Mapping[str, Any]) -> Any:
    """Returns a tiny model with numbers that all show in the result."""
    import torch
    import transformers

    from small_models.tiny_decoders import unlike_ones, usual_values

    torch.manual_seed(7)
    config = transformers.AutoConfig.for_model(family, **usual_values() | dict(values))
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    unlike_ones(model)
    return model


def write_gguf(
    file: Path, model: Any, kind: str, change: Callable[[Any], object] = lambda _: None
) -> None:
    """Writes a model as llama.cpp's converter and its quantiser do; the model gets their numbers.

    Args:
        file: The file to write.
        model: The model, of `transformers`.
        kind: The type of the matrices of layers; others are F16, or as exact as these.
        change: Adds to what the writer has, before it is written.
    """
    import gguf
    import torch
    from gguf.quants import dequantize, quantize

    config = model.config
    writer = gguf.GGUFWriter(file, config.model_type)
    _add_sizes(writer, config)
    _add_tokenizer(writer)
    names = gguf.get_tensor_name_map(
        getattr(gguf.MODEL_ARCH, config.model_type.upper()), config.num_hidden_layers
    )
    for name, parameter in model.named_parameters():
        values = parameter.detach().numpy()
        base, _, ending = name.rpartition(".")
        wanted = "F32" if values.ndim == 1 else kind
        if values.ndim == 2 and not base.endswith(LINEARS):
            wanted = kind if kind in ("F32", "BF16") else "F16"
        type_ = getattr(gguf.GGMLQuantizationType, wanted)
        rows = _row_order(config, base, len(values))
        scales = _SCALES.get(wanted)
        data = quantize(values[rows], type_) if scales is None else _random(values, type_, scales)
        with torch.no_grad():
            parameter[torch.from_numpy(rows)] = torch.from_numpy(
                dequantize(data, type_).reshape(values.shape).copy()
            )
        writer.add_tensor(f"{names.get_name(base)}.{ending}", data, raw_dtype=type_)
    change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_sizes(writer: Any, config: Any) -> None:
    import gguf

    heads = config.num_attention_heads
    head = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    if config.model_type == "llama":
        writer.add_vocab_size(config.vocab_size)
        writer.add_rope_dimension_count(head)
    if head != config.hidden_size // heads or config.model_type == "qwen3":
        writer.add_key_length(head)
        writer.add_value_length(head)
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "llama3":
        factors = np.array(list(_wavelength_factors(rope, head)), np.float32)
        writer.add_tensor("rope_freqs.weight", factors)


def _wavelength_factors(rope: Mapping[str, Any], head: int) -> Iterator[float]:
    """Yields what the converter writes for Llama 3.1."""
    low, high, length = (
        rope[name]
        for name in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    for at in range(0, head, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (at / head)
        if wavelength < length / high:
            yield 1.0
        elif wavelength > length / low:
            yield rope["factor"]
        else:
            smooth = (length / wavelength - low) / (high - low)
            yield 1 / ((1 - smooth) / rope["factor"] + smooth)


def _add_tokenizer(writer: Any) -> None:
    tokens = ["a", "b", "ab", *(f"t{at}" for at in range(3, VOCABULARY))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * VOCABULARY)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def _row_order(config: Any, base: str, rows: int) -> np.ndarray:
    """Returns which row of the model each row of the file is.

    In the file of a Llama the halves of each head are interleaved.
    """
    projection = base.rpartition(".")[2]
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    order = np.arange(rows)
    if config.model_type != "llama" or projection not in heads:
        return order
    return order.reshape(heads[projection], 2, -1).swapaxes(1, 2).reshape(-1)


def _random(values: np.ndarray, type_: Any, scales: tuple[int, int]) -> np.ndarray:
    """Returns blocks of random codes with small scales."""
    import gguf

    weights, size = gguf.GGML_QUANT_SIZES[type_]
    rng = np.random.default_rng(values.size)
    blocks = rng.integers(0, 256, (len(values), values.shape[1] // weights, size)).astype(np.uint8)
    first, last = scales
    numbers = rng.uniform(0.001, 0.01, (*blocks.shape[:2], (last - first) // 2)).astype("<f2")
    blocks[..., first:last] = numbers.view(np.uint8)
    return blocks.reshape(len(values), -1)


# ---- what is refused ----


def _said(key: str, value: Any) -> Callable[[Any], object]:
    """Returns a change that has a file say something more of a model."""

    def change(writer: Any) -> None:
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        writer.kv_data[-1].pop(key, None)
        add[type(value)](key, value)

    return change


def _more(name: str, size: int) -> Callable[[Any], object]:
    return lambda writer: writer.add_tensor(name, np.linspace(1, 2, size, dtype=np.float32))


def _without(name: str) -> Callable[[Any], object]:
    return lambda writer: writer.tensors[-1].pop(name)


def _whole_numbers(writer: Any) -> None:
    del writer.tensors[-1]["blk.0.ffn_up.weight"]
    writer.add_tensor("blk.0.ffn_up.weight", np.ones((96, 64), np.int32))


REFUSED: dict[str, Callable[[Any], object]] = {
    "gemma3": _said("general.architecture", "gemma3"),
    "phi3": _said("general.architecture", "phi3"),
    "qwen3moe": _said("general.architecture", "qwen3moe"),
    "gpt-oss": _said("general.architecture", "gpt-oss"),
    "llama, experts": _said("llama.expert_count", 8),
    "llama, a window": _said("llama.attention.sliding_window", 16),
    "llama, longrope": _said("llama.rope.scaling.type", "longrope"),
    "llama, a scale of attention": _said("llama.attention.scale", 0.5),
    "llama, a scale of logits": _said("llama.logit_scale", 0.25),
    "llama, a part of each head rotated": _said("llama.rope.dimension_count", 8),
    "llama, other factors of wavelengths": _more("rope_freqs.weight", 8),
    "llama, a norm of queries": _more("blk.0.attn_q_norm.weight", 16),
    "llama, a bias alone": _more("blk.0.attn_q.bias", 64),
    "llama, a tensor is missing": _without("blk.3.ffn_up.weight"),
    "llama, whole numbers": _whole_numbers,
    "an adapter": _said("general.type", "adapter"),
    "one file of several": _said("split.count", 2),
}
"""Changes of the file of a Llama, by what is special of it."""
assert LAYERS == 4  # what is missing above is in the last one
