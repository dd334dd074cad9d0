"""One long-lived stream: a reader, a packing writer, and a way to end it from outside."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, Protocol, TypeVar, cast

import grpc.aio

from catenary_protos.catenary.v1 import scheduler_pb2
from catenary_services.errors import (
    CatenaryError,
    InvalidInput,
    InvalidMessage,
    Overloaded,
    Unavailable,
)
from catenary_services.grpc.packed_writer import PackedWriter

HELLO_TIMEOUT_S = 5.0
LAST_WRITE_S = 1.0
"""Time in seconds for the last write to a peer whose session ends, so that it learns the reason."""

In = TypeVar("In")
Out = TypeVar("Out")
In_contra = TypeVar("In_contra", contravariant=True)
Pack = TypeVar("Pack", scheduler_pb2.AgentMessages, scheduler_pb2.GatewayMessages)
Packed_co = TypeVar("Packed_co", covariant=True)


class GrpcStream(Protocol[Packed_co, In_contra]):
    """The two calls of `grpc.aio.ServicerContext` that a session needs."""

    async def read(self) -> object:
        """Returns the next packed message or `grpc.aio.EOF`."""
        ...

    async def write(self, message: In_contra) -> None:
        """Sends one packed message."""
        ...


Speaks = Callable[[str], None]
"""Raises PermissionDenied unless the opener of a stream may speak for this gateway or agent."""


class PeerStream(Generic[Out]):
    """The scheduler's end of one stream.

    Attributes:
        heard_s: Moment at which the peer last sent anything, on `time.monotonic`.
    """

    def __init__(self, send: Callable[[list[Out]], Awaitable[None]]) -> None:
        self._send = send
        self._is_sending = False
        self._writer = PackedWriter(self._send_unless_over)
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.heard_s = time.monotonic()

    @property
    def closed(self) -> bool:
        """True once this side has ended the stream."""
        return self._ended.done()

    def send(self, message: Out) -> None:
        """Queues a message; a peer that does not read loses its session, which bounds memory."""
        if self._ended.done():
            return
        try:
            self._writer.put(message)
        except Overloaded as error:
            self.close(Unavailable(error.message))

    def close(self, error: CatenaryError) -> None:
        """Ends the session; the peer is told `error`. Idempotent."""
        if not self._ended.done():
            self._ended.set_exception(error)
            self._ended.exception()  # retrieved even if nobody runs the session any more

    async def run(self, reader: Awaitable[None]) -> None:
        """Reads and writes until the peer ends the stream or somebody calls `close`.

        Raises:
            CatenaryError: The error given to `close`, or the peer's violation of the protocol.
        """
        reading = asyncio.ensure_future(reader)
        writing = asyncio.ensure_future(self._writer.run())
        both: set[asyncio.Future[None]] = {reading, writing}
        try:
            await asyncio.wait({*both, self._ended}, return_when=asyncio.FIRST_COMPLETED)
            for part in (self._ended, reading, writing):
                if part.done():
                    part.result()
        finally:
            reading.cancel()
            try:
                if self._is_sending:  # gRPC has no way to end a call in the middle of a write
                    self.close(Unavailable("the session is over"))
                    await asyncio.wait({writing}, timeout=LAST_WRITE_S)
            finally:  # the peer may hang up meanwhile
                writing.cancel()
                await asyncio.gather(*both, return_exceptions=True)
                self.close(Unavailable("the session is over"))

    async def _send_unless_over(self, messages: list[Out]) -> None:
        self._is_sending = True
        await self._send(messages)
        self._is_sending = False
        if self._ended.done():
            raise Unavailable("the session is over")


async def read_packs(
    stream: GrpcStream[object, object], session: PeerStream[Out], handle: Callable[[In], None]
) -> None:
    """Gives every packed message to `handle` until the peer ends the stream.

    Raises:
        InvalidMessage: The peer sent an impossible message; nothing of that message was handled.
    """
    while (packed := await stream.read()) is not grpc.aio.EOF:
        _require_good(packed)
        session.heard_s = time.monotonic()
        handle(cast(In, packed))


async def first_pack(stream: GrpcStream[object, object], kind: type[Pack], who: str) -> Pack:
    """Returns the first packed message of a stream, which begins with the peer's hello.

    Args:
        stream: The stream.
        kind: The type of its packed messages.
        who: The peer in words.

    Raises:
        InvalidInput: The peer ended the stream, sent nothing for seconds, or sent no hello.
        InvalidMessage: The message is impossible.
    """
    try:
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            packed = await stream.read()
    except TimeoutError:
        raise InvalidInput("hello", f"nothing came within {HELLO_TIMEOUT_S} s") from None
    if packed is grpc.aio.EOF:
        raise InvalidInput("hello", "the stream ended before it")
    _require_good(packed)
    assert isinstance(packed, kind)
    if not packed.messages or not packed.messages[0].HasField("hello"):
        raise InvalidInput("hello", f"must be the first message of {who}")
    return packed


def _require_good(packed: object) -> None:
    """Raises the error that `catenary_services.rules.checking` returned for a bad message."""
    if isinstance(packed, InvalidMessage):
        raise packed
