"""The parts of a session's caches that have arrived, and those that are missing."""

from __future__ import annotations

from catenary_agent.kv.span import CacheSpan
from catenary_services.errors import InvalidInput


class CacheReceiveProgress:
    """Counts the tokens of each block that have arrived.

    Every block has one source, and links keep their order, so a gap or a repetition is an error.
    """

    def __init__(self, first_block: int, last_block: int, tokens: int) -> None:
        """Waits for tokens `[0, tokens)` of blocks `[first_block, last_block)`.

        While the session still grows at its source, `tokens` is the most it may have, until
        `end_at`.
        """
        self.first_block = first_block
        self.last_block = last_block
        self.tokens = tokens
        self._come = [0] * (last_block - first_block)

    @property
    def come(self) -> int:
        """Number of tokens that have arrived in every block."""
        return min(self._come)

    @property
    def is_complete(self) -> bool:
        """True once every token of every block has arrived."""
        return self.come == self.tokens

    @property
    def missing_block(self) -> int | None:
        """The first block that lacks tokens; None if none does."""
        for index, come in enumerate(self._come):
            if come < self.tokens:
                return self.first_block + index
        return None

    def end_at(self, tokens: int) -> None:
        """Sets the final number of tokens.

        Raises:
            InvalidInput: More tokens than that have arrived.
        """
        if max(self._come) > tokens:
            raise InvalidInput("tokens", f"{tokens}, but {max(self._come)} have come already")
        self.tokens = tokens

    def check(self, span: CacheSpan) -> None:
        """Checks that a part continues each of its blocks.

        Raises:
            InvalidInput: It has other blocks, a gap, a repetition, or too many tokens.
        """
        if not self.first_block <= span.first_block < span.last_block <= self.last_block:
            own = f"[{self.first_block}, {self.last_block})"
            raise InvalidInput("cache", f"{span} are not within {own}")
        if not span.first_token < span.last_token <= self.tokens:
            raise InvalidInput("cache", f"{span}; {self.tokens} tokens are waited for")
        for index in range(span.first_block - self.first_block, span.last_block - self.first_block):
            if self._come[index] != span.first_token:
                block = self.first_block + index
                raise InvalidInput("cache", f"{span}; of block {block} {self._come[index]} is next")

    def add(self, span: CacheSpan) -> None:
        """Counts a part that was checked and written."""
        for index in range(span.first_block - self.first_block, span.last_block - self.first_block):
            self._come[index] = span.last_token
