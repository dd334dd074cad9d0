"""HTTP/2 over a connection of the event loop: one write for all that is ready, and a clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar, cast

from catenary_services.http2.connection import ServerConnection, StreamOpener
from catenary_services.http2.flood_limit import TurnBudget
from catenary_services.http2.frames import CANCEL, ENHANCE_YOUR_CALM, NO_ERROR, ConnectionViolation
from catenary_services.http2.limits import ConnectionLimits
from catenary_services.log import get_logger

T = TypeVar("T")

_HIGH_WATER_BYTES = 256 * 1024
_MOST_EARLY_PINGS = 2
_FAREWELL_S = 5.0
"""Seconds within which a peer must take the last of what is sent when its connection is closed."""

_log = get_logger("catenary_services.http2")


class ConnectionOwner(Protocol[T]):
    """The server of a connection.

    Attributes:
        turn_budget: The work that its connections may do in one turn of the event loop.
    """

    turn_budget: TurnBudget

    def open(self, connection: ConnectionProtocol[T]) -> StreamOpener[T]:
        """Returns who takes the streams of a connection that is about to be made."""
        ...

    def made(self, opener: StreamOpener[T]) -> None:
        """Learns that a connection is made."""
        ...

    def lost(self, connection: ConnectionProtocol[T], opener: StreamOpener[T]) -> None:
        """Learns that a connection that was made is over."""
        ...

    def wait_for_turn(self, connection: ConnectionProtocol[T]) -> None:
        """Has a connection go on with what it has read, after others."""
        ...

    def begun(self, nbytes: int) -> None:
        """Learns that more bytes came that are no whole frame or block of headers, or that wait."""
        ...


class ConnectionProtocol(asyncio.Protocol, Generic[T]):
    """One connection of a server.

    Attributes:
        connection: Its state.
        transport: Where its bytes go; None before it is made.
        peer: Address and port of the other side.
    """

    def __init__(
        self,
        owner: ConnectionOwner[T],
        limits: ConnectionLimits,
        settled: Callable[[], None],
    ) -> None:
        """Creates the protocol of a connection that is about to be made.

        Args:
            owner: The server.
            limits: Its limits.
            settled: Called when the peer has shown that it speaks HTTP/2, or never will.
        """
        self._loop = asyncio.get_running_loop()
        self._limits = limits
        self._settled: Callable[[], None] | None = settled
        self._owner = owner
        self._is_flushing = False
        self._is_paused = False
        self._unfinished_bytes = 0
        self.transport: asyncio.Transport | None = None
        self.peer: tuple[str, int] = ("", 0)
        now_s = self._loop.time()
        self._began_s = self._read_s = self._busy_s = self._wrote_s = now_s
        self._seen_number = 0
        self._pinged_s = 0.0
        self._pings = 0
        self._early_pings = 0
        self._last_ping_s = 0.0
        self._sent_at_ping = -1
        self._opener = owner.open(self)
        self.connection: ServerConnection[T] = ServerConnection(
            self._opener, limits, owner.turn_budget, self._flush_soon, now_s
        )
        self.connection.control.on_ping = self._on_ping

    # ---- asyncio ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are of no class of asyncio's.
        self.transport = transport = cast(asyncio.Transport, transport)
        transport.set_write_buffer_limits(high=_HIGH_WATER_BYTES)
        name = transport.get_extra_info("peername")
        if isinstance(name, tuple):
            self.peer = (str(name[0]), int(name[1]))
        self._owner.made(self._opener)
        self._flush()

    def data_received(self, data: bytes) -> None:
        if self.transport is None or self.transport.is_closing():
            return
        self._read_s = self._loop.time()
        self._receive(data)

    def take_turn(self) -> None:
        """Goes on with what was read; called by the server."""
        if self.transport is None or self.transport.is_closing():
            return
        if not self.connection.sending.is_held:
            self._receive(b"")

    def _receive(self, data: bytes) -> None:
        now_s = self._loop.time()
        try:
            self.connection.receive(data, now_s)
        except ConnectionViolation as violation:
            self._violated(violation)
        except Exception as error:  # of what was made of this data; others go on
            _log.error("http2_connection_failed", exc_info=error)
            self.abort()
        else:
            if self._settled is not None and self.connection.control.has_settings:
                settled, self._settled = self._settled, None
                settled()
            if self.connection.sending.out:
                self._flush()
            self._read_on_or_wait()
            self._note_unfinished()

    def _read_on_or_wait(self) -> None:
        """Reads further bytes, unless those that were read wait for their turn."""
        if self.connection.has_more:
            self._pause_reading()
            self._owner.wait_for_turn(self)
        elif self._is_paused and not self.connection.sending.is_held:
            self._is_paused = False
            if self.transport is not None and not self.transport.is_closing():
                self.transport.resume_reading()

    def _note_unfinished(self) -> None:
        """Tells the owner of more that is unfinished, or waits for its turn."""
        before, self._unfinished_bytes = self._unfinished_bytes, self.connection.unfinished_bytes
        if self._unfinished_bytes > before:
            self._owner.begun(self._unfinished_bytes - before)

    def _pause_reading(self) -> None:
        if self.transport is not None and not self._is_paused:
            self._is_paused = True
            self.transport.pause_reading()

    def pause_writing(self) -> None:
        self.connection.sending.is_held = True
        self._wrote_s = self._loop.time()
        self._pause_reading()  # what arrives would only be answered with more

    def resume_writing(self) -> None:
        self.connection.sending.is_held = False
        if self.transport is not None and not self.transport.is_closing():
            self._read_on_or_wait()
            self.connection.sending.go_on()

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        if self._settled is not None:
            self._settled()
            self._settled = None
        self.connection.end()
        self._owner.lost(self, self._opener)

    # ---- the server ----

    def look(self, now_s: float) -> None:
        """Ends the connection, or a stream of it, if the peer has been silent for too long."""
        connection, limits = self.connection, self._limits
        sending = connection.sending
        sending.now_s = now_s
        if self.transport is None or self.transport.is_closing():
            if now_s - self._wrote_s > _FAREWELL_S:
                self.abort()
            return
        if sending.is_held:
            if now_s - self._wrote_s > limits.stalled_s:
                self.abort()
            return
        for stream in sending.stalled(now_s - limits.stalled_s):
            sending.reset(stream, CANCEL)
            if stream.receiver is not None:
                stream.receiver.on_reset()
        if sending.streams or connection.last_number != self._seen_number:
            self._busy_s, self._seen_number = now_s, connection.last_number
        elif now_s - self._busy_s > limits.idle_s or connection.is_leaving:
            self.close()
            return
        if connection.last_number == 0 and now_s - self._began_s > limits.first_stream_s:
            self.close()
            return
        self._ping(now_s)

    def leave(self) -> None:
        """Serves no later streams, and closes once the present ones are answered."""
        self.connection.leave()

    def close(self, code: int = NO_ERROR, why: str = "") -> None:
        """Ends the connection with a farewell."""
        if self.transport is not None and not self.transport.is_closing():
            self.connection.is_leaving = self.connection.is_leaving and code == NO_ERROR
            self.connection.leave(code, why)
            self._flush()
            self._wrote_s = self._loop.time()
            self.transport.close()

    def abort(self) -> None:
        """Closes the connection at once, whatever is still to be sent."""
        if self.transport is not None:
            self.transport.abort()

    # ---- private ----

    def _ping(self, now_s: float) -> None:
        """Asks a silent peer whether it is there, and cuts off one that does not answer."""
        connection, limits = self.connection, self._limits
        if self._pinged_s:
            if connection.control.pings != self._pings:
                self._pinged_s = 0.0
            elif now_s - self._pinged_s > limits.ping_answer_s:
                self.abort()
        elif now_s - self._read_s > limits.ping_after_s:
            self._pinged_s, self._pings = now_s, connection.control.pings
            connection.ping()

    def _on_ping(self) -> None:
        """Counts pings that come more often than they may while nothing is sent."""
        now_s, sent = self.connection.sending.now_s, self.connection.sending.data_sent
        if sent != self._sent_at_ping:
            self._early_pings = 0
        elif now_s - self._last_ping_s < self._limits.ping_every_s:
            self._early_pings += 1
            if self._early_pings > _MOST_EARLY_PINGS:
                raise ConnectionViolation(ENHANCE_YOUR_CALM, "too_many_pings")
        self._last_ping_s, self._sent_at_ping = now_s, sent

    def _violated(self, violation: ConnectionViolation) -> None:
        _log.debug("http2_violation", peer=self.peer[0], why=violation.why)
        self.close(violation.code, violation.why)

    def _flush_soon(self) -> None:
        if not self._is_flushing:
            self._is_flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._is_flushing = False
        if self.transport is None:
            return
        out = self.connection.sending.take()
        if not out or self.transport.is_closing():
            return
        if len(out) == 1:
            self.transport.write(out[0])
        else:
            self.transport.writelines(out)
