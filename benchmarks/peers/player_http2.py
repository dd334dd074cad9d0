"""Just enough of HTTP/2 to play one unary gRPC call after another over a connection.

Headers are sent without compression or state (RFC 7541, 6.2.2), so that they too are prebuilt, and
those of answers are not read: a call that fails has no message, which its size shows.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from typing import Any

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE, _CONTINUATION = (
    0, 1, 3, 4, 6, 7, 8, 9,
)  # fmt: skip
_END_STREAM = _ACK = 0x1
_END_HEADERS = 0x4
_INITIAL_WINDOW_SETTING = 4
_USUAL_WINDOW = 65_535
_LARGEST_WINDOW = 2**31 - 1
_FRAME_BYTES = 16_384
_REFRESH_BYTES = 2**24
"""The server may send so much before it is granted more."""


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """Returns a frame: nine bytes of header, and the payload."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def header_block(headers: dict[str, str]) -> bytes:
    """Returns headers as literals without indexing, neither names nor values compressed."""
    parts = []
    for name, value in headers.items():
        parts += [b"\0", _text(name.lower()), _text(value)]
    return b"".join(parts)


def _text(text: str) -> bytes:
    raw, largest = text.encode("ascii"), 0x7F
    if len(raw) < largest:
        return bytes([len(raw)]) + raw
    rest, size = len(raw) - largest, bytearray([largest])
    while rest >= 0x80:
        size.append(rest & 0x7F | 0x80)
        rest >>= 7
    return bytes([*size, rest]) + raw


class GrpcConnection:
    """A connection with one call in flight."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        headers: bytes,
        body: bytes,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._headers = headers
        self._body = body
        self._stream = -1
        self._connection_window = self._stream_window = self._initial_window = _USUAL_WINDOW
        self._granted = 0
        self._sent = len(body)
        self._received = 0

    @classmethod
    async def open(cls, document: dict[str, Any], body: bytes) -> GrpcConnection:
        """Connects, and grants the server the largest windows."""
        port = document["port"]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        pseudo = {
            ":method": "POST",
            ":scheme": "http",
            ":path": document["path"],
            ":authority": f"127.0.0.1:{port}",
        }
        made = cls(reader, writer, header_block(pseudo | document["headers"]), body)
        settings = struct.pack(">HI", _INITIAL_WINDOW_SETTING, _LARGEST_WINDOW)
        more = struct.pack(">I", _LARGEST_WINDOW - _USUAL_WINDOW)
        writer.write(
            _PREFACE + frame(_SETTINGS, 0, 0, settings) + frame(_WINDOW_UPDATE, 0, 0, more)
        )
        return made

    async def play(self) -> int:
        """Returns the bytes of the answer's message with its prefix, or -1 for a reset call.

        Raises:
            OSError: The server ends the connection.
        """
        self._stream += 2
        self._stream_window, self._sent, self._received = self._initial_window, 0, 0
        self._writer.write(frame(_HEADERS, _END_HEADERS, self._stream, self._headers))
        self._send_body()
        while True:
            head = await self._reader.readexactly(9)
            size = int.from_bytes(head[:3], "big")
            kind, flags, stream = struct.unpack(">BBI", head[3:])
            payload = await self._reader.readexactly(size)
            if kind == _RESET and stream == self._stream:
                return -1
            if self._handled(kind, flags, stream, payload):
                return self._received

    def _handled(self, kind: int, flags: int, stream: int, payload: bytes) -> bool:
        """Handles a frame; returns True if the answer ends with it."""
        if kind == _SETTINGS and not flags & _ACK:
            self._settings(payload)
            self._writer.write(frame(_SETTINGS, _ACK, 0, b""))
            self._send_body()
        elif kind == _PING and not flags & _ACK:
            self._writer.write(frame(_PING, _ACK, 0, payload))
        elif kind == _WINDOW_UPDATE:
            more = int.from_bytes(payload, "big")
            if stream == 0:
                self._connection_window += more
            elif stream == self._stream:
                self._stream_window += more
            self._send_body()
        elif kind == _GOAWAY:
            raise ConnectionResetError("the server ends the connection")
        elif kind == _DATA:
            self._received += len(payload)
            self._grant(len(payload))
        ends = kind in (_DATA, _HEADERS) and bool(flags & _END_STREAM)
        return ends and stream == self._stream

    def _settings(self, payload: bytes) -> None:
        for name, value in struct.iter_unpack(">HI", payload):
            if name == _INITIAL_WINDOW_SETTING:
                self._stream_window += value - self._initial_window
                self._initial_window = value

    def _grant(self, received: int) -> None:
        self._granted += received
        if self._granted >= _REFRESH_BYTES:
            more = struct.pack(">I", self._granted)
            self._writer.write(frame(_WINDOW_UPDATE, 0, 0, more))
            self._granted = 0

    def _send_body(self) -> None:
        """Sends as much of the body as the windows allow."""
        frames = []
        while self._sent < len(self._body):
            size = min(
                _FRAME_BYTES,
                len(self._body) - self._sent,
                self._connection_window,
                self._stream_window,
            )
            if size <= 0:
                break
            part = self._body[self._sent : self._sent + size]
            self._sent += size
            self._connection_window -= size
            self._stream_window -= size
            ends = _END_STREAM if self._sent == len(self._body) else 0
            frames.append(frame(_DATA, ends, self._stream, part))
        if frames:
            self._writer.write(b"".join(frames))

    async def close(self) -> None:
        """Closes the connection."""
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()
