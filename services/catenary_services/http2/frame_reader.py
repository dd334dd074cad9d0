"""The bytes of a peer cut into frames, however they come; blocks of headers joined from theirs."""

from __future__ import annotations

from collections.abc import Callable

from catenary_services.http2 import frames
from catenary_services.http2.flood_limit import FloodLimit, TurnBudget
from catenary_services.http2.frames import (
    END_HEADERS,
    END_STREAM,
    ENHANCE_YOUR_CALM,
    FRAME_BYTES,
    FRAME_SIZE_ERROR,
    HAS_PRIORITY,
    HEAD_BYTES,
    LARGEST_WINDOW,
    PADDED,
    PREFACE,
    PROTOCOL_ERROR,
    WORD,
    ConnectionViolation,
)
from catenary_services.http2.limits import (
    BLOCK_BYTES,
    BLOCK_FRAMES,
    COST_OF_FRAME,
    FRAMES_AT_ONCE,
    FRAMES_PER_WORK,
    PASSING_BLOCK_BYTES,
    SHORT_BLOCK_BYTES,
)

_head_at = frames.HEAD.unpack_from
_word_at = WORD.unpack_from
_OF_HEADERS = frozenset((frames.HEADERS, frames.CONTINUATION))
OnData = Callable[[int, int, bytes, int, int], None]
"""Takes the flags and the stream of a frame of data, and where its payload lies in which bytes."""
OnFrame = Callable[[int, int, int, bytes], None]
"""Takes kind, flags, stream and payload of a frame."""


class HeaderFrames:
    """The blocks of headers of one peer, of which one may be unfinished.

    Attributes:
        unfinished: The stream whose block goes on; 0 if none does.
        taken: The number of blocks that were finished, in which long ones count as several.
    """

    __slots__ = (
        "_budget",
        "_bytes",
        "_flood_limit",
        "_hand_on",
        "_is_last",
        "_parts",
        "taken",
        "unfinished",
    )

    def __init__(
        self,
        hand_on: Callable[[int, bytes, bool], None],
        flood_limit: FloodLimit,
        budget: TurnBudget,
    ) -> None:
        """Creates a reader.

        Args:
            hand_on: Gets the stream of a block, the block, and whether nothing follows on the
                stream.
            flood_limit: Of the peer.
            budget: Of all peers; every block costs some of it.
        """
        self._hand_on = hand_on
        self._flood_limit = flood_limit
        self._budget = budget
        self.unfinished = 0
        self.taken = 0
        self._parts: list[bytes] = []
        self._bytes = 0
        self._is_last = False

    @property
    def unfinished_bytes(self) -> int:
        """Bytes of the unfinished block."""
        return self._bytes if self.unfinished else 0

    def can_wait(self, kind: int, flags: int, nbytes: int, is_first: bool) -> bool:
        """Returns whether a frame ends a block that waits while others have done the work.

        The first block that a connection brings does not, unless it is longer than those of most
        calls.
        """
        is_passing = is_first and self.unfinished_bytes + nbytes <= PASSING_BLOCK_BYTES
        return kind in _OF_HEADERS and bool(flags & END_HEADERS) and not is_passing

    def on_headers(self, flags: int, number: int, payload: bytes) -> None:
        """Takes the first frame of a block, which mostly is the whole.

        Raises:
            ConnectionViolation: It is no such frame, or what `hand_on` raises.
        """
        if not number & 1:
            raise ConnectionViolation(PROTOCOL_ERROR, "the number of a stream is wrong")
        begin, end = 0, len(payload)
        if flags & PADDED:
            self._flood_limit.spend(COST_OF_FRAME)
            begin = 1
            end -= payload[0] if payload else 1
        if flags & HAS_PRIORITY:
            if end - begin >= 5 and _word_at(payload, begin)[0] & LARGEST_WINDOW == number:
                raise ConnectionViolation(PROTOCOL_ERROR, "a stream depends on itself")
            begin += 5
        if begin > end:
            raise ConnectionViolation(PROTOCOL_ERROR, "more padding than there is frame")
        block = payload[begin:end] if begin or end < len(payload) else payload
        if flags & END_HEADERS:
            self._take(number, block, bool(flags & END_STREAM))
        else:
            self._parts, self._bytes = [block], len(block)
            self.unfinished, self._is_last = number, bool(flags & END_STREAM)

    def on_continuation(self, flags: int, payload: bytes) -> None:
        """Takes a further frame of the unfinished block.

        Raises:
            ConnectionViolation: There is none, or it is too long, or what `hand_on` raises.
        """
        if not self.unfinished:
            raise ConnectionViolation(PROTOCOL_ERROR, "a continuation of nothing")
        self._parts.append(payload)
        self._bytes += len(payload)
        if self._bytes > BLOCK_BYTES or len(self._parts) > BLOCK_FRAMES:
            raise ConnectionViolation(ENHANCE_YOUR_CALM, "the headers are too large")
        if flags & END_HEADERS:
            number, self.unfinished = self.unfinished, 0
            block, self._parts = b"".join(self._parts), []
            self._take(number, block, self._is_last)

    def let_go(self) -> None:
        """Forgets the unfinished block of a connection that is over."""
        self.unfinished, self._parts, self._bytes = 0, [], 0

    def _take(self, number: int, block: bytes, is_last: bool) -> None:
        work = 1 + len(block) // SHORT_BLOCK_BYTES
        self.taken += work
        self._budget.spend(work)
        self._hand_on(number, block, is_last)


class FrameReader:
    """The reader of one connection, which keeps what is no whole frame yet.

    Attributes:
        has_more: Whether bytes are left for another turn, since so many frames came.
    """

    __slots__ = (
        "_budget",
        "_has_preface",
        "_headers",
        "_most_blocks",
        "_on_data",
        "_on_frame",
        "_rest",
        "has_more",
    )

    def __init__(
        self,
        on_data: OnData,
        on_frame: OnFrame,
        headers: HeaderFrames,
        most_blocks: int,
        budget: TurnBudget,
    ) -> None:
        """Creates a reader of a connection that has not begun.

        Args:
            on_data: Takes frames of data.
            on_frame: Takes all others.
            headers: Says whether a block of headers is unfinished, which nothing may interrupt.
            most_blocks: The most short blocks of headers that are handed on at once.
            budget: Of all connections.
        """
        self._budget = budget
        self._on_data = on_data
        self._on_frame = on_frame
        self._headers = headers
        self._most_blocks = most_blocks
        self._rest = b""
        self._has_preface = False
        self.has_more = False

    @property
    def unfinished_bytes(self) -> int:
        """Bytes of the frame that is not whole, and of frames that wait for another turn."""
        return len(self._rest)

    def receive(self, data: bytes) -> None:
        """Takes bytes, and hands on the frames that are whole by now.

        After many frames, or blocks of headers, it stops; the rest is handed on when it is called
        again. So it does after few frames, before a second block, and before a long one if the
        connections have spent their budget, unless this one has waited for its turn.

        Raises:
            ConnectionViolation: They are not HTTP/2, or what a taker of frames raises.
        """
        if self._rest:
            data, self._rest = self._rest + data, b""
        at, end = 0, len(data)
        if not self._has_preface:
            if not self._take_preface(data):
                self._rest = data
                return
            at = len(PREFACE)
        headers, on_data = self._headers, self._on_data
        is_crowded = self._budget.is_spent and not self.has_more
        before = headers.taken
        frames_left = most_frames = FRAMES_PER_WORK if is_crowded else FRAMES_AT_ONCE
        self.has_more = False
        while end - at >= HEAD_BYTES:
            word, flags, number = _head_at(data, at)
            size, kind = word >> 8, word & 0xFF
            if size > FRAME_BYTES:
                raise ConnectionViolation(FRAME_SIZE_ERROR, "a frame is too long")
            begin = at + HEAD_BYTES
            if begin + size > end:
                break
            at = begin + size
            number &= LARGEST_WINDOW
            if headers.unfinished and (kind != frames.CONTINUATION or number != headers.unfinished):
                raise ConnectionViolation(PROTOCOL_ERROR, "a block of headers is interrupted")
            if kind == frames.DATA:
                on_data(flags, number, data, begin, at)
            elif is_crowded and headers.can_wait(kind, flags, size, headers.taken == before):
                at, self.has_more = begin - HEAD_BYTES, True
                break
            else:
                self._on_frame(kind, flags, number, data[begin:at])
            frames_left -= 1
            if headers.taken - before >= self._most_blocks or not frames_left:
                self.has_more = at < end
                break
        if at < end:
            self._rest = data[at:]
        self._budget.spend_frames(most_frames - frames_left)

    def let_go(self) -> None:
        """Forgets the unfinished frame of a connection that is over."""
        self._rest = b""

    def _take_preface(self, data: bytes) -> bool:
        """Returns whether the bytes of a connection begin with all that comes before frames.

        Raises:
            ConnectionViolation: They begin with something else.
        """
        if data[: len(PREFACE)] != PREFACE[: len(data)]:
            raise ConnectionViolation(PROTOCOL_ERROR, "this port speaks HTTP/2 only")
        self._has_preface = len(data) >= len(PREFACE)
        return self._has_preface
