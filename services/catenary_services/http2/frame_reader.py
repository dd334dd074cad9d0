"""The bytes of a peer cut into frames, however they come."""

from __future__ import annotations

from collections.abc import Callable

from catenary_services.http2 import frames
from catenary_services.http2.frames import (
    FRAME_BYTES,
    FRAME_SIZE_ERROR,
    HEAD_BYTES,
    LARGEST_WINDOW,
    PREFACE,
    PROTOCOL_ERROR,
    ConnectionViolation,
)
from catenary_services.http2.header_frames import HeaderFrames

_head_at = frames.HEAD.unpack_from
OnData = Callable[[int, int, bytes, int, int], None]
"""Takes the flags and the stream of a frame of data, and where its payload lies in which bytes."""
OnFrame = Callable[[int, int, int, bytes], None]
"""Takes kind, flags, stream and payload of a frame."""


class FrameReader:
    """What has arrived and is no whole frame yet."""

    __slots__ = ("_has_preface", "_headers", "_on_data", "_on_frame", "_rest")

    def __init__(self, on_data: OnData, on_frame: OnFrame, headers: HeaderFrames) -> None:
        """Creates a reader of a connection that has not begun.

        Args:
            on_data: Takes frames of data.
            on_frame: Takes all others.
            headers: Says whether a block of headers is unfinished, which nothing may interrupt.
        """
        self._on_data = on_data
        self._on_frame = on_frame
        self._headers = headers
        self._rest = b""
        self._has_preface = False

    def receive(self, data: bytes) -> None:
        """Takes bytes, and hands on every frame that is whole by now.

        Raises:
            ConnectionViolation: They are not HTTP/2, or what a taker of frames raises.
        """
        if self._rest:
            data, self._rest = self._rest + data, b""
        at, end = 0, len(data)
        if not self._has_preface:
            if data[: len(PREFACE)] != PREFACE[:end]:
                raise ConnectionViolation(PROTOCOL_ERROR, "this port speaks HTTP/2 only")
            if end < len(PREFACE):
                self._rest = data
                return
            self._has_preface, at = True, len(PREFACE)
        headers, on_data = self._headers, self._on_data
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
            else:
                self._on_frame(kind, flags, number, data[begin:at])
        if at < end:
            self._rest = data[at:]
