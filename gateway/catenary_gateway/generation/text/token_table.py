"""The texts of a model's tokens, and what sequences of them come to.

The table was read in the process that runs the model's tokenizer. Here it is data: tokens become
text by code of this project, without a step to another process for each token of an answer.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

import numpy as np

from catenary_gateway.generation.text.jailed.orders import unpacked
from catenary_gateway.generation.text.token_decoders import (
    BYTE_LEVEL,
    DecoderStep,
    bytes_of_token,
    kinds_of,
    steps_of,
)

if TYPE_CHECKING:
    from catenary_gateway.generation.text.jailed.orders import TextDescription

_NONE: frozenset[int] = frozenset()


class TokenTable:
    """The tokens of one tokenizer by their ids."""

    def __init__(self, described: TextDescription) -> None:
        """Takes what the worker says.

        Raises:
            ValueError: It makes no sense, or has a decoder that is not known.
        """
        self._content = described.tokens
        self._starts = unpacked(described.starts)
        ends = np.frombuffer(self._starts, np.uint32)
        is_sorted = bool((ends[1:] >= ends[:-1]).all())
        if not ends.size or ends[0] or not is_sorted or ends[-1] != len(self._content):
            raise ValueError("its tokens do not fit their table")
        self.added = described.added
        self.special = frozenset(described.special)
        """Ids of the added tokens that answers do not show, unless they are asked to."""
        document = None if described.decoder is None else json.loads(described.decoder)
        self.kinds = kinds_of(document)
        """The steps of the tokenizer's decoder, as its file describes them."""
        steps = steps_of(self.kinds)
        self._joined = " " if document is None else ""
        self._steps: list[DecoderStep] = steps
        self.is_bytewise = [kind.get("type") for kind in self.kinds] == [BYTE_LEVEL]
        """True if a text is what the bytes of its tokens are together."""
        self._texts: dict[int, str | None] = {}
        self._bytes: dict[int, bytes] = {}

    def text_of(self, token_id: int) -> str | None:
        """Returns a token as its vocabulary has it; None for an id without one."""
        try:
            return self._texts[token_id]
        except KeyError:
            text = self._texts[token_id] = self._read(token_id)
            return text

    def bytes_of(self, token_id: int) -> bytes:
        """Returns what a token adds to a text, where texts are bytewise."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = bytes_of_token(self.text_of(token_id) or "")
        return known

    def characters(self, token_ids: Iterable[int]) -> int:
        """Returns how many characters tokens have in the vocabulary."""
        return sum(len(self.text_of(each) or "") for each in token_ids)

    def decode(self, token_ids: Iterable[int], hidden: Collection[int] = _NONE) -> str:
        """Returns the text of tokens, those with the ids `hidden` left out."""
        shown = (self.text_of(each) for each in token_ids if each not in hidden)
        texts = [text for text in shown if text is not None]
        for step in self._steps:
            texts = step(texts)
        return self._joined.join(texts)

    def _read(self, token_id: int) -> str | None:
        if not 0 <= token_id < len(self._starts) - 1:
            return None
        content = self._content[self._starts[token_id] : self._starts[token_id + 1]]
        return content[1:].decode(errors="replace") if content else None
