"""What of a session's caches one peer is still to be sent."""

from __future__ import annotations

from collections import deque

from gpu_agent.kv.span import CacheSpan, pieces


class CacheOutlet:
    """Cuts the cached tokens of a range of blocks into frames for one peer, as they come.

    Attributes:
        peer: Who gets them.
        first_block: Of the range.
        last_block: Behind it.
        introduced: True once the peer was told what the session is.
        unsettled: Frames that were made and have neither left nor been given up.
    """

    __slots__ = ("_end", "_pieces", "first_block", "introduced", "last_block", "peer", "unsettled")

    def __init__(self, peer: str, first_block: int, last_block: int) -> None:
        self.peer = peer
        self.first_block = first_block
        self.last_block = last_block
        self.introduced = False
        self.unsettled = 0
        self._end = 0
        self._pieces: deque[CacheSpan] = deque()

    def extend(self, tokens: int, row_bytes: int, most_bytes: int) -> None:
        """Tokens `[0, tokens)` are cached now; see `pieces` for the other arguments."""
        if tokens > self._end:
            span = CacheSpan(self.first_block, self.last_block, self._end, tokens)
            self._pieces.extend(pieces(span, row_bytes, most_bytes))
            self._end = tokens

    @property
    def has_more(self) -> bool:
        """True if `take` has something."""
        return bool(self._pieces)

    def take(self) -> CacheSpan:
        """Returns the next part."""
        return self._pieces.popleft()

    @property
    def is_empty(self) -> bool:
        """True if everything that was cached so far has left."""
        return not self._pieces and not self.unsettled
