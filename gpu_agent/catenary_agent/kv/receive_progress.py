"""What of a session's caches has come, and what is still missing."""

from __future__ import annotations

from catenary_agent.kv.span import CacheSpan
from catenary_services.errors import InvalidInput


class CacheReceiveProgress:
    """Counts the tokens of each block that arrived.

    Every block has one source, and links keep their order: a gap or a repetition is a mistake.
    """

    def __init__(self, first_block: int, last_block: int, tokens: int) -> None:
        """Waits for tokens `[0, tokens)` of blocks `[first_block, last_block)`.

        Where the session still grows at its source, `tokens` is the most it may have, until the end
        is known.
        """
        self.first_block = first_block
        self.last_block = last_block
        self.tokens = tokens
        self._come = [0] * (last_block - first_block)

    @property
    def come(self) -> int:
        """Tokens that are here in every block."""
        return min(self._come)

    @property
    def is_complete(self) -> bool:
        """True once every token of every block is here."""
        return self.come == self.tokens

    @property
    def missing_block(self) -> int | None:
        """The first block that lacks tokens."""
        for index, come in enumerate(self._come):
            if come < self.tokens:
                return self.first_block + index
        return None

    def end_at(self, tokens: int) -> None:
        """The end is known now.

        Raises:
            InvalidInput: More tokens than that have come.
        """
        if max(self._come) > tokens:
            raise InvalidInput("tokens", f"{tokens}, but {max(self._come)} have come already")
        self.tokens = tokens

    def check(self, span: CacheSpan) -> None:
        """Checks that a part is one that comes next.

        Raises:
            InvalidInput: Other blocks, a gap, a repetition, or more tokens than there are.
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
        """Counts a part that was checked and kept."""
        for index in range(span.first_block - self.first_block, span.last_block - self.first_block):
            self._come[index] = span.last_token
