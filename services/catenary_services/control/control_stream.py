"""A TCP connection that carries packs of messages both ways, plain or under TLS.

The reader calls its handler straight from the event loop and a write goes straight to the socket,
so that a small message costs one call of the kernel at each end and no switch of tasks.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar, cast

from google.protobuf.message import Message

from catenary_services.control.arrival_budget import ArrivalBudget, MessageBuffer
from catenary_services.errors import (
    CatenaryError,
    InvalidInput,
    InvalidMessage,
    PartitionLost,
    Unavailable,
)
from catenary_services.grpc.error_tables import error_of_exception, rpc_status
from catenary_services.grpc.rpc_errors import error_of_status
from catenary_services.log import get_logger
from catenary_services.rules import parsed
from catenary_services.transport.frames import (
    PREFIX_BYTES,
    MessageKind,
    MessagePrefix,
    decode_prefix,
    encode_prefix,
)

MAX_PACK_BYTES = 16 << 20
"""The longest pack; the longest are hellos of agents with much work, and audits."""
MAX_OPENING_BYTES = 1 << 10
"""The longest message of a peer that is not known yet."""
MAX_END_BYTES = 16 << 10
LAST_WRITE_S = 1.0
"""Seconds in which what was written has to leave once a stream has ended, with the reason at the
end."""
_STAGE_BYTES = 32 << 10
_FIRST_STAGE_BYTES = 2 << 10
_HIGH_WATER_BYTES = 256 << 10
_log = get_logger("catenary_services.control")
Pack = TypeVar("Pack", bound=Message)
_LIMITS = {
    MessageKind.HELLO: MAX_OPENING_BYTES,
    MessageKind.PACK: MAX_PACK_BYTES,
    MessageKind.END: MAX_END_BYTES,
}


class StreamHandler(Protocol):
    """The callbacks of a stream; an error that one raises ends the stream, and the peer is told."""

    def received(self, kind: MessageKind, data: bytes) -> None:
        """Takes in a HELLO or a PACK."""
        ...

    def resumed(self) -> None:
        """Called when the peer has read so much that writing makes sense again."""
        ...

    def ended(self, error: CatenaryError) -> None:
        """Called once, when the stream is over, with the reason: the peer's or this side's own.

        It is called from the event loop, never from within a call of the stream.
        """
        ...


class ControlStream(asyncio.BufferedProtocol):
    """One end of a stream.

    Attributes:
        closed: True once either side has ended the stream; nothing is read or written from then on.
        is_full: True while the peer reads too slowly; what is written then has to wait.
        heard_s: Moment at which the peer last sent a byte, on `time.monotonic`.
    """

    def __init__(self, handler: StreamHandler, budget: ArrivalBudget) -> None:
        self._handler = handler
        self._budget = budget
        self._transport: asyncio.Transport | None = None
        self._stage = memoryview(bytearray(_FIRST_STAGE_BYTES))
        self._end = 0
        self._is_trusted = False
        self._long: MessageBuffer | None = None
        self._last_write: asyncio.TimerHandle | None = None
        self.closed = False
        self.is_full = False
        self.heard_s = time.monotonic()

    # ---- the connection ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Sets the options of the socket."""
        self._transport = cast(asyncio.Transport, transport)
        if self.closed:
            self._transport.abort()
            return
        self._transport.set_write_buffer_limits(_HIGH_WATER_BYTES)
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.heard_s = time.monotonic()

    def connection_lost(self, exc: Exception | None) -> None:
        """Notes that the connection is gone."""
        if self._last_write is not None:
            self._last_write.cancel()
        self._end_with(PartitionLost(str(exc) if exc is not None else "the peer ended the stream"))

    def pause_writing(self) -> None:
        """Notes that the peer reads too slowly."""
        self.is_full = True

    def resume_writing(self) -> None:
        """Notes that the peer has read most of what was written."""
        self.is_full = False
        if not self.closed:
            self._handler.resumed()

    @property
    def ssl_object(self) -> object:
        """The TLS object with the certificate of the other side; None without TLS."""
        return self._transport.get_extra_info("ssl_object") if self._transport else None

    @property
    def unsent_bytes(self) -> int:
        """Bytes that were written and that the kernel has not taken yet."""
        return self._transport.get_write_buffer_size() if self._transport else 0

    def trust(self) -> None:
        """Accepts packs from now on, because the peer is known."""
        self._is_trusted = True
        stage = memoryview(bytearray(_STAGE_BYTES))
        stage[: len(self._stage)] = self._stage
        self._stage = stage

    def write(self, kind: MessageKind, data: bytes) -> None:
        """Writes a message; the caller heeds `is_full`."""
        if not self.closed and self._transport is not None:
            prefix = encode_prefix(MessagePrefix(kind, payload_bytes=len(data)))
            self._transport.write(prefix + data)

    def close(self, error: CatenaryError) -> None:
        """Ends the stream and tells the peer `error`; idempotent."""
        if self.closed:
            return
        if self._transport is not None:
            self.write(MessageKind.END, rpc_status(error).SerializeToString())
            self._transport.close()
            loop = asyncio.get_running_loop()
            self._last_write = loop.call_later(LAST_WRITE_S, self._transport.abort)
        self._end_with(error)

    def abort(self) -> None:
        """Drops the connection without a word, unless it is ending already."""
        if self.closed:
            return
        if self._transport is not None:
            self._transport.abort()
        self._end_with(Unavailable("the stream is over"))

    def _end_with(self, error: CatenaryError) -> None:
        if self.closed:
            return
        self.closed = True
        self._long = None
        self._budget.forget(self)
        # Who ends a stream is often in the middle of something that its end changes.
        asyncio.get_running_loop().call_soon(self._handler.ended, error)

    # ---- reading ----

    def get_buffer(self, sizehint: int) -> memoryview:
        """Returns the memory that the next bytes are read into."""
        return self._stage[self._end :] if self._long is None else self._long.rest

    def buffer_updated(self, nbytes: int) -> None:
        """Hands over all messages that are complete."""
        if self.closed:
            return
        self.heard_s = time.monotonic()
        try:
            if self._long is not None:
                self._lengthen(self._long, nbytes)
            else:
                self._parse(self._end + nbytes)
        except Exception as error:
            self.close(error_of_exception(error))

    def eof_received(self) -> bool:
        """Ends the stream: a peer that has hung up hears nothing any more."""
        return False

    def _parse(self, end: int) -> None:
        stage, start = self._stage, 0
        while end - start >= PREFIX_BYTES:
            kind, size = self._decode(stage[start : start + PREFIX_BYTES])
            begin = start + PREFIX_BYTES
            stop = begin + size
            if stop > end:
                if PREFIX_BYTES + size > len(stage):
                    self._end = 0
                    self._begin_long(kind, size, stage[begin:end])
                    return
                break
            start = stop
            self._deliver(kind, bytes(stage[begin:stop]))
            if self.closed:
                return
            stage = self._stage  # trust may have replaced it; the positions stay
        left = end - start
        if start and left:
            stage[:left] = bytes(stage[start:end])
        self._end = left

    def _decode(self, data: memoryview) -> tuple[MessageKind, int]:
        prefix = decode_prefix(data, MAX_PACK_BYTES)
        limit = _LIMITS.get(prefix.kind)
        if limit is None or prefix.header_bytes or prefix.argument:
            raise InvalidInput("prefix.kind", f"unexpected {prefix.kind.name}")
        if prefix.payload_bytes > limit:
            raise InvalidInput("prefix.payload_bytes", f"{prefix.payload_bytes} exceeds {limit}")
        if not self._is_trusted and prefix.kind is MessageKind.PACK:
            raise InvalidInput("prefix.kind", "PACK before HELLO")
        return prefix.kind, prefix.payload_bytes

    def _deliver(self, kind: MessageKind, data: bytes) -> None:
        if kind is MessageKind.END:
            if self._transport is not None:
                self._transport.abort()
            self._end_with(error_of_status(data))
        else:
            self._handler.received(kind, data)

    def _begin_long(self, kind: MessageKind, size: int, begun: memoryview) -> None:
        self._long = MessageBuffer(kind, size, begun)
        self._budget.hold(self, self._long.nbytes)

    def _lengthen(self, long: MessageBuffer, nbytes: int) -> None:
        before = long.nbytes
        long.arrived(nbytes)
        if long.is_complete:
            self._long = None
            self._budget.forget(self)
            self._deliver(long.kind, long.content())
        elif long.nbytes != before:
            self._budget.hold(self, long.nbytes)


class SchedulerEnd(Generic[Pack]):
    """A gateway's or an agent's end of a stream to a scheduler, as the handler of that stream.

    Attributes:
        stream: The stream, to be connected.
        over: Gets the reason why the stream ended, as an error.
    """

    def __init__(
        self,
        kind: type[Pack],
        take: Callable[[Pack], None],
        resumed: Callable[[], None],
        invalid: Callable[[], None],
    ) -> None:
        """Takes in packs of one type.

        Args:
            kind: The type, such as `SchedulerToAgentMessages`.
            take: Takes in a pack; an error that it raises ends the stream.
            resumed: Called when the scheduler has read so much that writing makes sense again.
            invalid: Called for each message that no scheduler sends.
        """
        self._kind = kind
        self._take = take
        self._resumed = resumed
        self._invalid = invalid
        self.stream = ControlStream(self, ArrivalBudget(2 * MAX_PACK_BYTES))
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def received(self, kind: MessageKind, data: bytes) -> None:
        """Hands the messages of a pack that has arrived whole to the handler."""
        try:
            if kind is not MessageKind.PACK:
                raise InvalidInput("prefix.kind", f"unexpected {kind.name}")
            pack = parsed(self._kind, data)
        except (InvalidInput, InvalidMessage) as error:
            self._invalid()
            _log.warning("scheduler_unbelievable", why=error.message)
            raise
        self._take(pack)

    def resumed(self) -> None:
        """Goes on writing after the scheduler has read."""
        self._resumed()

    def ended(self, error: CatenaryError) -> None:
        """Notes that the stream is over."""
        if not self.over.done():
            self.over.set_exception(error)
            self.over.exception()  # retrieved even if nobody waits any more

    def write(self, pack: Message) -> None:
        """Writes a pack to the scheduler; the caller heeds `stream.is_full`."""
        self.stream.write(MessageKind.PACK, pack.SerializeToString())
