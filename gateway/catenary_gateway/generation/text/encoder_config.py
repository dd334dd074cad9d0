"""The settings of an encoder that say how its answers are used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SIGMOID, IDENTITY = "Sigmoid", "Identity"
"""The names of the activations that make a score of a logit."""
_MODULES = "torch.nn.modules."


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """The part of an encoder's config.json that concerns what is done with its answers."""

    is_matryoshka: bool = False
    """True if the beginning of an embedding is an embedding, too (matryoshka representation)."""
    dimensions: tuple[int, ...] = ()
    """The sizes of such beginnings that the model was made for; () for any, if it was."""
    activation: str = SIGMOID
    """The function that makes a score of the logit of a pair, by its name in PyTorch."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> EncoderConfig:
        """Returns what a config.json says, in the words of vLLM and sentence-transformers."""
        sizes = config.get("matryoshka_dimensions")
        sizes = sizes if isinstance(sizes, list) else ()
        dimensions = tuple(each for each in sizes if type(each) is int)
        own = config.get("sentence_transformers")
        said = own.get("activation_fn") if isinstance(own, dict) else None
        said = said or config.get("sbert_ce_default_activation_function")
        # Both libraries take the sigmoid where nothing is said and there is one class.
        name = said if isinstance(said, str) else _MODULES + SIGMOID
        name = name.rpartition(".")[2] if name.startswith(_MODULES) else name
        return cls(config.get("is_matryoshka") is True or bool(dimensions), dimensions, name)
