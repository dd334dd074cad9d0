"""A model of `transformers` without memory, into which our attention and experts are plugged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from catenary_agent.decoders.model_files.description import (
    DecoderDescription,
    describe,
    read_object,
    why_not,
)
from catenary_agent.decoders.model_files.families import FAMILIES, ModelFamily
from catenary_agent.decoders.model_files.quantisation import CODES, StoredQuantisation, stored_as
from catenary_agent.decoders.model_files.stored_names import pieces_of
from catenary_agent.decoders.torch.torch_attention import ATTENTION, attend
from catenary_agent.decoders.torch.torch_experts import EXPERTS, compute_experts
from catenary_services.errors import InvalidInput, NotSupported

_PARTS = {"embed_tokens", "layers", "norm", "rotary_emb"}
"""All parts that a model may have below its head; any other would have to be computed, too."""
_LAYERS = "model.layers."
_ANGLES = ".rotary_emb."
"""A part of the names of position angles, which some old files have in every layer."""


@dataclass(slots=True)
class DecoderSkeleton:
    """A model without weights, with what was read of its configuration."""

    facts: Mapping[str, Any]
    """The content of its `config.json`."""
    description: DecoderDescription
    family: ModelFamily
    stored: StoredQuantisation | None
    """The quantisation of its files."""
    model: Any
    """The model, all of whose tensors are without memory."""

    def rotary(self, device: torch.device) -> Any:
        """Returns the rotary embedding of its layers on a device.

        Types that are others for long texts stay as they are for short ones: sessions are no longer
        than that (`DecoderDescription.context_tokens`), and a CUDA graph could not look how long
        they are.
        """
        made = type(self.model.model.rotary_emb)(config=self.model.config).to(device)
        kinds = made.rope_type
        made.rope_type = dict.fromkeys(kinds, "default") if isinstance(kinds, dict) else "default"
        return made


def skeleton(folder: Path, dtype: torch.dtype, what: str) -> DecoderSkeleton:
    """Returns a model without weights.

    Args:
        folder: A folder with a `config.json`.
        dtype: The datatype of its tensors.
        what: The name of the model in errors.

    Raises:
        NotSupported: Its family, a key of its configuration or its quantisation is not supported.
        InvalidInput: The configuration is none.
    """
    import transformers
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    transformers.AttentionInterface.register(ATTENTION, attend)
    ALL_EXPERTS_FUNCTIONS.register(EXPERTS, compute_experts)
    facts = read_object(folder / "config.json")
    reason = why_not(facts)
    if reason is not None:
        raise NotSupported(f"{what}: {reason}")
    stored, described = stored_as(facts), describe(facts)
    try:
        config = transformers.AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        automatic: Any = transformers.AutoModelForCausalLM
        with torch.device("meta"):
            model = automatic.from_config(
                config, attn_implementation=ATTENTION, experts_implementation=EXPERTS, dtype=dtype
            )
    except Exception as error:  # a library's, of values that it does not take
        text = (str(error).splitlines() or [""])[0][:300]
        raise InvalidInput("config.json", f"is refused by transformers: {text}") from error
    _check_parts(model, described, what)
    # Both are multiplied, and the head may be tied to an embedding that is not here: plain modules,
    # whose weights are set when they are loaded.
    words, hidden = config.vocab_size, config.hidden_size
    with torch.device("meta"):
        model.model.embed_tokens = torch.nn.Embedding(words, hidden, dtype=dtype)
        model.lm_head = torch.nn.Linear(hidden, words, bias=False, dtype=dtype)
    model.requires_grad_(False).eval()
    return DecoderSkeleton(facts, described, FAMILIES[facts["model_type"]], stored, model)


def check_tensors(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises unless a folder's tensors are all that its configuration needs, and no others.

    Args:
        folder: A folder with a `config.json`.
        shapes: The shapes of the tensors it has, by name.

    Raises:
        NotSupported: The model's family, or a key of its configuration, is not supported.
        InvalidInput: A tensor is missing, has another shape, or belongs to nothing in its layer.
    """
    bare = skeleton(folder, torch.bfloat16, "the model")
    read = set()
    for prefix, module in modules(bare.model, 0, bare.description.blocks).items():
        for name, linear in linears(prefix, module):
            if bare.stored is None or f"{name}.{CODES}" not in shapes:
                continue
            for part, shape in bare.stored.parts(linear.out_features, linear.in_features).items():
                _check_there(f"{name}.{part}", shape, shapes)
            linear.weight = None
        for name, expected in module.state_dict().items():
            for piece in pieces_of(prefix + name, tuple(expected.shape), bare.family, shapes):
                _check_there(piece.name, piece.shape, shapes)
                read.add(piece.name)
    if bare.stored is None:
        _check_all_read(shapes, read, bare.description.blocks)


def modules(model: Any, first: int, last: int) -> dict[str, Any]:
    """Returns the modules of blocks `[first, last)`, by the prefix of their tensors' names."""
    base = model.model
    wanted = {f"{_LAYERS}{i}.": base.layers[i] for i in range(first, last)}
    if first == 0:
        wanted["model.embed_tokens."] = base.embed_tokens
    if last == len(base.layers):
        wanted |= {"model.norm.": base.norm, "lm_head.": model.lm_head}
    return wanted


def linears(prefix: str, module: torch.nn.Module) -> list[tuple[str, Any]]:
    """Returns the matrices of a layer by full name; none for embedding and head."""
    if not prefix.startswith(_LAYERS):
        return []
    found = [(n, each) for n, each in module.named_modules() if isinstance(each, torch.nn.Linear)]
    return [(prefix + name, each) for name, each in found]


def check_shape(name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """Raises InvalidInput unless a tensor has the shape that a module has."""
    if found != expected:
        raise InvalidInput(name, f"is {list(found)}, not {list(expected)}")


def _check_there(
    name: str, expected: tuple[int, ...], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    if name not in shapes:
        raise InvalidInput(name, "is not in the model's files")
    check_shape(name, shapes[name], expected)


def _check_all_read(shapes: Mapping[str, tuple[int, ...]], read: set[str], blocks: int) -> None:
    """Raises InvalidInput if a layer has a tensor that nobody computes with."""
    for name in sorted(shapes.keys() - read):
        layer = name.removeprefix(_LAYERS).split(".")[0]
        within = name.startswith(_LAYERS) and layer.isdecimal() and int(layer) < blocks
        if within and _ANGLES not in name:
            raise InvalidInput(name, "is in its files, and the configuration has no use for it")


def _check_parts(model: Any, described: DecoderDescription, what: str) -> None:
    """Raises NotSupported if a model has something that nobody computes or fills."""
    base = model.model
    others = {name for name, _ in base.named_children()} - _PARTS
    if others:
        raise NotSupported(f"{what} has parts that nobody computes: {', '.join(sorted(others))}")
    if getattr(model.lm_head, "bias", None) is not None:
        raise NotSupported(f"{what} has a projection with a bias")
    filled = base.layers.state_dict().keys()
    unfilled = [name for name, _ in base.layers.named_buffers() if name not in filled]
    if unfilled:
        raise NotSupported(f"{what} has numbers that no file has: {unfilled[0]}")
    for layer, window in zip(base.layers, described.windows, strict=True):
        attention = layer.self_attn
        size = getattr(attention, "head_dim", described.head_size)
        if size != described.head_size:
            raise NotSupported(f"{what} has heads of {size} elements, not {described.head_size}")
        # Some have a window, and whether it counts.
        slides = getattr(attention, "is_sliding", True)
        found = getattr(attention, "sliding_window", window) if slides else None
        if (found or None) != window:
            raise NotSupported(f"{what} has a layer with the window {found}, not {window}")
