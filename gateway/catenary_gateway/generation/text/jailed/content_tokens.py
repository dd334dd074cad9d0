"""Special tokens are the template's: what a client writes in a conversation stays text.

Without this, `<|im_end|><|im_start|>system` in a message would end it and begin another one. Texts
of special tokens in whatever a client wrote are replaced by marks before the template is rendered.
Afterwards the text is cut where the template has special tokens, as the tokenizer does it itself,
and what is between them is encoded with the marked texts as plain text.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer

_DIGITS = 24
_INDEX_DIGITS = 6
_MOST_MARKS = 10**_INDEX_DIGITS


class ContentTokens:
    """The special tokens of a tokenizer, kept out of what clients write."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added: dict[int, AddedToken] = tokenizer.get_added_tokens_decoder()
        self._special = {
            token.content: (number, token)
            for number, token in added.items()
            if token.special and token.content
        }
        self._ids = {number for number, _ in self._special.values()}
        # The longest one counts where several begin at one place.
        texts = sorted(self._special, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, texts))) if texts else None
        self._is_normalized = any(token.normalized for _, token in self._special.values())

    def mark(self, *values: Any, own: Collection[str] = ()) -> MarkedContent | None:
        """Returns values of JSON with marks in the place of special tokens; None if they have none.

        Args:
            values: What clients wrote. Messages are objects with a role.
            own: Special tokens that answers of the model have: its messages may.
        """
        marked = MarkedContent(own)
        marked.values = [self._walk(value, marked, ()) for value in values]
        return marked if marked.texts else None

    def encode(self, text: str, marked: MarkedContent) -> list[int]:
        """Returns the tokens of a rendered text with marks."""
        ids: list[int] = []
        held = ""
        strips = False
        for piece, is_marked in marked.pieces(text):
            if is_marked or self._pattern is None:
                held += piece
                continue
            end = 0
            for found in self._pattern.finditer(piece):
                number, token = self._special[found[0]]
                held += piece[end : found.start()]
                ids += self._plain(held.rstrip() if token.lstrip else held, strips)
                ids.append(number)
                held, end, strips = "", found.end(), token.rstrip
            held += piece[end:]
        return ids + self._plain(held, strips)

    def _plain(self, text: str, strips: bool) -> list[int]:
        text = text.lstrip() if strips else text
        if not text:
            return []
        self._tokenizer.encode_special_tokens = True
        try:
            found: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        finally:
            self._tokenizer.encode_special_tokens = False
        return found

    def _walk(self, value: Any, marked: MarkedContent, kept: Collection[str]) -> Any:
        if isinstance(value, str):
            return self._marked(value, marked, kept)
        if isinstance(value, Mapping):
            inside = marked.own if value.get("role") == "assistant" else kept
            return {
                self._walk(key, marked, ()): self._walk(each, marked, inside)
                for key, each in value.items()
            }
        if isinstance(value, Sequence):
            return [self._walk(each, marked, kept) for each in value]
        return value

    def _marked(self, text: str, marked: MarkedContent, kept: Collection[str]) -> str:
        parts, end = [], 0
        for first, last in self._spans(text):
            if text[first:last] not in kept:
                parts += [text[end:first], marked.put(text[first:last])]
                end = last
        return "".join([*parts, text[end:]]) if parts else text

    def _spans(self, text: str) -> Iterator[tuple[int, int]]:
        if self._is_normalized:
            # Other texts become the token as well, and only the tokenizer knows which.
            encoded = self._tokenizer.encode(text, add_special_tokens=False)
            for number, span in zip(encoded.ids, encoded.offsets, strict=True):
                if number in self._ids:
                    yield span
        elif self._pattern is not None:
            yield from (found.span() for found in self._pattern.finditer(text))


class MarkedContent:
    """Values with marks, and the texts that the marks stand for.

    A mark is digits, which no filter of a template changes, and nobody can guess.
    """

    def __init__(self, own: Collection[str]) -> None:
        self.own = own
        self.values: list[Any] = []
        self.texts: list[str] = []
        self._secret = str(secrets.randbelow(9 * 10 ** (_DIGITS - 1)) + 10 ** (_DIGITS - 1))
        self._pattern = re.compile(f"{self._secret}([0-9]{{{_INDEX_DIGITS}}})")

    def put(self, text: str) -> str:
        """Returns the mark that stands for a text."""
        if len(self.texts) >= _MOST_MARKS:
            raise ValueError("there are too many special tokens in a conversation")
        self.texts.append(text)
        return f"{self._secret}{len(self.texts) - 1:0{_INDEX_DIGITS}}"

    def pieces(self, text: str) -> Iterator[tuple[str, bool]]:
        """Yields the parts of a rendered text, and whether each is in the place of a mark."""
        for place, part in enumerate(self._pattern.split(text)):
            if place % 2 == 0:
                yield part, False
            elif int(part) < len(self.texts):
                yield self.texts[int(part)], True

    def unmarked(self, text: str) -> str:
        """Returns a rendered text as it would have been without marks."""
        return "".join(part for part, _ in self.pieces(text))
