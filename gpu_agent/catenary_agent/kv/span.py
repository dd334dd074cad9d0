"""A part of a session's caches: a range of blocks by a range of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheSpan:
    """Blocks `[first_block, last_block)` by tokens `[first_token, last_token)`."""

    first_block: int
    last_block: int
    first_token: int
    last_token: int

    @property
    def blocks(self) -> int:
        return self.last_block - self.first_block

    @property
    def tokens(self) -> int:
        return self.last_token - self.first_token

    def __str__(self) -> str:
        return (
            f"blocks [{self.first_block}, {self.last_block}) of tokens"
            f" [{self.first_token}, {self.last_token})"
        )


def pieces(span: CacheSpan, row_bytes: int, most_bytes: int) -> Iterator[CacheSpan]:
    """Yields parts of a span of at most `most_bytes` each, but of at least one token in one block.

    The tokens of every block come in order. Blocks are separated first, since long runs of tokens
    are copied faster.

    Args:
        span: The span to be cut.
        row_bytes: Size of the keys and values of one token in one block.
        most_bytes: The most bytes of one part.
    """
    tokens = max(1, min(span.tokens, most_bytes // row_bytes))
    blocks = max(1, min(span.blocks, most_bytes // (tokens * row_bytes)))
    for token in range(span.first_token, span.last_token, tokens):
        last_token = min(token + tokens, span.last_token)
        for block in range(span.first_block, span.last_block, blocks):
            yield CacheSpan(block, min(block + blocks, span.last_block), token, last_token)
