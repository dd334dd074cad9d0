"""Limits on the memory of messages that are still arriving, per source and in all.

gRPC's core buffers a message until all of it is there, and does not tell how far it is. The kernel
does: every connection counts the bytes it received. A message that arrives at once costs nothing
here. Those that take longer are examined fifty times a second, and where they are too many or too
slow, the source that holds most is cut off first.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import time
from collections.abc import Callable
from types import TracebackType

from catenary_services.errors import CatenaryError, DeadlineExceeded, Overloaded, PayloadTooLarge
from catenary_services.log import get_logger
from catenary_services.memory import give_back_soon

LOOK_S = 0.02
"""Seconds between two looks; a message that arrives within this time is not examined."""
_IDLE_LOOK_S = 0.1
"""Seconds between two looks while only next messages of streams are awaited and nothing arrives."""
SILENCE_S = 10.0
"""A connection that sends no byte of an awaited message for so long is given up."""
LONGEST_S = 60.0
"""The longest time that one message may take."""
MOST_OF_ONE_SOURCE = 32 * 1024 * 1024
"""Bytes of unfinished messages that one source may hold at a port for clients. One message of any
accepted size is always allowed."""
_SLACK_BYTES = 256 * 1024
"""Bytes of headers and frames around messages, and of what a peer may send before it is asked."""
_FRAMING_BYTES = 128
"""Bytes of the call and the frames around a message. A smaller overhead earns no credit."""
_RETRY_NS = 1_000_000_000
_RECEIVED = struct.Struct("<Q")
_RECEIVED_AT = 128
"""Offset of `tcpi_bytes_received` in `struct tcp_info`."""

_log = get_logger("catenary_services.grpc")


class ArrivingMessage:
    """A message that is being waited for, for as long as its `with` block runs.

    Attributes:
        peer: Its connection, as gRPC names it.
        source: Who is charged for it: the name of a key, or an address.
        is_timed: False for streams, whose next message may come at any time.
        cut: The error that ended the waiting; None if nothing did.
    """

    __slots__ = ("_all", "cut", "is_timed", "most_bytes", "peer", "since_s", "source", "task")

    def __init__(
        self,
        every: set[ArrivingMessage],
        peer: str,
        source: str,
        most_bytes: int,
        is_timed: bool,
        task: asyncio.Task[object],
    ) -> None:
        self._all = every
        self.peer = peer
        self.source = source
        self.most_bytes = most_bytes
        self.is_timed = is_timed
        self.task = task
        self.since_s = time.monotonic()
        self.cut: CatenaryError | None = None

    def __enter__(self) -> ArrivingMessage:
        self._all.add(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._all.discard(self)
        if self.cut is None or not isinstance(error, asyncio.CancelledError):
            return
        if not self.task.uncancel():  # nobody else wants it cancelled
            raise self.cut from None


class _Connection:
    """The kernel's count of bytes received on a connection, since it was first awaited."""

    def __init__(self, peer: str) -> None:
        self._socket = _socket_of(peer)
        self._complete = self._received()
        """Bytes of messages that were handed over, as far as that is known."""
        self._awaited = 1
        self.held = 0
        self.moved_s = time.monotonic()

    def took(self, nbytes: int) -> None:
        """Notes that a message of `nbytes` bytes is complete."""
        if self._awaited <= 1:
            self._complete = self._received()  # the peer was not asked for more than a window yet
        else:
            self._complete += nbytes + _FRAMING_BYTES

    def look(self, now_s: float, awaited: list[ArrivingMessage]) -> None:
        """Updates `held`: the bytes that have arrived of the messages awaited now."""
        self._awaited = len(awaited)
        if self._socket is None:  # the kernel's count is unknown: assume the most allowed
            self.held = sum(each.most_bytes for each in awaited)
            return
        received = self._received()
        self._complete = min(self._complete, received)
        held = received - self._complete
        if held != self.held:
            self.held, self.moved_s = held, now_s

    def close(self) -> None:
        """Forgets the connection, which stays open."""
        if self._socket is not None:
            self._socket.close()

    def _received(self) -> int:
        if self._socket is None:
            return 0
        try:
            facts = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
            return int(_RECEIVED.unpack_from(facts, _RECEIVED_AT)[0])
        except (OSError, struct.error):
            return 0


class ReceivingMessages:
    """The messages that are arriving at one server, examined while they take long."""

    def __init__(
        self, most_bytes: int, silence_s: float = SILENCE_S, most_of_one: int | None = None
    ) -> None:
        """Bounds the bytes of messages that are not complete yet.

        Args:
            most_bytes: Bound of all together.
            silence_s: A connection that sends no byte for so long is given up.
            most_of_one: Bound of one source; None for half of all. One message is always allowed.
        """
        self._most_bytes = most_bytes
        self._most_of_one = most_bytes // 2 if most_of_one is None else most_of_one
        self._silence_s = silence_s
        self._arriving: set[ArrivingMessage] = set()
        self._connections: dict[str, _Connection] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._is_idle = False
        """True if the next look is far off, because nothing arrives."""

    @property
    def held(self) -> int:
        """Bytes of the messages that have been arriving for longer than `LOOK_S`."""
        return sum(connection.held for connection in self._connections.values())

    def awaiting(
        self, peer: str, source: str, most_bytes: int, *, is_timed: bool
    ) -> ArrivingMessage:
        """Returns a context that watches the arrival of one message while it is awaited.

        Raises at its end:
            Overloaded: Too much is held, and most of it by this source.
            DeadlineExceeded: The message came too slowly.
            PayloadTooLarge: More was sent than the message may have.
        """
        task = asyncio.current_task()
        assert task is not None
        if self._timer is None or (is_timed and self._is_idle):
            self._look_in(LOOK_S)
        return ArrivingMessage(self._arriving, peer, source, most_bytes, is_timed, task)

    def took(self, peer: str, size: Callable[[], int]) -> None:
        """Notes that a message of a connection is complete; `size` is called only if it matters."""
        connection = self._connections.get(peer)
        if connection is not None:
            connection.took(size())

    def _look_in(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._is_idle = seconds > LOOK_S
        self._timer = asyncio.get_running_loop().call_later(seconds, self._look)

    def _look(self) -> None:
        self._timer = None
        now_s = time.monotonic()
        awaited: dict[str, list[ArrivingMessage]] = {}
        for arriving in self._arriving:
            if arriving.cut is None:
                awaited.setdefault(arriving.peer, []).append(arriving)
        for peer in self._connections.keys() - awaited.keys():
            self._connections.pop(peer).close()
        slow: dict[str, list[ArrivingMessage]] = {}
        before = self.held
        for peer, all_of_peer in awaited.items():
            late = [each for each in all_of_peer if now_s - each.since_s >= LOOK_S / 2]
            connection = self._connections.get(peer)
            if connection is None and late:
                connection = self._connections[peer] = _Connection(peer)
            if connection is not None:
                connection.look(now_s, all_of_peer)
            if connection is not None and late:
                slow[peer] = late
                self._hold_to_limits(connection, all_of_peer, now_s)
        self._relieve(slow)
        if self._arriving:
            is_idle = self.held <= before and not any(each.is_timed for each in self._arriving)
            self._look_in(_IDLE_LOOK_S if is_idle else LOOK_S)

    def _hold_to_limits(
        self, connection: _Connection, waiting: list[ArrivingMessage], now_s: float
    ) -> None:
        if connection.held > sum(each.most_bytes for each in waiting) + _SLACK_BYTES:
            for each in waiting:
                _cut(each, PayloadTooLarge(f"a message has more than {each.most_bytes} bytes"))
            return
        for each in waiting:
            silent = now_s - max(connection.moved_s, each.since_s) > self._silence_s
            if each.is_timed and (silent or now_s - each.since_s > LONGEST_S):
                why = "the message did not arrive in time"
                _cut(each, DeadlineExceeded(why, details={"stage": "arrival"}))

    def _relieve(self, slow: dict[str, list[ArrivingMessage]]) -> None:
        """Cuts off the sources that hold most until the rest is below the bound."""
        held: dict[str, int] = {}
        of: dict[str, list[ArrivingMessage]] = {}
        for peer, waiting in slow.items():
            source = waiting[0].source
            held[source] = held.get(source, 0) + self._connections[peer].held
            of.setdefault(source, []).extend(waiting)
        total = sum(held.values())
        while held:
            most = max(held, key=lambda source: held[source])
            one_message = max(each.most_bytes for each in of[most]) + _SLACK_BYTES
            if total <= self._most_bytes and held[most] <= max(self._most_of_one, one_message):
                return
            why = "too much of unfinished messages is held"
            for each in of[most]:
                _cut(each, Overloaded(why, retry_after_ns=_RETRY_NS))
            _log.warning("messages_cut_off", source=most, bytes=held[most], count=len(of[most]))
            total -= held.pop(most)
            give_back_soon()


def _cut(arriving: ArrivingMessage, error: CatenaryError) -> None:
    if arriving.cut is None:
        arriving.cut = error
        arriving.task.cancel()


def _socket_of(peer: str) -> socket.socket | None:
    """Returns a duplicate of this process's socket to "ipv4:host:port"; None without one."""
    kind, _, rest = peer.partition(":")
    host, _, port = rest.rpartition(":")
    if kind not in ("ipv4", "ipv6") or not port.isdigit():
        return None
    wanted = (host.strip("[]").replace("%5B", "").replace("%5D", ""), int(port))
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError, ValueError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                found = socket.socket(fileno=os.dup(int(name)))
                address = _peer_of(found)
                if address == wanted:
                    return found
                found.close()
    return None


def _peer_of(found: socket.socket) -> tuple[str, int] | None:
    try:
        address = found.getpeername()
    except OSError:
        return None
    if not isinstance(address, tuple) or len(address) < 2:
        return None
    return str(address[0]).removeprefix("::ffff:"), int(address[1])
