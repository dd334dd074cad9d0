"""A TCP connection that carries whole frames, plain or under TLS.

The kernel reads payloads straight into memory of the receive pool; only bytes that arrive together
with a header are copied. When the pool is used up, reading stops and TCP holds up the sender.
"""

from __future__ import annotations

import asyncio
import fcntl
import socket
import struct
import termios
import time
from collections.abc import Callable
from functools import partial
from typing import cast

from catenary_services.errors import InvalidInput, OverloadError, PartitionLost, PayloadTooLarge
from catenary_services.transport.acknowledgements import (
    LOOK_S,
    SILENT_S,
    Acknowledgements,
    LinkState,
    Lost,
    SendQueueState,
)
from catenary_services.transport.exchange import EMPTY, MEMORY_WAIT_S, lost, refused, unless_stalled
from catenary_services.transport.frames import (
    PREFIX_BYTES,
    MessageKind,
    MessagePrefix,
    decode_prefix,
)
from catenary_services.transport.memory import MemoryBlock, MemoryShare

_STAGE_BYTES = 64 << 10
_FIRST_STAGE_BYTES = 4 << 10
"""Size of the buffer until the sender is known: enough for the message with its id, and no more."""
STALLED_S = 30.0
"""A frame of which no byte arrives for so many seconds is given up together with its connection."""
_WRITE_AT_ONCE = 32 << 10
"""Below this size, joining header and payload is cheaper than waiting for the socket."""

_LOOPBACK_SEND_BYTES = 512 << 10
"""Send buffer for peers on the same machine, where a short queue stays in the cache shared by both
ends: 10 MB take 3.4 ms instead of 5.5 ms. Over a network the kernel's own tuning is better."""

_INFO_BYTES = 192
_ACKNOWLEDGED = struct.Struct("<Q")
_ACKNOWLEDGED_AT = 120
"""Offset of `tcpi_bytes_acked` in `struct tcp_info`."""
_COUNT = struct.Struct("<I")
_UNACKNOWLEDGED_AT = 24
"""Offset of `tcpi_unacked` there: packets that were sent and not acknowledged."""
_LEAST_ROUND_TRIP_AT = 148
"""Offset of `tcpi_min_rtt` there, in microseconds; all ones if it is not known."""
_UNKNOWN_ROUND_TRIP = 0xFFFF_FFFF
_DELIVERY_RATE_AT = 160
"""Offset of `tcpi_delivery_rate` there, in bytes per second."""
_QUEUED = struct.Struct("i")

OnFrame = Callable[[MessagePrefix, bytes, memoryview, Callable[[], None]], None]
"""A function that gets prefix, header, payload, and a function that releases the payload."""

FRAME_KINDS = frozenset({MessageKind.HELLO, MessageKind.WELCOME, MessageKind.FRAME})
"""The kinds of messages that frames over TCP need."""


class TcpStream(asyncio.BufferedProtocol):
    """Parses incoming frames and writes outgoing ones."""

    def __init__(
        self,
        max_payload_bytes: int,
        on_frame: OnFrame,
        on_lost: Callable[[PartitionLost], None],
        *,
        secure: bool,
        make_share: Callable[[], MemoryShare] | None,
        kinds: frozenset[MessageKind] = FRAME_KINDS,
    ) -> None:
        self._kinds = kinds
        self._max_payload_bytes = max_payload_bytes if make_share is not None else 0
        self._on_frame = on_frame
        self._on_lost = on_lost
        # The event loop's TLS pauses at `>= limit`, its sockets at `> limit`. Neither may let a
        # push return while one of its bytes is still in the slot.
        self._high_water = 1 if secure else 0
        self._make_share = make_share
        self._share: MemoryShare | None = None
        self._transport: asyncio.Transport | None = None
        self._stage = memoryview(bytearray(_FIRST_STAGE_BYTES))
        self._start = 0
        self._end = 0
        self._prefix: MessagePrefix | None = None
        self._header = b""
        self._block: MemoryBlock | None = None
        self._fill = EMPTY
        self._filled = 0
        self._hungry: asyncio.Task[None] | None = None
        self._held_up = False
        self._is_trusted = False
        self._watch: asyncio.TimerHandle | None = None
        self._writing_paused = False
        self._drained: asyncio.Future[None] | None = None
        self._after_drain: list[Callable[[], None]] = []
        self._acknowledgements = Acknowledgements(round(SILENT_S * 1e9))
        self._look: asyncio.TimerHandle | None = None
        self.closed = False

    # ---- the connection ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Sets the options of the socket."""
        self._transport = cast(asyncio.Transport, transport)
        if self.closed:  # refused while it was being accepted
            self._transport.abort()
            return
        self._transport.set_write_buffer_limits(self._high_water, 0)
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if _same_machine(sock):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LOOPBACK_SEND_BYTES)
        # A machine that vanishes sends no RST: probe after two idle seconds, give up after five.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        if self._make_share is not None:
            self._share = self._make_share()

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends everything that waits on the connection."""
        self.close(lost("tcp", str(exc) if exc is not None else "the peer closed it"))

    def close(self, error: PartitionLost) -> None:
        """Drops the connection; idempotent."""
        if self.closed:
            return
        self.closed = True
        if self._transport is not None:
            self._transport.abort()
        if self._hungry is not None:
            self._hungry.cancel()
        for timer in (self._watch, self._look):
            if timer is not None:
                timer.cancel()
        if self._share is not None:
            if self._block is not None:
                self._share.release(self._block)
            self._share.close(error)
        self._block, self._fill = None, EMPTY
        if self._drained is not None and not self._drained.done():
            self._drained.set_exception(error)
            self._drained.exception()  # nobody may be waiting for it
        self._run_after_drain()
        self._on_lost(error)
        for lost_frame in self._acknowledgements.take():
            lost_frame(error)

    def trust(self) -> None:
        """Accepts frames and long headers from now on, because the sender is known."""
        self._is_trusted = True
        stage = memoryview(bytearray(_STAGE_BYTES))
        stage[: self._end] = self._stage[: self._end]
        self._stage = stage

    @property
    def unsent_bytes(self) -> int:
        """Bytes written that the kernel has not taken yet."""
        return self._transport.get_write_buffer_size() if self._transport else 0

    @property
    def ssl_object(self) -> object:
        """The TLS object with the certificate of the other side; None without TLS."""
        return self._transport.get_extra_info("ssl_object") if self._transport else None

    # ---- writing ----

    def write(self, data: bytes) -> None:
        """Writes a small message without waiting."""
        if self._transport is not None and not self.closed:
            self._transport.write(data)

    async def send(
        self,
        head: bytes,
        payload: memoryview,
        done: Callable[[], None],
        timeout_s: float,
        lost_frame: Lost | None = None,
    ) -> None:
        """Writes `head` and `payload`; calls `done` once `payload` may be written again.

        `lost_frame` is called if the connection ends later and the frame may not have arrived.

        Raises:
            TimeoutError: The peer took no byte for `timeout_s`.
            PartitionLost: The connection broke.
        """
        assert self._transport is not None
        if len(payload) <= _WRITE_AT_ONCE:
            self._transport.write(b"".join((head, payload)))
            done()
        else:
            self._transport.write(head)
            self._transport.write(payload)
            self._after_drain.append(done)
            if not self._writing_paused:
                self._run_after_drain()
        if self._writing_paused and not self.closed:
            # The bytes stay queued if the caller is cancelled: a frame is sent whole or not at all.
            if self._drained is None or self._drained.done():
                self._drained = asyncio.get_running_loop().create_future()
            await unless_stalled(self._drained, timeout_s, lambda: self._outgoing().acknowledged)
        if self.closed:
            return
        if lost_frame is not None:
            self._acknowledgements.sent(lost_frame)
        if self._look is None:
            self._look_soon()

    def _look_soon(self) -> None:
        self._look = asyncio.get_running_loop().call_later(LOOK_S, self._look_after_sent)

    def _look_after_sent(self) -> None:
        """Gives the connection up if no sent byte is acknowledged."""
        self._look = None
        seen = self._outgoing()
        if self._acknowledgements.look(time.monotonic_ns(), seen):
            self.close(lost("tcp", f"nothing was acknowledged for {SILENT_S:g} s"))
        elif not self._acknowledgements.is_settled(seen):
            self._look_soon()

    def _outgoing(self) -> SendQueueState:
        """Returns the kernel's state of what was sent."""
        assert self._transport is not None
        left = self._transport.get_write_buffer_size()
        try:
            facts, queued = self._kernel_facts()
            (acknowledged,) = _ACKNOWLEDGED.unpack_from(facts, _ACKNOWLEDGED_AT)
            (packets,) = _COUNT.unpack_from(facts, _UNACKNOWLEDGED_AT)
        except (OSError, struct.error):  # closed in the meantime
            return SendQueueState(0, 0, unanswered=False, handed_over=False)
        return SendQueueState(acknowledged, queued, packets > 0, left == 0)

    def _kernel_facts(self) -> tuple[bytes, int]:
        """Returns the `struct tcp_info` of the connection, and the bytes in its send queue."""
        assert self._transport is not None
        sock = self._transport.get_extra_info("socket")
        facts = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        (queued,) = _QUEUED.unpack(fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4)))
        return facts, queued

    def transit(self) -> LinkState | None:
        """Returns what is on its way to the other side; None if the kernel does not say."""
        assert self._transport is not None
        try:
            facts, queued = self._kernel_facts()
            (acknowledged,) = _ACKNOWLEDGED.unpack_from(facts, _ACKNOWLEDGED_AT)
            (round_trip_us,) = _COUNT.unpack_from(facts, _LEAST_ROUND_TRIP_AT)
            (rate,) = _ACKNOWLEDGED.unpack_from(facts, _DELIVERY_RATE_AT)
        except (OSError, struct.error):
            return None
        known_us = 0 if round_trip_us == _UNKNOWN_ROUND_TRIP else round_trip_us
        outstanding = queued + self._transport.get_write_buffer_size()
        return LinkState(acknowledged, outstanding, known_us * 1_000, rate)

    def pause_writing(self) -> None:
        """Notes that the socket is full."""
        self._writing_paused = True

    def resume_writing(self) -> None:
        """Notes that everything written has left, and goes on with what waited for that."""
        self._writing_paused = False
        self._run_after_drain()
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    def _run_after_drain(self) -> None:
        waiting, self._after_drain = self._after_drain, []
        for done in waiting:
            done()

    # ---- reading ----

    def hold_up(self) -> None:
        """Reads no more until `go_on`."""
        if not self._held_up and not self.closed and self._transport is not None:
            self._held_up = True
            self._transport.pause_reading()

    def go_on(self) -> None:
        """Reads again after `hold_up`."""
        if self._held_up and not self.closed and self._transport is not None:
            self._held_up = False
            self._read_on()

    def _read_on(self) -> None:
        assert self._transport is not None
        if not self._held_up and self._hungry is None:
            self._transport.resume_reading()
            self._guarded_parse()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Returns the memory in which the next bytes belong."""
        if self._block is not None:
            return self._fill[self._filled :]
        return self._stage[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        """Handles `nbytes` bytes that arrived in the buffer."""
        if self.closed:
            return
        if self._block is None:
            self._end += nbytes
        else:
            self._filled += nbytes
            if self._filled < len(self._fill):
                return
            self._complete()
        self._guarded_parse()

    def _guarded_parse(self) -> None:
        try:
            self._parse()
        except InvalidInput as error:
            refused("tcp", error)
            self.close(lost("tcp", error.message))

    def _parse(self) -> None:
        while not (self.closed or self._held_up or self._hungry or self._block):
            if not self._begin() or not self._place_payload():
                break
        if self._start:
            rest = self._end - self._start
            self._stage[:rest] = bytes(self._stage[self._start : self._end])
            self._start, self._end = 0, rest

    def _begin(self) -> bool:
        """Reads prefix and header from the stage; False if they are not complete."""
        staged = self._stage[self._start : self._end]
        if len(staged) < PREFIX_BYTES:
            return False
        prefix = decode_prefix(staged, self._max_payload_bytes)
        if prefix.kind not in self._kinds:
            raise InvalidInput("prefix.kind", f"unexpected {prefix.kind.name}")
        if prefix.payload_bytes and prefix.kind not in (MessageKind.FRAME, MessageKind.SLOT):
            raise InvalidInput("prefix.payload_bytes", f"{prefix.kind.name} has none")
        needed = PREFIX_BYTES + prefix.header_bytes
        if not self._is_trusted and (
            prefix.kind is MessageKind.FRAME or needed > _FIRST_STAGE_BYTES
        ):
            raise InvalidInput("prefix.kind", f"{prefix.kind.name} before HELLO")
        if len(staged) < needed:
            if needed > len(self._stage):
                larger = memoryview(bytearray(needed))
                larger[: len(staged)] = staged
                self._stage, self._start, self._end = larger, 0, len(staged)
            return False
        self._prefix = prefix
        self._header = bytes(staged[PREFIX_BYTES:needed])
        self._start += needed
        return True

    def _place_payload(self) -> bool:
        """Finds memory for the payload and moves its staged part there; False without memory."""
        assert self._prefix is not None
        # The payload of a SLOT lies in memory that is known by its argument.
        nbytes = 0 if self._prefix.kind is MessageKind.SLOT else self._prefix.payload_bytes
        if nbytes == 0:
            self._complete()
            return True
        assert self._share is not None
        try:
            block = self._share.try_acquire(nbytes)
        except PayloadTooLarge as error:
            raise InvalidInput("prefix.payload_bytes", error.message) from error
        except OverloadError:
            block = None
        if block is None:
            assert self._transport is not None
            self._transport.pause_reading()
            self._hungry = asyncio.get_running_loop().create_task(self._await_memory(nbytes))
            return False
        self._fill_from_stage(block, nbytes)
        return True

    async def _await_memory(self, nbytes: int) -> None:
        assert self._share is not None
        try:
            block = await self._share.acquire(nbytes, MEMORY_WAIT_S)
        except (OverloadError, PartitionLost) as error:
            self._hungry = None
            self.close(lost("tcp", f"no memory for a frame: {error.message}"))
            return
        if self.closed:
            self._share.release(block)
            return
        self._hungry = None
        self._fill_from_stage(block, nbytes)
        self._read_on()

    def _fill_from_stage(self, block: MemoryBlock, nbytes: int) -> None:
        self._block = block
        self._fill = block.view(nbytes)
        self._filled = min(nbytes, self._end - self._start)
        self._fill[: self._filled] = self._stage[self._start : self._start + self._filled]
        self._start += self._filled
        if self._filled == nbytes:
            self._complete()
        else:
            self._watch_fill(-1)

    def _watch_fill(self, filled_before: int) -> None:
        if self._filled == filled_before and not self._held_up:
            self.close(lost("tcp", f"no byte of a frame came for {STALLED_S:g} s"))
        else:
            loop = asyncio.get_running_loop()
            self._watch = loop.call_later(STALLED_S, self._watch_fill, self._filled)

    def _complete(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        prefix, block, payload = self._prefix, self._block, self._fill
        assert prefix is not None
        self._prefix, self._block, self._fill, self._filled = None, None, EMPTY, 0
        release = _nothing
        if block is not None:
            assert self._share is not None
            release = partial(self._share.release, block)
        self._on_frame(prefix, self._header, payload.toreadonly(), release)


def _same_machine(sock: socket.socket) -> bool:
    try:
        return bool(sock.getsockname()[0] == sock.getpeername()[0])
    except OSError:  # the peer has already left
        return False


def _nothing() -> None:
    """Releases an empty payload, which holds nothing."""
