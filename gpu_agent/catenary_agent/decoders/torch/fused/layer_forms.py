"""The form of layers that are fused: that of Llama's, with biases or norms of heads where some are.

Layers are recognised by their class and by every part they have, since what is not known of them
would not be computed.
"""

from __future__ import annotations

from typing import Any

import torch

from catenary_agent.decoders.torch.torch_wide import WideLinear

MOST_NORMED = 16384
"""The longest row of a norm, which one program holds in registers."""
_FAMILIES = {"Llama": "llama", "Mistral": "mistral", "Qwen2": "qwen2", "Qwen3": "qwen3"}
"""The beginnings of the names of classes of this form, and the packages they are in."""
_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_ACTIVATIONS = {"SiLUActivation", "SiLU"}


def why_not_fused(layer: Any, rotated_size: int) -> str | None:
    """Returns the reason why a layer is not of the form that is fused, as a phrase; None if it is.

    Args:
        layer: A layer of `transformers` with the modules of `torch_wide`.
        rotated_size: Number of elements of a head that are rotated.
    """
    family = type(layer).__name__.removesuffix("DecoderLayer")
    if not is_class(layer, family, "DecoderLayer") or _parts(layer) != _LAYER:
        return f"{type(layer).__name__} is another form of layers"
    attention, mlp = layer.self_attn, layer.mlp
    found = _parts(attention)
    if not is_class(attention, family, "Attention") or found - _HEAD_NORMS != _ATTENTION:
        return "its attention has another form"
    if not is_class(mlp, family, "MLP") or _parts(mlp) != _MLP:
        return "its feed-forward part has another form"
    if type(mlp.act_fn).__name__ not in _ACTIVATIONS:
        return f"its gate is {type(mlp.act_fn).__name__}"
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    head_norms = [getattr(attention, name) for name in sorted(found & _HEAD_NORMS)]
    if len(head_norms) == 1 or not all(
        is_class(each, family, "RMSNorm") for each in (*norms, *head_norms)
    ):
        return "its norms have another form"
    return _why_not_matrices(attention, mlp) or _why_not_sizes(
        attention, mlp, (norms, head_norms), rotated_size
    )


def is_class(module: Any, family: str, ending: str) -> bool:
    """Returns True if a module's class is that of `transformers` for a family of this form."""
    kind, package = type(module), _FAMILIES.get(family)
    where = f"transformers.models.{package}.modeling_{package}"
    return kind.__name__ == f"{family}{ending}" and kind.__module__ == where


def _why_not_matrices(attention: Any, mlp: Any) -> str | None:
    entering = [attention.q_proj, attention.k_proj, attention.v_proj]
    others = [attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    for each in (*entering, *others):
        if type(each) is not WideLinear or each.weight.dtype is not torch.float16:
            return "its matrices are not of float16"
    if any(each.bias is not None for each in others):
        return "its matrices have biases"
    return "some matrices have biases" if len({e.bias is None for e in entering}) > 1 else None


def _why_not_sizes(
    attention: Any, mlp: Any, norms: tuple[list[Any], list[Any]], rotated_size: int
) -> str | None:
    size, hidden = attention.head_dim, len(norms[0][0].weight)
    queries, keys = len(attention.q_proj.weight), len(attention.k_proj.weight)
    inner = len(mlp.gate_proj.weight)
    expected = {
        attention.q_proj: (queries, hidden),
        attention.k_proj: (keys, hidden),
        attention.v_proj: (keys, hidden),
        attention.o_proj: (hidden, queries),
        mlp.gate_proj: (inner, hidden),
        mlp.up_proj: (inner, hidden),
        mlp.down_proj: (hidden, inner),
        **dict.fromkeys(norms[0], (hidden,)),
        **dict.fromkeys(norms[1], (size,)),
    }
    wrong = [each for each, shape in expected.items() if tuple(each.weight.shape) != shape]
    if wrong or hidden > MOST_NORMED or queries % size or keys % size:
        return "its matrices have other sizes"
    if rotated_size != size or size % 2:
        return f"it rotates {rotated_size} of {size} elements"
    epsilons = {each.variance_epsilon for each in norms[1]}
    return "its norms of heads differ" if len(epsilons) > 1 else None


def _parts(module: torch.nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}
