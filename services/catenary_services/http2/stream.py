"""One stream of a connection: its windows, and what waits to be sent on it."""

from __future__ import annotations

from collections import deque
from typing import Protocol

Piece = bytes | memoryview


class StreamReceiver(Protocol):
    """The one who gets what arrives on a stream."""

    def on_data(self, data: bytes, begin: int, end: int, is_last: bool) -> None:
        """Takes the bytes of `data` from `begin` to `end`; nothing follows the last ones."""
        ...

    def on_reset(self) -> None:
        """Learns that the stream has ended, by the peer or with the connection."""
        ...

    def on_drained(self) -> None:
        """Learns that less waits to be sent than before."""
        ...


class ServerStream:
    """The state of a stream.

    Attributes:
        number: Its number on the connection.
        receiver: Who gets what arrives; None until the stream was handed over.
        send_window: Bytes that the peer takes.
        receive_window: Bytes that the peer may still send.
        has_peer_ended: Whether the peer sends nothing more.
        is_closed: Whether the stream is over.
        waiting: Pieces of data that wait for room in the windows.
        waiting_bytes: Bytes of them.
        trailers: The frame that ends the stream after them; empty until it is known.
        stalled_since_s: The time since which nothing of what waits could be sent.
    """

    __slots__ = (
        "has_peer_ended",
        "is_closed",
        "number",
        "receive_window",
        "receiver",
        "send_window",
        "stalled_since_s",
        "trailers",
        "waiting",
        "waiting_bytes",
    )

    def __init__(self, number: int, send_window: int, receive_window: int) -> None:
        self.number = number
        self.receiver: StreamReceiver | None = None
        self.send_window = send_window
        self.receive_window = receive_window
        self.has_peer_ended = False
        self.is_closed = False
        self.waiting: deque[Piece] | None = None
        self.waiting_bytes = 0
        self.trailers = b""
        self.stalled_since_s = 0.0
