"""A non-blocking Unix socket that carries whole messages, and file descriptors beside them.

Transports of an event loop cannot pass descriptors (SCM_RIGHTS), so this one works on the socket.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import fcntl
import os
import socket
import sys
import termios
from collections import deque
from collections.abc import Callable

from catenary_services.errors import InvalidInput, PartitionLost
from catenary_services.transport.exchange import lost, refused
from catenary_services.transport.frames import (
    MAX_HEADER_BYTES,
    PREFIX_BYTES,
    MessageKind,
    MessagePrefix,
    decode_prefix,
)
from catenary_services.transport.memory_link import INLINE_BYTES

_CORK_BYTES = 32 << 10
"""Bytes written in one turn of the event loop leave with one system call, up to this many."""
_BUFFER_BYTES = 128 << 10
_FIRST_BUFFER_BYTES = 4 << 10
"""Size of the buffer until the sender is known: enough for the message with its id, and no more."""
_READS_PER_TURN = 8
_MAX_DESCRIPTORS = 16
_TRUNCATED = int(socket.MSG_CTRUNC)
_ANCILLARY_BYTES = socket.CMSG_SPACE(_MAX_DESCRIPTORS * array.array("i").itemsize)

OnMessage = Callable[[MessagePrefix, memoryview], None]
"""A function that gets a prefix, and the header with an inline payload behind it. The bytes are
valid only during the call."""


class _Outgoing:
    __slots__ = ("data", "fd", "left")

    def __init__(self, data: memoryview, fd: int, left: asyncio.Future[None] | None) -> None:
        self.data = data
        self.fd = fd
        self.left = left


class UnixStream:
    """Reads messages and their descriptors; writes messages in order, never blocking."""

    def __init__(
        self,
        sock: socket.socket,
        on_message: OnMessage,
        on_lost: Callable[[PartitionLost], None],
        max_payload_bytes: int,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._on_message = on_message
        self._on_lost = on_lost
        self._max_payload_bytes = max_payload_bytes
        self._buffer = bytearray(_FIRST_BUFFER_BYTES)
        self._start = 0
        self._end = 0
        self._outbox: deque[_Outgoing] = deque()
        self._corked: list[bytes] = []
        """Messages written in this turn, which leave at its end; empty while any wait for the peer.
        """
        self._corked_bytes = 0
        self._descriptors: deque[int] = deque()
        self._paused = False
        self._is_trusted = False
        self._sent_bytes = 0
        self.closed = False
        self._loop.add_reader(sock.fileno(), self._readable)

    # ---- writing ----

    def takes(self, nbytes: int) -> bool:
        """Returns True if so many more bytes can be written now without waiting for the peer."""
        return not self._outbox and self._corked_bytes + nbytes <= _CORK_BYTES

    def write(self, data: bytes, fd: int = -1) -> asyncio.Future[None] | None:
        """Sends `data`, with a duplicate of `fd`, at the latest when this turn of the loop ends.

        Returns:
            None if the kernel is expected to take it then; else a future that is done when it left.
        """
        if self.closed:
            return None
        if not self._outbox and fd < 0 and self._corked_bytes + len(data) <= _CORK_BYTES:
            if not self._corked:
                self._loop.call_soon(self.flush)
            self._corked.append(data)
            self._corked_bytes += len(data)
            return None
        self.flush()
        outgoing = _Outgoing(memoryview(data), fd, None)
        if self.closed or (not self._outbox and self._send(outgoing)) or self.closed:
            return None
        if not self._outbox:
            self._loop.add_writer(self._sock.fileno(), self._writable)
        if fd >= 0:
            outgoing.fd = os.dup(fd)  # the caller may close its own before this leaves
        outgoing.left = self._loop.create_future()
        self._outbox.append(outgoing)
        return outgoing.left

    def flush(self) -> None:
        """Sends what was written in this turn of the loop; closes itself if the peer is gone."""
        if not self._corked:
            return
        data = self._corked[0] if len(self._corked) == 1 else b"".join(self._corked)
        self._corked.clear()
        self._corked_bytes = 0
        outgoing = _Outgoing(memoryview(data), -1, None)
        if not self._send(outgoing) and not self.closed:
            self._loop.add_writer(self._sock.fileno(), self._writable)
            self._outbox.append(outgoing)

    @property
    def taken_bytes(self) -> int:
        """Bytes sent that the other side has read."""
        if self.closed:
            return self._sent_bytes
        unread = bytearray(4)
        fcntl.ioctl(self._sock.fileno(), termios.TIOCOUTQ, unread)
        return self._sent_bytes - int.from_bytes(unread, sys.byteorder)

    def _send(self, outgoing: _Outgoing) -> bool:
        try:
            if outgoing.fd >= 0:
                fds = array.array("i", [outgoing.fd])
                ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)]
                sent = self._sock.sendmsg([outgoing.data], ancillary)
                outgoing.fd = -1
            else:
                sent = self._sock.send(outgoing.data)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            self._lose(f"{error.strerror or error}")
            return False
        self._sent_bytes += sent
        outgoing.data = outgoing.data[sent:]
        return not outgoing.data

    def _writable(self) -> None:
        while self._outbox:
            outgoing = self._outbox[0]
            fd = outgoing.fd
            done = self._send(outgoing)
            if self.closed:
                return
            if fd >= 0 and outgoing.fd < 0:
                os.close(fd)
            if not done:
                return
            self._outbox.popleft()
            if outgoing.left is not None and not outgoing.left.done():
                outgoing.left.set_result(None)
        self._loop.remove_writer(self._sock.fileno())

    # ---- reading ----

    def trust(self) -> None:
        """Accepts long messages from now on, because the sender is known."""
        self._is_trusted = True

    def pause(self) -> None:
        """Stops handing over messages until `resume`; the kernel then holds up the sender."""
        if not self._paused and not self.closed:
            self._paused = True
            self._loop.remove_reader(self._sock.fileno())

    def resume(self) -> None:
        """Hands over messages again after `pause`."""
        if self._paused and not self.closed:
            self._paused = False
            self._loop.add_reader(self._sock.fileno(), self._readable)
            self._loop.call_soon(self._parse)

    def take_descriptor(self) -> int:
        """Returns the next descriptor that arrived, which the caller must close.

        Raises:
            InvalidInput: No descriptor arrived.
        """
        if not self._descriptors:
            raise InvalidInput("segment", "no file descriptor came with it")
        return self._descriptors.popleft()

    def _readable(self) -> None:
        for _ in range(_READS_PER_TURN):
            if self.closed or self._paused:
                return
            room = len(self._buffer) - self._end
            if room == 0:  # paused with a full buffer; an empty read would look like the end
                return
            read = self._receive()
            if read < 0:
                return
            self._end += read
            self._parse()
            if read < room:
                return

    def _receive(self) -> int:
        try:
            with memoryview(self._buffer) as view, view[self._end :] as free:
                read, ancillary, flags, _ = self._sock.recvmsg_into([free], _ANCILLARY_BYTES)
        except (BlockingIOError, InterruptedError):
            return -1
        except OSError as error:
            self._lose(f"{error.strerror or error}")
            return -1
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
                self._descriptors.extend(fds)
        if flags & _TRUNCATED or len(self._descriptors) > _MAX_DESCRIPTORS:
            self._lose("too many file descriptors")
            return -1
        if read == 0:
            self._lose("the peer closed it")
            return -1
        return read

    def _parse(self) -> None:
        try:
            with memoryview(self._buffer) as view:
                needed = self._parse_view(view)
        except InvalidInput as error:
            refused("shm", error)
            self._lose(error.message)
            return
        if self.closed:
            return
        if self._start:
            remaining = self._end - self._start
            self._buffer[:remaining] = self._buffer[self._start : self._end]
            self._start, self._end = 0, remaining
        if self._is_trusted:
            needed = max(needed, _BUFFER_BYTES)
        if needed > len(self._buffer):
            self._buffer.extend(bytes(needed - len(self._buffer)))

    def _parse_view(self, view: memoryview) -> int:
        """Handles every complete message; returns the size of the incomplete one behind them."""
        while not (self.closed or self._paused):
            available = self._end - self._start
            if available < PREFIX_BYTES:
                return PREFIX_BYTES
            prefix = decode_prefix(view[self._start : self._end], self._max_payload_bytes)
            body = prefix.header_bytes
            if prefix.kind is MessageKind.FRAME:
                if prefix.payload_bytes > INLINE_BYTES:
                    raise InvalidInput("prefix.payload_bytes", "too large to lie in a message")
                body += prefix.payload_bytes
            if not self._is_trusted and PREFIX_BYTES + body > _FIRST_BUFFER_BYTES:
                raise InvalidInput("prefix.header_bytes", "too large before HELLO")
            if body > MAX_HEADER_BYTES + INLINE_BYTES:
                raise InvalidInput("prefix.header_bytes", "too large")
            if available < PREFIX_BYTES + body:
                return PREFIX_BYTES + body
            begin = self._start + PREFIX_BYTES
            self._start = begin + body
            self._on_message(prefix, view[begin : self._start])
        return 0

    # ---- the end ----

    def _lose(self, why: str) -> None:
        if not self.closed:
            error = lost("shm", why)
            self.close(error)
            self._on_lost(error)

    def close(self, error: PartitionLost) -> None:
        """Closes the socket and fails what has not left yet with `error`; idempotent."""
        if self.closed:
            return
        self.flush()  # as far as the kernel takes it; a failure calls this method again
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        self._sock.close()
        for fd in self._descriptors:
            os.close(fd)
        self._descriptors.clear()
        for outgoing in self._outbox:
            if outgoing.fd >= 0:
                with contextlib.suppress(OSError):
                    os.close(outgoing.fd)
            if outgoing.left is not None and not outgoing.left.done():
                outgoing.left.set_exception(error)
                outgoing.left.exception()  # nobody may be waiting for it
        self._outbox.clear()
