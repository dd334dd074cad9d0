"""The answer of one call: headers, messages and a status, each as one piece of bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import grpc

from catenary_services.grpc.server.incoming import PREFIX_BYTES
from catenary_services.grpc.server.response_blocks import (
    HEAD_BLOCK,
    OK_TRAILERS,
    Pair,
    head_block,
    trailers_block,
)
from catenary_services.http2.sending import FrameSender
from catenary_services.http2.stream import ServerStream

_JOINED_BYTES = 16 * 1024
"""Shorter messages are copied, to go out with what stands around them."""


class AnswerWriter:
    """The writer of all that is sent on the stream of one call.

    Attributes:
        initial: The metadata of the headers.
        trailing: The metadata of the status.
        code: The status with which the call ends.
        details: The message of the status.
        has_headers: Whether the headers are out.
    """

    __slots__ = ("_sending", "_stream", "code", "details", "has_headers", "initial", "trailing")

    def __init__(self, sending: FrameSender, stream: ServerStream) -> None:
        self._sending = sending
        self._stream = stream
        self.has_headers = False
        self.initial: tuple[Pair, ...] = ()
        self.trailing: tuple[Pair, ...] = ()
        self.code = grpc.StatusCode.OK
        self.details = ""

    def headers(self, metadata: Iterable[Pair] | None = None) -> None:
        """Sends the headers, unless they are out."""
        if metadata is not None:
            self.initial = tuple(metadata)
        if not self.has_headers:
            self.has_headers = True
            self._sending.headers(self._stream, head_block(self.initial))

    def message(self, raw: bytes) -> None:
        """Sends one message of several."""
        self.headers()
        prefix = len(raw).to_bytes(PREFIX_BYTES, "big")
        if len(raw) <= _JOINED_BYTES:
            self._sending.data(self._stream, prefix + raw)
        else:
            self._sending.data(self._stream, prefix)
            self._sending.data(self._stream, raw)

    def only_message(self, raw: bytes) -> None:
        """Sends the one message of a call that has gone well, and its status."""
        if self.has_headers or len(raw) > _JOINED_BYTES:
            self.message(raw)
            self.status()
            return
        trailers = OK_TRAILERS
        if self.trailing or self.details:
            trailers = trailers_block(self.code, self.details, self.trailing)
        head = head_block(self.initial) if self.initial else HEAD_BLOCK
        body = len(raw).to_bytes(PREFIX_BYTES, "big") + raw
        self._sending.answer(self._stream, head, body, trailers)

    def status(self, metadata: Sequence[Pair] = ()) -> None:
        """Ends the call with its status, and more metadata."""
        trailers = trailers_block(self.code, self.details, (*self.trailing, *metadata))
        if not self.has_headers:
            trailers = HEAD_BLOCK + trailers
        self._sending.trailers(self._stream, trailers)

    def serialized(self, serialize: Any, message: Any, longest: int) -> bytes | None:
        """Returns the bytes of a message; None if they are too many, which `code` says then."""
        raw: bytes = serialize(message) if serialize is not None else message
        if len(raw) <= longest:
            return raw
        self.code = grpc.StatusCode.RESOURCE_EXHAUSTED
        self.details = f"an answer has {len(raw)} bytes, more than may be sent"
        return None
