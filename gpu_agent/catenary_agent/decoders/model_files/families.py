"""The families of language models that the executors compute correctly, and the rejected ones.

A family is a `model_type` of `config.json`. Layers are those of `transformers`, into which our
attention, rotary embeddings and experts are plugged. A row of `FAMILIES` has what is needed
beyond: the keys of the configuration that these layers compute with, what happens around the
layers, and the names that files have for tensors. `description` derives from it what the
executors compute, and `config_keys` refuses a configuration with any other key that counts.

`tests/gpu_agent/decoders/model_files/test_families.py` compares each one with `transformers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ExpertKeys:
    """The keys with sizes of experts, and the names of their matrices in files."""

    inner: str = "intermediate_size"
    """The key with the width inside an expert."""
    shared_inner: str | None = None
    """The key with the width of the expert that every token passes; None without one."""
    matrices: tuple[str, str, str] | None = ("gate_proj", "up_proj", "down_proj")
    """The names of an expert's matrices in files: gate, other half and output; None if files have
    those of all experts in one tensor."""


@dataclass(frozen=True, slots=True)
class GraphLimits:
    """The limits of the builder of graphs for a family, found by comparison with `transformers`."""

    rotations: tuple[str, ...] = ("default",)
    """The types of rotary embeddings it computes."""
    ignores_windows: bool = False
    """Whether it leaves out windows, so that sessions end where one begins to count."""


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """The adapter of a family: how its configuration and its files are read."""

    keys: frozenset[str] = frozenset()
    """The keys that its layers compute with, besides those of every family."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """The values of absent keys that are read here, as `transformers` has them."""
    without_effect: Mapping[str, Any] = field(default_factory=dict)
    """Keys that say what is computed anyway, with that value."""
    scales_embedding: bool = False
    """Whether embeddings are multiplied with the square root of the hidden size."""
    divides_logits: bool = False
    """Whether `logits_scaling` divides logits; `logit_scale` multiplies those of other families."""
    partial_rotation: bool = False
    """Whether a part of a head may be left as it is."""
    rotaries_by_kind: bool = False
    """Whether layers of each kind in `layer_types` have rotary embeddings of their own."""
    window_pattern: int = 0
    """Every how many layers one has no window, if `layer_types` is absent; 0 if all are alike."""
    has_sinks: bool = False
    """Whether every head has a number in the softmax that stands for no token."""
    fuses_gate: bool = False
    """Whether one matrix makes both halves of the feed-forward part."""
    experts: ExpertKeys | None = None
    graph: GraphLimits | None = None
    """The limits of its graphs, which agents on a CPU need; None if none can be made."""
    no_graph: str = "the builder of graphs does not know it"
    """The reason why none can be made, as a phrase."""
    renamed: tuple[tuple[str, str], ...] = ()
    """Parts of tensor names in `transformers`, and what files have instead."""


def keys_in(text: str) -> frozenset[str]:
    """Returns the keys that a text lists."""
    return frozenset(text.split())


_LLAMA = keys_in("rms_norm_eps attention_bias mlp_bias")
_QWEN = keys_in("rms_norm_eps use_sliding_window sliding_window max_window_layers layer_types")
_EXPERTS = keys_in("num_experts_per_tok norm_topk_prob num_experts")
_QWEN_EXPERTS = _EXPERTS | keys_in("moe_intermediate_size decoder_sparse_step mlp_only_layers")
_MIXED = keys_in("num_local_experts num_experts_per_tok")
_GEMMA = keys_in("rms_norm_eps attention_bias")
_GEMMA_2 = _GEMMA | keys_in(
    "hidden_activation query_pre_attn_scalar sliding_window layer_types final_logit_softcapping"
)
_GRANITE = _LLAMA | keys_in(
    "embedding_multiplier logits_scaling residual_multiplier attention_multiplier"
)
_COHERE = keys_in("layer_norm_eps attention_bias logit_scale")
_WINDOWS = keys_in("rms_norm_eps sliding_window layer_types")

FAMILIES: Mapping[str, ModelFamily] = {
    "llama": ModelFamily(_LLAMA, graph=GraphLimits(("default", "llama3", "dynamic"))),
    "mistral": ModelFamily(
        keys_in("rms_norm_eps sliding_window"), graph=GraphLimits(ignores_windows=True)
    ),
    "ministral": ModelFamily(_WINDOWS),
    "qwen2": ModelFamily(_QWEN, graph=GraphLimits()),
    "qwen3": ModelFamily(_QWEN | {"attention_bias"}, {"head_dim": 128}, graph=GraphLimits()),
    "qwen2_moe": ModelFamily(
        _QWEN | _QWEN_EXPERTS | keys_in("shared_expert_intermediate_size qkv_bias"),
        experts=ExpertKeys("moe_intermediate_size", "shared_expert_intermediate_size"),
    ),
    "qwen3_moe": ModelFamily(
        _QWEN_EXPERTS
        # The first is the second by another name, which `transformers` writes.
        | keys_in(
            "num_local_experts rms_norm_eps attention_bias use_sliding_window sliding_window"
        ),
        experts=ExpertKeys("moe_intermediate_size"),
    ),
    "mixtral": ModelFamily(
        _MIXED | keys_in("rms_norm_eps sliding_window"),
        experts=ExpertKeys(matrices=("w1", "w3", "w2")),
        renamed=((".mlp.", ".block_sparse_moe."),),
    ),
    "olmoe": ModelFamily(
        _EXPERTS | keys_in("rms_norm_eps attention_bias clip_qkv"),
        experts=ExpertKeys(),
    ),
    "gemma": ModelFamily(_GEMMA, {"head_dim": 256}, scales_embedding=True, graph=GraphLimits()),
    "gemma2": ModelFamily(
        _GEMMA_2 | {"attn_logit_softcapping"},
        {"head_dim": 256, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
        scales_embedding=True,
        window_pattern=2,
        graph=GraphLimits(),
    ),
    "gemma3_text": ModelFamily(
        _GEMMA_2 | keys_in("sliding_window_pattern _sliding_window_pattern rope_local_base_freq"),
        {"head_dim": 256},
        scales_embedding=True,
        rotaries_by_kind=True,
        window_pattern=6,
        no_graph="the builder of graphs reads one rotary embedding, and it has two",
    ),
    "phi3": ModelFamily(
        keys_in("rms_norm_eps sliding_window original_max_position_embeddings"),
        without_effect={"full_attn_mod": 1, "interpolate_factor": 1},
        partial_rotation=True,
        fuses_gate=True,
        graph=GraphLimits(ignores_windows=True),
    ),
    "olmo2": ModelFamily(keys_in("rms_norm_eps attention_bias")),
    "olmo3": ModelFamily(_WINDOWS | {"attention_bias"}, rotaries_by_kind=True, window_pattern=4),
    "granite": ModelFamily(_GRANITE, divides_logits=True, graph=GraphLimits()),
    "granitemoe": ModelFamily(
        _GRANITE | _MIXED,
        divides_logits=True,
        experts=ExpertKeys(matrices=None),
        renamed=(
            (".experts.gate_up_proj", ".input_linear.weight"),
            (".experts.down_proj", ".output_linear.weight"),
            (".router.weight", ".router.layer.weight"),
        ),
    ),
    "glm": ModelFamily(
        _GEMMA,
        {"head_dim": 128, "partial_rotary_factor": 0.5},
        partial_rotation=True,
        fuses_gate=True,
    ),
    "glm4": ModelFamily(
        _GEMMA,
        {"head_dim": 128, "partial_rotary_factor": 0.5},
        partial_rotation=True,
        fuses_gate=True,
    ),
    "smollm3": ModelFamily(
        _LLAMA
        | keys_in("no_rope_layers no_rope_layer_interval use_sliding_window sliding_window")
        | {"layer_types"},
        no_graph="the builder of graphs fails at layers without rotary embeddings",
    ),
    "starcoder2": ModelFamily(
        keys_in("norm_epsilon use_bias sliding_window"),
        without_effect={
            "mlp_type": "default",
            "norm_type": "layer_norm",
            "attention_softmax_in_fp32": True,
            "scale_attention_softmax_in_fp32": True,
            "scale_attn_weights": True,
        },
    ),
    "cohere": ModelFamily(_COHERE | {"use_qk_norm"}, {"logit_scale": 0.0625}),
    "cohere2": ModelFamily(
        _COHERE | keys_in("sliding_window layer_types sliding_window_pattern"),
        {"logit_scale": 0.0625},
        without_effect={
            "position_embedding_type": "rope_gptj",
            "rotary_pct": 1.0,
            "order_of_interleaved_layers": "local_attn_first",
            "use_embedding_sharing": True,
            "use_gated_activation": True,
            "use_parallel_block": True,
            "use_parallel_embedding": True,
        },
        window_pattern=4,
    ),
    "seed_oss": ModelFamily(_LLAMA | {"attention_out_bias"}, {"head_dim": 128}),
    "gpt_oss": ModelFamily(
        _WINDOWS
        | _MIXED
        # The last one is repeated in the parameters of the rotary embedding.
        | keys_in("attention_bias swiglu_alpha swiglu_limit initial_context_length"),
        {"head_dim": 64},
        window_pattern=2,
        has_sinks=True,
        experts=ExpertKeys(matrices=None),
        no_graph="the builder of graphs fails at its experts",
    ),
    "arcee": ModelFamily(_LLAMA),
    "helium": ModelFamily(_LLAMA, {"head_dim": 128}),
    "ernie4_5": ModelFamily(
        keys_in("rms_norm_eps use_bias"), {"head_dim": 128}, graph=GraphLimits()
    ),
    "exaone4": ModelFamily(_WINDOWS | {"sliding_window_pattern"}, window_pattern=4),
}
"""The families that PyTorch agents run, by `model_type`."""
REASONS = {
    "falcon": "its attention cannot be replaced by ours",
    "deepseek_v2": "its keys are wider than its values, and caches have one width",
    "deepseek_v3": "its keys are wider than its values, and caches have one width",
    "stablelm": "its layers do not hand on to attention what ours needs",
    "gpt_neox": "its parts have other names",
    "phi": "its projection has a bias",
    "gemma3": "it reads pictures; its text model alone is a gemma3_text",
    "qwen3_next": "some of its layers have no attention",
}
"""The reasons why families are rejected, as phrases, where there is more to say than a name."""
