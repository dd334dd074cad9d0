"""The rule for keys of `config.json`: one that is not understood is refused, never ignored.

A key is accepted if

* the layers of its family compute with it, or every family's do;
* it has no effect on what is computed: names, tokens, training;
* it says that something is off: null, false or empty; or it has the one value, listed here, that
  changes nothing;
* it repeats what another accepted key says; or what it sets is switched off by another key.

Anything else may mean something that nobody computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from catenary_agent.decoders.model_files.families import ModelFamily, keys_in

_OF_EVERY_FAMILY = keys_in(
    "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads"
    " head_dim vocab_size max_position_embeddings hidden_act tie_word_embeddings rope_theta"
    " rope_scaling rope_parameters"
)
_WITHOUT_EFFECT = keys_in(
    # names and forms
    "architectures auto_map model_type torch_dtype dtype transformers_version _name_or_path"
    " _attn_implementation attn_implementation _commit_hash tokenizer_class model_max_length"
    " quantization_config cache_implementation use_cache keys_to_ignore_at_inference"
    " unsloth_fixed unsloth_version transformers.js_config is_llama_config"
    # training
    " initializer_range attention_dropout hidden_dropout resid_pdrop embd_pdrop residual_dropout"
    " embedding_dropout classifier_dropout router_aux_loss_coef router_jitter_noise"
    " output_router_logits pretraining_tp gradient_checkpointing"
    # of the class of all configurations
    " id2label label2id problem_type return_dict output_hidden_states output_attentions"
    " chunk_size_feed_forward task_specific_params is_decoder"
)
"""Keys that change no number. Files are read by names and shapes, and `quantization_config` is
checked where it is read."""
_OFF: tuple[Any, ...] = (None, False, "", [], {})
_TOKENS = ("_token_id", "_token_ids")
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "partial_rotary_factor": (1, 1.0),
    "rotary_pct": (1, 1.0),
    "num_experts": (0, 1),
    "num_local_experts": (0, 1),
    "n_routed_experts": (0, 1),
    "n_shared_experts": (0,),
    "embedding_multiplier": (1, 1.0),
    "residual_multiplier": (1, 1.0),
    "logits_scaling": (1, 1.0),
    "logit_scale": (1, 1.0),
    "position_embedding_type": ("rope",),
}
"""Values with which a key changes nothing, in a family that does not compute with it."""
_REPEATED = {
    "hidden_activation": "hidden_act",
    "hidden_act": "hidden_activation",
    "activation_function": "hidden_act",
    "layer_norm_epsilon": "norm_epsilon",
    "experts_per_token": "num_experts_per_tok",
    "sliding_window_size": "sliding_window",
}
"""Keys that may repeat what another one says."""
_SWITCHED = {"sliding_window": "use_sliding_window", "max_window_layers": "use_sliding_window"}
"""Keys that mean nothing while another one is false."""

_ROTATION_KEYS = ("rope_parameters", "rope_scaling")
_ROTATION = keys_in("type rope_type rope_theta")
_ROTATIONS: Mapping[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": keys_in("factor"),
    "dynamic": keys_in("factor"),
    "llama3": keys_in("factor low_freq_factor high_freq_factor original_max_position_embeddings"),
    "yarn": keys_in(
        "factor original_max_position_embeddings attention_factor beta_fast beta_slow mscale"
        " mscale_all_dim truncate"
    ),
    "longrope": keys_in(
        "factor original_max_position_embeddings attention_factor short_factor long_factor"
    ),
}
"""The types of rotary embeddings, with the keys that each computes with."""
_HOW = {True: "those of its kind for each layer", False: "the same for all layers"}
_LONGEST_SHOWN = 60


def refused_key(config: Mapping[str, Any], family: ModelFamily) -> str | None:
    """Returns a phrase that names a key that nobody computes with; None if there is none.

    Args:
        config: The content of a `config.json`.
        family: The adapter of its family.
    """
    for key, value in config.items():
        if key in _ROTATION_KEYS and not isinstance(value, Mapping | None):
            return f"its key {key!r} is {_shown(value)}, which is not an object"
        if not _is_understood(key, value, config, family):
            return f"its key {key!r} is {_shown(value)}, which is not understood"
    for name, rotation in rotations(config):
        reason = _refused_rotation(name, rotation, family)
        if reason is not None:
            return reason
    return None


def rotations(config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields the parameters of each rotary embedding, with the key that they are under."""
    for key in _ROTATION_KEYS:
        said = config.get(key)
        if not isinstance(said, Mapping) or not said:
            continue
        nested = {kind: each for kind, each in said.items() if isinstance(each, Mapping)}
        if nested:
            yield from ((f"{key}.{kind}", each) for kind, each in nested.items())
            rest = {name: each for name, each in said.items() if name not in nested}
            if any(each is not None for each in rest.values()):
                yield key, rest
        else:
            yield key, said


def rotation_type(rotation: Mapping[str, Any]) -> str:
    """Returns the type of a rotary embedding."""
    said = str(rotation.get("rope_type") or rotation.get("type") or "default")
    return "longrope" if said == "su" else said


def _is_understood(key: str, value: Any, config: Mapping[str, Any], family: ModelFamily) -> bool:
    computed = key in family.keys or key in _OF_EVERY_FAMILY
    computed |= key == "partial_rotary_factor" and family.partial_rotation
    if computed or key in _WITHOUT_EFFECT or key.endswith(_TOKENS):
        return True
    neutral = (*_OFF, *_NEUTRAL.get(key, ()), family.without_effect.get(key))
    repeated = key in _REPEATED and config.get(_REPEATED[key]) == value
    idle = key in _SWITCHED and config.get(_SWITCHED[key]) is False
    return repeated or idle or any(type(value) is type(each) and value == each for each in neutral)


def _refused_rotation(name: str, rotation: Mapping[str, Any], family: ModelFamily) -> str | None:
    kind = rotation_type(rotation)
    nested = "." in name
    # Older files have one `rope_scaling`, which `transformers` takes for that of some layers.
    if nested != family.rotaries_by_kind and (nested or not name.startswith("rope_scaling")):
        return f"its key {name!r} is not understood: rotary embeddings are {_HOW[not nested]}"
    if kind not in _ROTATIONS:
        return f"its {name!r} is of type {kind!r}, which is not understood"
    known = _ROTATION | _ROTATIONS[kind]
    for key, value in rotation.items():
        if key == "partial_rotary_factor" and (family.partial_rotation or value == 1):
            continue
        if key not in known and value is not None:
            shown = _shown(value)
            return f"its key '{name}.{key}' is {shown}, which is not understood with {kind!r}"
    return None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else text[: _LONGEST_SHOWN - 3] + "..."
