"""Tokens that an engine leaves out of its stream: parts of a character that was not complete yet.

llama-server sends text, and a token whose bytes end within a character only with the one that
completes it: the token's number is then missing. The bytes tell which tokens these were.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from catenary_services.bounded_files import LARGEST_JSON_BYTES, read_bounded
from catenary_services.errors import InvalidInput

_LONGEST_BYTES = 256
"""More bytes than an unfinished character and the words before it have."""

VocabularyBytes = dict[bytes, int]
"""A token for each sequence of bytes that is one."""


class MissingTokens:
    """Finds tokens by their bytes; the vocabulary is read when it is first needed."""

    def __init__(self, read: Callable[[], Sequence[bytes]]) -> None:
        """Takes the bytes of all tokens, by their numbers, from `read`."""
        self._read = read
        self._bytes: Sequence[bytes] = ()
        self._numbers: VocabularyBytes = {}

    def before(self, text: bytes, last: int, count: int) -> list[int] | None:
        """Returns the `count` tokens in front of `last` that make a text together with it.

        Of several ways the first one is taken in which each token is as long as can be; all of
        them are the same text.

        Args:
            text: What all of them stand for.
            last: The last one.
            count: Number of the others.

        Returns:
            The tokens; None if none make this text.
        """
        if not self._numbers:
            self._bytes = self._read()
            self._numbers = {each: number for number, each in enumerate(self._bytes) if each}
        if not 0 <= last < len(self._bytes) or len(text) > _LONGEST_BYTES:
            return None
        end = self._bytes[last]
        if not end or not text.endswith(end):
            return None
        rest = text[: len(text) - len(end)]

        @cache
        def pieces(at: int, left: int) -> list[int] | None:
            if left == 0:
                return None if at < len(rest) else []
            for stop in range(len(rest) - left + 1, at, -1):
                number = self._numbers.get(rest[at:stop])
                if number is not None and (more := pieces(stop, left - 1)) is not None:
                    return [number, *more]
            return None

        return pieces(0, count) if 0 <= count <= len(rest) else None


def vocabulary_bytes(folder: Path, size: int) -> list[bytes]:
    """Returns the bytes of each token of the tokenizer in a model's folder; empty for special ones.

    Raises:
        InvalidInput: There is no tokenizer.json, or it is none.
    """
    import llguidance

    text = read_bounded(folder / "tokenizer.json", LARGEST_JSON_BYTES).decode(errors="replace")
    if not text.lstrip().startswith("{"):  # the library would open a file of that name
        raise InvalidInput("tokenizer.json", "is not a JSON object")
    try:
        tokens = llguidance.LLTokenizer(text)
    except Exception as error:  # it raises whatever its parts do
        raise InvalidInput("tokenizer.json", str(error)[:200]) from None
    known = min(size, tokens.vocab_size)
    return [
        b"" if tokens.is_special_token(number) else tokens.decode_bytes([number])
        for number in range(known)
    ]
