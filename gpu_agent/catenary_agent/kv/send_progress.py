"""The part of a session's caches that one peer is still to be sent."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from catenary_agent.kv.span import CacheSpan, pieces


class CacheSendProgress:
    """Cuts the cached tokens of a range of blocks into frames for one peer, as they are computed.

    Attributes:
        session_id: The id of the session at the receiver.
        peer: The agent that receives the frames.
        first_block: The first block of the range.
        last_block: The end of the range, exclusive.
        introduced: True once the peer was sent the session's opening.
        unsettled: Number of frames that were made and have neither left nor been given up.
    """

    __slots__ = (
        "_cut",
        "_end",
        "_pieces",
        "_stopped",
        "first_block",
        "introduced",
        "last_block",
        "peer",
        "session_id",
        "unsettled",
    )

    def __init__(self, session_id: int, peer: str, first_block: int, last_block: int) -> None:
        self.session_id = session_id
        self.peer = peer
        self.first_block = first_block
        self.last_block = last_block
        self.introduced = False
        self.unsettled = 0
        self._end = 0
        self._cut = 0
        self._stopped = False
        self._pieces: deque[CacheSpan] = deque()

    def extend(self, tokens: int) -> int:
        """Notes that tokens `[0, tokens)` are cached; returns how many of them are new."""
        added = 0 if self._stopped else max(0, tokens - self._end)
        self._end += added
        return added

    @property
    def has_more(self) -> bool:
        """True if `take` has something to return."""
        return bool(self._pieces) or self._cut < self._end

    @property
    def has_begun(self) -> bool:
        """True once `take` has returned something."""
        return self._cut > 0

    def take(self, row_bytes: int, most_bytes: int, run_bytes: int = 0) -> list[CacheSpan]:
        """Returns the next parts: the same tokens of blocks that follow each other.

        Tokens that were cached while earlier parts left are cut together.

        Args:
            row_bytes: Size of the keys and values of one token in one block.
            most_bytes: The most bytes of one part; see `pieces`.
            run_bytes: Parts are added to the first one while all have less than this.
        """
        if not self._pieces:
            span = CacheSpan(self.first_block, self.last_block, self._cut, self._end)
            self._pieces.extend(pieces(span, row_bytes, most_bytes))
            self._cut = self._end
        run = [self._pieces.popleft()]
        nbytes = _rows(run[0]) * row_bytes
        while self._pieces and nbytes < run_bytes and _continues(run[-1], self._pieces[0]):
            run.append(self._pieces.popleft())
            nbytes += _rows(run[-1]) * row_bytes
        return run

    def take_back(self, spans: Sequence[CacheSpan]) -> None:
        """Returns parts that were taken last and did not arrive, unless nothing is sent any more.

        They come first when further ones are taken.
        """
        if not self._stopped:
            self._pieces.extendleft(reversed(spans))

    def stop(self) -> None:
        """Drops everything that was not sent, and ignores what is cached later."""
        self._stopped = True
        self._pieces.clear()
        self._cut = self._end

    @property
    def is_empty(self) -> bool:
        """True if everything cached so far has left."""
        return not self.has_more and not self.unsettled


def _rows(span: CacheSpan) -> int:
    return span.blocks * span.tokens


def _continues(before: CacheSpan, span: CacheSpan) -> bool:
    is_next = span.first_block == before.last_block
    return is_next and span.first_token == before.first_token
