"""One HTTP connection: requests to infer are answered here, all others are lent to aiohttp.

`ConnectionPhase` says who gets the bytes that are read. A request that is plain has a known end, so
aiohttp gets its bytes and no others, and the next request may be one of ours again. From the first
request on that is not plain, aiohttp has the connection for good. Requests are answered one at a
time, in their order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Protocol, cast

from catenary_gateway.admission.concurrency_limiter import ConcurrencyPermit
from catenary_gateway.endpoints.connections import request_headers
from catenary_gateway.endpoints.connections.body_buffer import BodyBuffer
from catenary_gateway.endpoints.connections.connection_phase import ConnectionPhase
from catenary_gateway.endpoints.connections.http_call import Body, HttpCall
from catenary_gateway.endpoints.connections.library_handler import LibraryHandler
from catenary_gateway.endpoints.connections.request_headers import InferenceTarget, RequestHeader
from catenary_gateway.endpoints.http_bodies import arrived
from catenary_services.errors import PayloadTooLarge

KEEPALIVE_S = 75.0
"""Seconds that a connection stays open without a request, or without reading its answer."""
LINGER_S = 10.0
"""Seconds within which the rest of a body must come that nobody needs any more."""
MOST_AHEAD_BYTES = 64 * 1024
"""Bytes behind the present request beyond which nothing is read until it is answered."""


class ConnectionOwner(Protocol):
    """The part of `HttpConnections` that a connection uses."""

    scratch: memoryview
    """The memory that connections read into while they know of none that is better."""

    def opened(self, connection: HttpConnection) -> None: ...

    def closed(self, connection: HttpConnection) -> None: ...

    def spoke(self, connection: HttpConnection) -> None:
        """Notes that a connection has sent the headers of a request."""
        ...

    def library_handler(self, connection: HttpConnection) -> LibraryHandler:
        """Returns a new handler of aiohttp's."""
        ...

    async def answer(self, call: HttpCall, target: InferenceTarget, address: str) -> list[Body]:
        """Returns the bytes of the answer to a request to infer, which may report an error."""
        ...


class HttpConnection(asyncio.BufferedProtocol):
    """A connection of a client; implements `HttpCall` for its present request."""

    def __init__(self, owner: ConnectionOwner) -> None:
        self.transport: asyncio.Transport | None = None
        self.task: asyncio.Task[None] | None = None
        """The answering of the present request; None if aiohttp answers it, or there is none."""
        self.headers: Mapping[str, str] = {}
        self.announced_bytes = 0
        self._phase = ConnectionPhase.HEADERS
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._address = "unknown"
        self._pending = b""
        """Bytes that were read and that nobody has got yet."""
        self._data = b""
        self._header: RequestHeader | None = None
        """The meaning of `_data`, the headers of the last request. Most clients repeat them."""
        self._missing = 0
        """Bytes of the present body that whoever gets them has not got."""
        self._body: BodyBuffer | None = None
        self._library: LibraryHandler | None = None
        self._has_spoken = self._is_last = False
        self._reading_paused = self._writing_paused = False
        self._unread_bytes = 0
        """Bytes of answers that the client had not read when that was last looked at."""
        self._idle_since_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._linger: asyncio.TimerHandle | None = None
        """The end of the time for the rest of a body that is thrown away."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Notes where answers go; called by the event loop, like all up to `resume_writing`."""
        self.transport = cast(asyncio.Transport, transport)
        name = transport.get_extra_info("peername")
        if isinstance(name, tuple):
            self._address = str(name[0])
        self._idle_since_s = self._loop.time()
        self._timer = self._loop.call_later(KEEPALIVE_S, self._close_if_idle)
        self._owner.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancels the present request."""
        self.transport = None
        for timer in (self._timer, self._linger):
            if timer is not None:
                timer.cancel()
        self._owner.closed(self)
        if self.task is not None:
            self.task.cancel()
        if self._library is not None:
            self._library.connection_lost(exc)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Returns the memory for the next bytes."""
        if self._phase is ConnectionPhase.BODY and self._body is not None:
            return self._body.room()
        return self._owner.scratch

    def buffer_updated(self, nbytes: int) -> None:
        """Takes the bytes that were read."""
        if self._phase is ConnectionPhase.BODY and self._body is not None:
            self._missing -= nbytes
            if not self._missing:
                self._phase = ConnectionPhase.ANSWERING
            self._body.took(nbytes)
            return
        data = bytes(self._owner.scratch[:nbytes])
        self._pending = self._pending + data if self._pending else data
        self._go_on()

    def eof_received(self) -> None:
        """Has the connection closed: who has nothing more to say is taken to be gone."""

    def pause_writing(self) -> None:
        """Holds back the next requests while the client does not read its answers."""
        self._writing_paused = True
        if self._library is not None:
            self._library.pause_writing()

    def resume_writing(self) -> None:
        """Goes on with the next requests."""
        self._writing_paused = False
        if self._library is not None:
            self._library.resume_writing()
        self._go_on()

    def force_close(self) -> None:
        """Closes the connection, whatever it does."""
        self._is_last = True
        if self._library is not None:
            self._library.force_close()
        if self.transport is not None:
            self.transport.close()

    def close_soon(self) -> None:
        """Closes the connection once the present request is answered; aiohttp closes its own."""
        self._is_last = True
        if self.task is None and self._library is None and self.transport is not None:
            self.transport.close()

    def library_answered(self, *, keeps_alive: bool) -> None:
        """Goes on behind a request that aiohttp has answered."""
        if self._phase is not ConnectionPhase.LENT:
            return
        if self._missing or not keeps_alive:
            # It reads the rest of the body, or closes the connection.
            self._phase = ConnectionPhase.GIVEN
        else:
            self._phase = ConnectionPhase.HEADERS
        self._idle_since_s = self._loop.time()
        # Not at once: this is called by a task of aiohttp's, which may have to end.
        self._loop.call_soon(self._go_on)

    async def body(self, most_bytes: int, permit: ConcurrencyPermit) -> Body:
        """Returns the body of the present request, which is read as of now.

        Raises:
            CatenaryError: It is too large, or too slow.
        """
        size, pending = self._missing, self._pending
        if size > most_bytes:
            raise PayloadTooLarge(f"the body has more than {most_bytes} bytes")
        if len(pending) >= size:
            permit.hold(size)
            self._pending = pending[size:]
            self._missing = 0
            self._phase = ConnectionPhase.ANSWERING
            return pending[:size]
        self._body = body = BodyBuffer(size)
        body.append(pending)
        self._pending = b""
        self._missing -= len(pending)
        self._phase = ConnectionPhase.BODY
        self._pause_or_resume()
        try:
            await arrived(body.more, most_bytes, permit)
            return body.whole()
        finally:
            self._body = None

    def _go_on(self) -> None:
        """Gives the bytes that were read to whom they are for, as far as it can be known."""
        while self._pending and self.transport is not None and self._given_some():
            pass
        self._pause_or_resume()

    def _given_some(self) -> bool:
        """Gives the next bytes to somebody; False if that has to wait."""
        match self._phase:
            case ConnectionPhase.HEADERS:
                return not self._writing_paused and not self._is_last and self._begun()
            case ConnectionPhase.LENT if self._missing:
                assert self._library is not None
                self._library.data_received(self._taken())
            case ConnectionPhase.GIVEN:
                assert self._library is not None
                self._missing = len(self._pending)
                self._library.data_received(self._taken())
            case ConnectionPhase.SKIPPING:
                self._taken()
                if not self._missing:
                    self._phase = ConnectionPhase.HEADERS
                    self._stop_lingering()
            case _:
                return False
        return True

    def _taken(self) -> bytes:
        """Removes the next bytes of the present body, and returns them."""
        piece = self._pending[: self._missing]
        self._pending = self._pending[self._missing :]
        self._missing -= len(piece)
        return piece

    def _begun(self) -> bool:
        """Begins with the next request; False if its headers are not complete."""
        end = self._pending.find(request_headers.END)
        if end < 0:
            if request_headers.may_become_plain(self._pending):
                return False
            self._given()
            return True
        data = self._pending[: end + len(request_headers.END)]
        header = self._header if data == self._data else request_headers.header_of(data)
        if header is None:
            self._given()
            return True
        self._data, self._header = data, header
        if not self._has_spoken:
            self._has_spoken = True
            self._owner.spoke(self)
        self._pending = self._pending[len(data) :]
        self._missing = header.body_bytes
        if header.target is None:
            self._phase = ConnectionPhase.LENT
            self._with_library().data_received(data)
            return True
        self._without_library()
        self.headers, self.announced_bytes = header.headers, header.body_bytes
        self._phase = ConnectionPhase.ADMITTING
        self.task = self._loop.create_task(self._answer(header.target))
        return True

    async def _answer(self, target: InferenceTarget) -> None:
        """Answers the present request."""
        try:
            pieces = await self._owner.answer(self, target, self._address)
        except BaseException:  # it was cancelled: the client is gone, or the gateway stops
            self.force_close()
            raise
        self.task = None
        self._idle_since_s = self._loop.time()
        if self.transport is None:
            return
        if len(pieces) == 1:
            self.transport.write(pieces[0])
        else:
            self.transport.writelines(pieces)
        if self._is_last:
            self.transport.close()
            return
        self._phase = ConnectionPhase.HEADERS
        if self._missing:
            self._phase = ConnectionPhase.SKIPPING
            self._linger = self._loop.call_later(LINGER_S, self.force_close)
        self._go_on()

    def _given(self) -> None:
        """Gives aiohttp the connection for good."""
        self._with_library()
        self._phase = ConnectionPhase.GIVEN

    def _with_library(self) -> LibraryHandler:
        if self._library is None:
            assert self.transport is not None
            self._library = self._owner.library_handler(self)
            self._library.connection_made(self.transport)
            if self._writing_paused:
                self._library.pause_writing()
        return self._library

    def _without_library(self) -> None:
        if self._library is not None:
            self._library.let_go()
            self._library = None
            if self.transport is not None and not self._reading_paused:
                self.transport.resume_reading()  # it may have been paused by aiohttp

    def _pause_or_resume(self) -> None:
        """Reads on unless what was read has to wait: much of it, or a body nobody asked for."""
        if self.transport is None:
            return
        waits = self._phase is ConnectionPhase.ADMITTING and self._missing > len(self._pending)
        if waits or len(self._pending) > MOST_AHEAD_BYTES:
            self._reading_paused = True
            self.transport.pause_reading()
        elif self._reading_paused:
            self._reading_paused = False
            self.transport.resume_reading()

    def _stop_lingering(self) -> None:
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None

    def _close_if_idle(self) -> None:
        if self.transport is None:
            return
        now_s, unread = self._loop.time(), self.transport.get_write_buffer_size()
        # aiohttp closes the connections that it has; who reads an answer is not idle.
        if self.task is not None or self._library is not None or unread < self._unread_bytes:
            self._idle_since_s = now_s
        self._unread_bytes = unread
        left_s = self._idle_since_s + KEEPALIVE_S - now_s
        if left_s <= 0:
            self.transport.abort()
        else:
            self._timer = self._loop.call_later(left_s, self._close_if_idle)
