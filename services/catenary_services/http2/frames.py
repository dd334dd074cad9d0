"""The frames of HTTP/2 (RFC 9113) as bytes, and how connections and streams end by an error."""

from __future__ import annotations

import struct
from typing import Final

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""The first bytes of every client."""
HEAD_BYTES: Final = 9
"""Bytes of a frame before its payload."""
FRAME_BYTES: Final = 16_384
"""The longest payload that is accepted, and the longest that every peer accepts."""
LARGEST_WINDOW: Final = 0x7FFF_FFFF
INITIAL_WINDOW: Final = 65_535
"""The window of a connection, and of a stream where no setting says otherwise."""

DATA: Final = 0
HEADERS: Final = 1
PRIORITY: Final = 2
RST_STREAM: Final = 3
SETTINGS: Final = 4
PUSH_PROMISE: Final = 5
PING: Final = 6
GOAWAY: Final = 7
WINDOW_UPDATE: Final = 8
CONTINUATION: Final = 9

ACK: Final = 0x1
END_STREAM: Final = 0x1
END_HEADERS: Final = 0x4
PADDED: Final = 0x8
HAS_PRIORITY: Final = 0x20

ENABLE_PUSH: Final = 2
MAX_CONCURRENT_STREAMS: Final = 3
INITIAL_WINDOW_SIZE: Final = 4
MAX_FRAME_SIZE: Final = 5
MAX_HEADER_LIST_SIZE: Final = 6

NO_ERROR: Final = 0
PROTOCOL_ERROR: Final = 1
INTERNAL_ERROR: Final = 2
FLOW_CONTROL_ERROR: Final = 3
STREAM_CLOSED: Final = 5
FRAME_SIZE_ERROR: Final = 6
REFUSED_STREAM: Final = 7
CANCEL: Final = 8
COMPRESSION_ERROR: Final = 9
ENHANCE_YOUR_CALM: Final = 11

WORD: Final = struct.Struct(">I")
HEAD: Final = struct.Struct(">IBI")
"""Length and kind in one word, flags, and the number of the stream."""
_SETTING: Final = struct.Struct(">HI")


class ConnectionViolation(Exception):  # noqa: N818 - it is the peer's, not ours
    """A peer did what ends its connection."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code
        self.why = why


class StreamViolation(Exception):  # noqa: N818
    """A peer did what ends one stream."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code
        self.why = why


def frame_head(size: int, kind: int, flags: int, stream_id: int) -> bytes:
    """Returns what stands before a payload of `size` bytes."""
    return HEAD.pack(size << 8 | kind, flags, stream_id)


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """Returns a frame of HTTP/2: its head of nine bytes and its payload."""
    return HEAD.pack(len(payload) << 8 | kind, flags, stream_id) + payload


def settings_frame(settings: dict[int, int]) -> bytes:
    """Returns a frame that announces settings."""
    pairs = [_SETTING.pack(name, value) for name, value in settings.items()]
    return frame(SETTINGS, 0, 0, b"".join(pairs))


def settings_in(payload: bytes) -> list[tuple[int, int]]:
    """Returns the settings in a payload, whose length is a multiple of six."""
    return [(int(name), int(value)) for name, value in _SETTING.iter_unpack(payload)]


def reset_frame(stream_id: int, code: int) -> bytes:
    """Returns a frame that ends a stream with an error."""
    return frame(RST_STREAM, 0, stream_id, WORD.pack(code))


def window_frame(stream_id: int, nbytes: int) -> bytes:
    """Returns a frame that lets the peer send `nbytes` more."""
    return frame(WINDOW_UPDATE, 0, stream_id, WORD.pack(nbytes))


def goaway_frame(last_stream_id: int, code: int, why: str) -> bytes:
    """Returns a frame that says which was the last stream that is served."""
    return frame(GOAWAY, 0, 0, WORD.pack(last_stream_id) + WORD.pack(code) + why.encode())
