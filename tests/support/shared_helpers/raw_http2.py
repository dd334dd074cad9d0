"""HTTP/2 written by hand: frames as bytes, and a client that may send whatever it likes."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from dataclasses import dataclass

from catenary_services.http2.flood_limit import TurnBudget
from catenary_services.http2.frames import (
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PREFACE,
    SETTINGS,
    frame,
    settings_frame,
)
from catenary_services.http2.header_blocks import encoded

GREETING = PREFACE + settings_frame({})
WAIT_S = 20.0


class Turns:
    """The turns of an event loop that has one whenever it is told to."""

    def __init__(self) -> None:
        self._at_next: list[Callable[[], None]] = []
        self.budget = TurnBudget(self._at_next.append)

    def next(self) -> None:
        """Begins the next turn."""
        for call in self._at_next:
            call()
        self._at_next.clear()


def call_headers(path: str, *more: tuple[str, str]) -> bytes:
    """Returns the block of headers of a call of gRPC, without compression."""
    pairs = (
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", "somewhere"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
        *more,
    )
    return encoded([(name.encode(), value.encode()) for name, value in pairs])


def opening(number: int, path: str, *more: tuple[str, str], ends: bool = False) -> bytes:
    """Returns the frame that begins a call."""
    flags = END_HEADERS | (END_STREAM if ends else 0)
    return frame(HEADERS, flags, number, call_headers(path, *more))


def data(number: int, payload: bytes, *, ends: bool = False) -> bytes:
    """Returns a frame of data."""
    return frame(0, END_STREAM if ends else 0, number, payload)


def prefixed(message: bytes) -> bytes:
    """Returns a message as gRPC sends it."""
    return b"\0" + len(message).to_bytes(4, "big") + message


@dataclass(frozen=True)
class Frame:
    """A frame that a server sent."""

    kind: int
    flags: int
    number: int
    payload: bytes

    @property
    def code(self) -> int:
        """The error of a reset or a farewell."""
        at = 0 if self.kind == 3 else 4
        return int(struct.unpack_from(">I", self.payload, at)[0])


class RawClient:
    """A connection on which nothing is sent but what a test says."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def connect(cls, port: int, greeting: bytes = GREETING) -> RawClient:
        """Connects to a port of this machine, and sends the greeting."""
        client = cls(*await asyncio.open_connection("127.0.0.1", port))
        client.send(greeting)
        return client

    def send(self, *frames: bytes) -> None:
        """Sends bytes, if the connection is still there."""
        self._writer.write(b"".join(frames))

    async def sent(self) -> None:
        """Waits until the connection has taken what was sent."""
        await asyncio.wait_for(self._writer.drain(), WAIT_S)

    async def frame(self) -> Frame | None:
        """Returns the next frame; None at the end of the connection."""
        try:
            async with asyncio.timeout(WAIT_S):
                head = await self._reader.readexactly(9)
                payload = await self._reader.readexactly(int.from_bytes(head[:3], "big"))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        number = int.from_bytes(head[5:], "big") & 0x7FFF_FFFF
        return Frame(head[3], head[4], number, payload)

    async def next_of(self, *kinds: int) -> Frame | None:
        """Returns the next frame of some kinds; None if the connection ends before."""
        while (found := await self.frame()) is not None:
            if found.kind in kinds and not (found.kind == SETTINGS and found.flags):
                return found
        return None

    async def farewell(self) -> int | None:
        """Returns the error with which the server ends the connection; None if it says none."""
        found = await self.next_of(7)
        code = None if found is None else found.code
        while await self.frame() is not None:
            pass
        return code

    def close(self) -> None:
        """Cuts the connection."""
        self._writer.transport.abort()
