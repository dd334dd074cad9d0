"""The bytes that single tokens add to a text.

A tokenizer decodes sequences only: alone, half a character becomes a replacement character, and the
first word of a text may lose its space. Hence tokens are read from the vocabulary, in the way in
which the steps of the tokenizer's decoder say that they are written there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer

_SPACE = "\u2581"
"""SentencePiece's sign for a space."""
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """The bytes of the tokens of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {id_: str(token.content) for id_, token in _added(tokenizer)}
        decoder = tokenizer.decoder
        state = None if decoder is None else json.loads(decoder.__getstate__())
        steps = list(_decoder_steps(state))
        kinds = {step.get("type") for step in steps}
        self._is_byte_level = "ByteLevel" in kinds
        self._has_byte_tokens = "ByteFallback" in kinds
        self._has_signs = "Metaspace" in kinds or any(map(_replaces_signs, steps))
        self._is_plain = not kinds - {"ByteLevel", "Fuse", "Strip"}
        self._known: dict[int, bytes] = {}

    def of(self, token_id: int) -> bytes:
        """Returns the bytes of a token; none for an id that the tokenizer does not have."""
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._read(token_id)
        return known

    def _read(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._tokenizer.id_to_token(token_id) or ""
        if self._is_byte_level and _BYTE_OF.keys() >= set(token):
            return bytes(_BYTE_OF[character] for character in token)
        if self._has_byte_tokens and (byte := _BYTE.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        if self._has_signs:
            token = token.replace(_SPACE, " ")
        elif not self._is_plain and token:
            token = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return token.encode()


def _added(tokenizer: Tokenizer) -> Iterator[tuple[int, Any]]:
    yield from tokenizer.get_added_tokens_decoder().items()


def _decoder_steps(decoder: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    if decoder is None:
        return
    if decoder.get("type") != "Sequence":
        yield decoder
        return
    for step in decoder.get("decoders", ()):
        yield from _decoder_steps(step)


def _replaces_signs(step: dict[str, Any]) -> bool:
    pattern = step.get("pattern")
    text = pattern.get("String") if isinstance(pattern, dict) else None
    return step.get("type") == "Replace" and text == _SPACE and step.get("content") == " "


def _byte_characters() -> dict[str, int]:
    """Returns the byte that each character of a byte-level vocabulary stands for, as GPT-2 has it.

    Bytes that are printable in Latin-1 stand for themselves; the others for characters from 256 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printable)
    shown = {chr(byte): byte for byte in printable}
    return shown | {chr(256 + at): byte for at, byte in enumerate(others)}


_BYTE_OF = _byte_characters()
