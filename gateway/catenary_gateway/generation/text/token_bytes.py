"""The bytes that single tokens add to a text.

A tokenizer decodes sequences only: alone, half a character becomes a replacement character, and the
first word of a text may lose its space. Hence tokens are read from the vocabulary, in the way in
which the steps of the tokenizer's decoder say that they are written there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from catenary_gateway.generation.text.token_decoders import BYTE_LEVEL
from catenary_gateway.generation.text.token_table import TokenTable

_SPACE = "\u2581"
"""SentencePiece's sign for a space."""
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """The bytes of the tokens of one tokenizer."""

    def __init__(self, table: TokenTable) -> None:
        self._table = table
        kinds = {kind.get("type") for kind in table.kinds}
        self._is_byte_level = BYTE_LEVEL in kinds
        self._has_byte_tokens = "ByteFallback" in kinds
        self._has_signs = "Metaspace" in kinds or any(map(_replaces_signs, table.kinds))
        self._is_plain = not kinds - {BYTE_LEVEL, "Fuse", "Strip"}
        self._known: dict[int, bytes] = {}

    def of(self, token_id: int) -> bytes:
        """Returns the bytes of a token; none for an id that the tokenizer does not have."""
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._read(token_id)
        return known

    def _read(self, token_id: int) -> bytes:
        if token_id in self._table.added:
            return self._table.added[token_id].encode()
        token = self._table.text_of(token_id) or ""
        if self._is_byte_level:
            return self._table.bytes_of(token_id)
        if self._has_byte_tokens and (byte := _BYTE.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        if self._has_signs:
            token = token.replace(_SPACE, " ")
        elif not self._is_plain and token:
            token = self._table.decode([token_id])
        return token.encode()


def _replaces_signs(step: Mapping[str, Any]) -> bool:
    pattern = step.get("pattern")
    text = pattern.get("String") if isinstance(pattern, dict) else None
    return step.get("type") == "Replace" and text == _SPACE and step.get("content") == " "
