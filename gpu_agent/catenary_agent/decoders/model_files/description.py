"""The description of a decoder: what surrounds and fills its layers, as far as we compute or count.

The layers are modules of `transformers` that read the configuration themselves. A description has
the rest: sizes, what happens before the first and behind the last layer, rotary embeddings of
several kinds, what attention has to do beyond its usual formula, and experts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from catenary_agent.decoders.model_files.config_keys import (
    refused_key,
    rotation_type,
    rotations,
)
from catenary_agent.decoders.model_files.families import (
    FAMILIES,
    REASONS,
    ExpertKeys,
    ModelFamily,
)
from catenary_services.bounded_files import LARGEST_CONFIG_BYTES, read_bounded
from catenary_services.errors import InvalidInput

_SLIDING, _FULL = "sliding_attention", "full_attention"
_MOST_BLOCKS = 4096
_EXPERT_COUNTS = ("num_experts", "num_local_experts")


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """The experts of a block, of which each token passes some."""

    count: int
    chosen: int
    """Number of experts that a token passes."""
    inner_size: int
    shared_inner_size: int
    """The width of the expert that every token passes; 0 without one."""


@dataclass(frozen=True, slots=True)
class DecoderDescription:
    """A decoder as far as it is not in its layers and its weights."""

    blocks: int
    hidden_size: int
    inner_size: int
    """The width of the feed-forward part of layers without experts."""
    attention_heads: int
    key_value_heads: int
    head_size: int
    vocabulary_size: int
    context_tokens: int
    """The most tokens of a session. Rotary embeddings of some types are others for longer texts,
    and caches of sessions of any length are in one step: such a model is run up to there."""
    graph_context_tokens: int
    """The same of its graph for agents on a CPU, which may know less of windows."""
    embedding_scale: float = 1.0
    """The factor of embedding rows."""
    logit_scale: float = 1.0
    """The factor that logits are multiplied with behind the projection."""
    logit_cap: float | None = None
    """The bound that logits are bent to by a hyperbolic tangent; None for none."""
    score_cap: float | None = None
    """The same of the scores of attention."""
    has_sinks: bool = False
    windows: tuple[int | None, ...] = ()
    """The most tokens that a token of each layer attends to; None for all before it."""
    rotary_kinds: tuple[str, ...] = ()
    """The kind of each layer's rotary embedding; empty if all have the same."""
    rotated_size: int = 0
    """Number of elements of a head that are rotated."""
    has_fused_gate: bool = False
    """Whether one matrix makes both halves of the feed-forward part."""
    experts: ExpertSizes | None = None

    @property
    def has_plain_scores(self) -> bool:
        """False if no kernel for attention knows what happens to its scores."""
        return self.score_cap is None and not self.has_sinks


def describe(config: Mapping[str, Any]) -> DecoderDescription:
    """Returns the description of a model.

    Args:
        config: The content of its `config.json`. Those of a family that is not known are read like
            Llama's, and keys are not checked; `why_not` does that.

    Raises:
        InvalidInput: A size is missing.
    """
    family = _family(config)
    try:
        heads = int(config["num_attention_heads"])
        hidden = int(config["hidden_size"])
        head = int(_said(config, family, "head_dim") or hidden // heads)
        blocks = int(config["num_hidden_layers"])
        if not 0 < blocks <= _MOST_BLOCKS:
            raise ValueError(f"{blocks} layers")
        context, windows = _context(config), _windows(config, family, blocks)
        ignored = windows if family.graph is not None and family.graph.ignores_windows else ()
        unseen = min([context, *(each for each in ignored if each is not None)])
        return DecoderDescription(
            blocks=blocks,
            hidden_size=hidden,
            inner_size=int(config.get("intermediate_size") or 4 * hidden),
            attention_heads=heads,
            key_value_heads=int(config.get("num_key_value_heads") or heads),
            head_size=head,
            vocabulary_size=int(config["vocab_size"]),
            context_tokens=context,
            graph_context_tokens=unseen,
            embedding_scale=_embedding_scale(config, family, hidden),
            logit_scale=_logit_scale(config, family),
            logit_cap=_cap(config, family, "final_logit_softcapping"),
            score_cap=_cap(config, family, "attn_logit_softcapping"),
            has_sinks=family.has_sinks,
            windows=windows,
            rotary_kinds=_kinds(config, family, blocks) if family.rotaries_by_kind else (),
            rotated_size=int(head * _rotated_part(config, family)),
            has_fused_gate=family.fuses_gate,
            experts=None if family.experts is None else _experts(config, family.experts),
        )
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise InvalidInput("config.json", f"does not say a size: {error}") from None


def read_object(file: Path) -> dict[str, Any]:
    """Returns the content of a JSON file such as `config.json`.

    Raises:
        InvalidInput: It cannot be read, is too large or is no object.
    """
    try:
        document = json.loads(read_bounded(file, LARGEST_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidInput(file.name, f"cannot be read: {error}") from None
    if not isinstance(document, dict):
        raise InvalidInput(file.name, "is not an object")
    return document


def why_not(config: Mapping[str, Any]) -> str | None:
    """Returns why PyTorch agents cannot run a model, as a phrase; None if they can.

    Args:
        config: The content of its `config.json`.
    """
    name = config.get("model_type")
    if name in REASONS:
        return f"{name!r} cannot be run: {REASONS[str(name)]}"
    if name not in FAMILIES:
        return f"{name!r} is none of {', '.join(FAMILIES)}"
    reason = refused_key(config, FAMILIES[str(name)])
    return None if reason is None else f"{name!r}: {reason}"


def why_not_on_cpu(config: Mapping[str, Any]) -> str | None:
    """Returns why agents on a CPU cannot run a model with ONNX Runtime; None if they can."""
    reason = why_not(config)
    if reason is not None:
        return reason
    name, family = config["model_type"], _family(config)
    if family.graph is None:
        return f"{name!r} has no graph, which agents on a CPU run: {family.no_graph}"
    types = [rotation_type(rotation) for _, rotation in rotations(config)]
    unknown = [each for each in types if each not in family.graph.rotations]
    if unknown:
        return f"{name!r}: agents on a CPU have no rotary embeddings of type {unknown[0]!r}"
    if _rotated_part(config, family) != 1.0:
        return f"{name!r}: agents on a CPU rotate whole heads, and not a part of each"
    return None


def why_not_quantised(config: Mapping[str, Any], precision: str) -> str | None:
    """Returns why a model's weights cannot have a precision, as a phrase; None if they can."""
    mixed = _family(config).experts is not None
    if not mixed or (precision == "fp32" and not config.get("quantization_config")):
        return None
    return f"has experts, which are not run in {precision}: import it plain, with --precision fp32"


def _family(config: Mapping[str, Any]) -> ModelFamily:
    return FAMILIES.get(str(config.get("model_type")), ModelFamily())


def _said(config: Mapping[str, Any], family: ModelFamily, key: str) -> Any:
    """Returns a key's value, or what the family takes for it."""
    return config[key] if key in config else family.defaults.get(key)


def _embedding_scale(config: Mapping[str, Any], family: ModelFamily, hidden: int) -> float:
    if family.scales_embedding:
        return float(hidden**0.5)
    said = config.get("embedding_multiplier") if "embedding_multiplier" in family.keys else None
    return 1.0 if said is None else float(said)


def _logit_scale(config: Mapping[str, Any], family: ModelFamily) -> float:
    if family.divides_logits:
        return 1.0 / float(config.get("logits_scaling", 1.0))
    if "logit_scale" in family.keys:
        return float(_said(config, family, "logit_scale"))
    return 1.0


def _cap(config: Mapping[str, Any], family: ModelFamily, key: str) -> float | None:
    said = _said(config, family, key) if key in family.keys else None
    return None if said is None else float(said)


def _context(config: Mapping[str, Any]) -> int:
    most = int(config["max_position_embeddings"])
    for _, rotation in rotations(config):
        if rotation_type(rotation) == "longrope":
            # Files of this family have the length beside the parameters or among them.
            said = config.get("original_max_position_embeddings")
            most = min(most, int(said or rotation.get("original_max_position_embeddings") or most))
    return most


def _kinds(config: Mapping[str, Any], family: ModelFamily, blocks: int) -> tuple[str, ...]:
    said = config.get("layer_types") if "layer_types" in family.keys else None
    if said:
        if len(said) < blocks:
            raise ValueError("layer_types is shorter than the model")
        return tuple(str(each) for each in said[:blocks])
    if "max_window_layers" in family.keys:
        first = int(config.get("max_window_layers") or 0)
        return (_FULL,) * min(first, blocks) + (_SLIDING,) * (blocks - first)
    every = int(config.get("sliding_window_pattern") or family.window_pattern)
    return tuple(_SLIDING if not every or (i + 1) % every else _FULL for i in range(blocks))


def _windows(config: Mapping[str, Any], family: ModelFamily, blocks: int) -> tuple[int | None, ...]:
    said = config.get("sliding_window") if "sliding_window" in family.keys else None
    if said is None or config.get("use_sliding_window") is False:
        return (None,) * blocks
    kinds = _kinds(config, family, blocks)
    return tuple(int(said) if kind == _SLIDING else None for kind in kinds)


def _rotated_part(config: Mapping[str, Any], family: ModelFamily) -> float:
    if not family.partial_rotation:
        return 1.0
    said = [rotation.get("partial_rotary_factor") for _, rotation in rotations(config)]
    said += [_said(config, family, "partial_rotary_factor")]
    return float(next((each for each in said if each is not None), 1.0))


def _experts(config: Mapping[str, Any], keys: ExpertKeys) -> ExpertSizes:
    shared = keys.shared_inner
    counts = {int(config[key]) for key in _EXPERT_COUNTS if config.get(key)}
    if len(counts) != 1:
        raise ValueError(" and ".join(_EXPERT_COUNTS))
    return ExpertSizes(
        count=counts.pop(),
        chosen=int(config["num_experts_per_tok"]),
        inner_size=int(config[keys.inner]),
        shared_inner_size=int(config[shared]) if shared is not None else 0,
    )
