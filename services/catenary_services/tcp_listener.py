"""A listener for connections of peers, in which silent connections cost next to nothing.

A connection goes through three states. It *waits* until its first byte has arrived: a socket and
nothing else. Then it is *opening*: a bounded number at a time makes the TLS handshake and sends its
peer id, those of the least busy source first. Then it belongs to a peer, and this module has done
its part. Connections that are too many or too slow are dropped, the oldest of the busiest source
first.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from catenary_services.errors import Unauthenticated, Unavailable
from catenary_services.log import get_logger
from catenary_services.memory import give_back_soon

BACKLOG = 1024
ACCEPTED_AT_ONCE = 64
OPEN_S = 3.0
"""Seconds from the turn of a connection within which its peer must be known."""
_GRACE_S = 0.05
"""Seconds that a handshake may take, while others wait, if its source has more than an equal share
of the places. An honest peer nearby is faster."""
_LONG_GRACE_S = 0.5
"""Seconds that a handshake may take, while others wait, if its source has at most an equal share of
the places: a busy machine may need that long."""
_LOOK_S = 0.02
_TLS_HANDSHAKE = b"\x16"
_FULL_S = 0.2

_log = get_logger("catenary_services.transport")


@dataclass(frozen=True, slots=True)
class ListenerLimits:
    """Limits on connections whose peer is not known yet."""

    most_waiting: int = 512
    """The most connections that wait for their first byte or for their turn."""
    most_opening: int = 32
    """The most concurrent handshakes; each may take a quarter of a megabyte."""
    wait_s: float = 3.0
    """Seconds within which the first byte must arrive and the connection must have its turn."""


Address = tuple[socket.AddressFamily, str]
MakeProtocol = Callable[[Callable[[], None]], asyncio.BaseProtocol]
"""A factory of protocols. Its argument is a function that the protocol calls once its peer is
known, or once it is certain that there is none."""


@dataclass(eq=False, slots=True)
class _Connection:
    sock: socket.socket
    source: str
    since_s: float
    has_spoken: bool = False
    task: asyncio.Task[None] | None = None
    protocol: asyncio.BaseProtocol | None = None
    transport: asyncio.BaseTransport | None = None
    settled: asyncio.Event = field(default_factory=asyncio.Event)


class TcpListener:
    """Listens for connections from `start` to `close`."""

    def __init__(
        self,
        make: MakeProtocol,
        tls: ssl.SSLContext | None,
        first_byte: bytes | None = None,
        limits: ListenerLimits = ListenerLimits(),
        register: Callable[[asyncio.BaseTransport], object] | None = None,
    ) -> None:
        """Creates a listener that is not open yet.

        Args:
            make: Returns the protocol of a connection that has its turn.
            tls: Context of handshakes; None for connections without TLS.
            first_byte: Without TLS, the first byte of every peer; None for any.
            limits: How many connections there may be in each state, and for how long.
            register: Notes a connection after its handshake, as `WatchedFiles.register` does.
        """
        self._register = register
        self._make = make
        self._tls = tls
        self._first_byte = first_byte if tls is None else _TLS_HANDSHAKE
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._sockets: list[socket.socket] = []
        self._waiting: dict[socket.socket, _Connection] = {}
        self._opening: set[_Connection] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._dropped = 0

    async def start(self, host: str, port: int) -> int:
        """Listens, and returns the port; for port 0 a free one is chosen.

        Raises:
            Unavailable: The address is in use or does not belong to this machine.
        """
        kind, flags = socket.SOCK_STREAM, socket.AI_PASSIVE
        try:
            found = await self._loop.getaddrinfo(host or None, port, type=kind, flags=flags)
        except OSError as error:
            raise _cannot_listen(host, port, error) from error
        addresses = [(family, str(name)) for family, _, _, _, (name, *_) in found]
        bound = self.bind(host, port, addresses)
        self.listen()
        return bound

    def bind(self, host: str, port: int, addresses: Sequence[Address] = ()) -> int:
        """Takes the port, and returns it; for port 0 a free one is chosen.

        Args:
            host: The name or address to listen on.
            port: The port.
            addresses: Those of `host`; without any they are looked up, which may take a while.

        Raises:
            Unavailable: The address is in use or does not belong to this machine.
        """
        try:
            if not addresses:
                kind, flags = socket.SOCK_STREAM, socket.AI_PASSIVE
                found = socket.getaddrinfo(host or None, port, type=kind, flags=flags)
                addresses = [(family, str(name)) for family, _, _, _, (name, *_) in found]
            for family, name in dict.fromkeys(addresses):
                # All addresses of one name are listened on at the port that the first one got.
                chosen = self._sockets[0].getsockname()[1] if self._sockets else port
                # "::" stands for all addresses, unless IPv4 is listened on by itself.
                both = name == "::" and len(addresses) == 1 and socket.has_dualstack_ipv6()
                listening = socket.create_server(
                    (name, chosen), family=family, backlog=BACKLOG, dualstack_ipv6=both
                )
                listening.setblocking(False)
                self._sockets.append(listening)
        except OSError as error:
            self.close()
            raise _cannot_listen(host, port, error) from error
        return int(self._sockets[0].getsockname()[1])

    def listen(self) -> None:
        """Begins to take connections at the port."""
        for listening in self._sockets:
            self._loop.add_reader(listening.fileno(), self._accept, listening)

    def close(self) -> None:
        """Stops listening, and drops every connection whose peer is not known."""
        for listening in self._sockets:
            self._loop.remove_reader(listening.fileno())
            listening.close()
        self._sockets.clear()
        if self._timer is not None:
            self._timer.cancel()
        for connection in (*self._waiting.values(), *self._opening):
            self._drop(connection)

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                sock, address = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                break
            except OSError as error:  # no descriptors are left; wait until others are closed
                _log.error("accept_failed", error=str(error))
                self._loop.remove_reader(listening.fileno())
                self._loop.call_later(_FULL_S, self._accept_again, listening)
                return
            sock.setblocking(False)
            connection = _Connection(sock, str(address[0]), self._loop.time())
            if len(self._waiting) >= self._limits.most_waiting:
                self._drop(self._least_wanted(list(self._waiting.values())))
            self._waiting[sock] = connection
            self._loop.add_reader(sock.fileno(), self._spoke, connection)
        if self._timer is None and self._waiting:
            self._look_soon()

    def _accept_again(self, listening: socket.socket) -> None:
        if listening in self._sockets:
            self._loop.add_reader(listening.fileno(), self._accept, listening)

    def _spoke(self, connection: _Connection) -> None:
        """Handles the first byte of a connection, or its end."""
        self._loop.remove_reader(connection.sock.fileno())
        try:
            first = connection.sock.recv(1, socket.MSG_PEEK)
        except OSError:
            first = b""
        if not first or self._first_byte not in (None, first):
            self._drop(connection)
            return
        connection.has_spoken = True
        self._go_on()

    def _go_on(self) -> None:
        """Gives free places to connections whose first byte has arrived."""
        while ready := [each for each in self._waiting.values() if each.has_spoken]:
            busy = Counter(each.source for each in self._opening)
            # `min` takes the first of equals: of one source, the oldest. If more wait than there
            # are places, it takes the newest, because the oldest are dropped next, with any honest
            # peer among them.
            if len(ready) > self._limits.most_opening:
                ready.reverse()
            wanted = min(ready, key=lambda each: busy[each.source])
            if len(self._opening) >= self._limits.most_opening:
                busiest, count = busy.most_common(1)[0]
                if count < self._limits.most_opening // 2 or busy[wanted.source] >= count // 2:
                    return
                # One source has most of the places, and another waits.
                self._drop(self._least_wanted([e for e in self._opening if e.source == busiest]))
            self._open(wanted)

    def _open(self, connection: _Connection) -> None:
        del self._waiting[connection.sock]
        connection.since_s = self._loop.time()
        self._opening.add(connection)
        connection.task = self._loop.create_task(self._handshake(connection))
        if self._timer is None:
            self._look_soon()

    async def _handshake(self, connection: _Connection) -> None:
        limits = {} if self._tls is None else {"ssl_handshake_timeout": OPEN_S}
        try:
            async with asyncio.timeout(OPEN_S):
                connection.transport, _ = await self._loop.connect_accepted_socket(
                    lambda: self._protocol_of(connection),
                    connection.sock,
                    ssl=self._tls,
                    **limits,
                )
                if self._register is not None:
                    self._register(connection.transport)
                await connection.settled.wait()
        except (OSError, TimeoutError, asyncio.CancelledError, Unauthenticated):
            # Whether the peer failed or the wait here ended, the connection has no peer.
            self._abort(connection)
        finally:
            self._opening.discard(connection)
            self._go_on()

    def _protocol_of(self, connection: _Connection) -> asyncio.BaseProtocol:
        connection.protocol = self._make(connection.settled.set)
        return connection.protocol

    def _look_soon(self) -> None:
        self._timer = self._loop.call_later(_LOOK_S, self._look)

    def _look(self) -> None:
        """Drops connections that are late, and those that keep others waiting."""
        self._timer = None
        now_s = self._loop.time()
        for connection in list(self._waiting.values()):
            if now_s - connection.since_s > self._limits.wait_s:
                self._drop(connection)
        if len(self._opening) >= self._limits.most_opening:
            self._make_room(now_s)
        if self._dropped and not self._waiting:
            _log.warning("connections_dropped", count=self._dropped)
            self._dropped = 0
            give_back_soon()
        if self._waiting or self._opening:
            self._look_soon()

    def _make_room(self, now_s: float) -> None:
        ready = [each.source for each in self._waiting.values() if each.has_spoken]
        opening = list(self._opening)
        since = [(each.source, each.since_s) for each in opening]
        slow = [opening[at] for at in too_slow(since, ready, self._limits.most_opening, now_s)]
        for _ in range(min(len(ready), len(slow))):
            slowest = self._least_wanted(slow)
            slow.remove(slowest)
            self._drop(slowest)

    def _least_wanted(self, among: list[_Connection]) -> _Connection:
        """Returns the oldest connection of the source with the most, silent ones first."""
        counts = Counter(each.source for each in among)
        return min(among, key=lambda each: (-counts[each.source], each.has_spoken, each.since_s))

    def _drop(self, connection: _Connection) -> None:
        self._dropped += 1
        if connection.task is not None:
            self._opening.discard(connection)
            connection.task.cancel()
            return
        if self._waiting.pop(connection.sock, None) is not None:
            self._abort(connection)

    def _abort(self, connection: _Connection) -> None:
        if connection.transport is not None:
            # Transports of uvloop are of no class of asyncio's.
            getattr(connection.transport, "abort", connection.transport.close)()
        if connection.sock.fileno() >= 0 and connection.transport is None:
            with contextlib.suppress(ValueError, OSError):
                self._loop.remove_reader(connection.sock.fileno())
            connection.sock.close()
        if connection.protocol is not None and connection.transport is None:
            # uvloop forgets what it was about to hand over, and tells nobody who had it already.
            connection.protocol.connection_lost(None)


def _cannot_listen(host: str, port: int, error: OSError) -> Unavailable:
    return Unavailable(f"cannot listen on {host}:{port}: {error.strerror}")


def too_slow(
    opening: Sequence[tuple[str, float]], waiting: Sequence[str], places: int, now_s: float
) -> list[int]:
    """Returns the indices of handshakes that take longer than they may while others wait.

    Args:
        opening: Source and start of each handshake, in seconds.
        waiting: Sources of connections that wait for a place.
        places: The most concurrent handshakes.
        now_s: The time, on the same clock as `opening`.
    """
    counts = Counter(source for source, _ in opening)
    sources = counts.keys() | set(waiting)
    # With one source nobody else is disadvantaged; of many, each may have one.
    share = max(1.0, places / len(sources)) if len(sources) > 1 else 1.0
    return [
        at
        for at, (source, since_s) in enumerate(opening)
        if now_s - since_s > (_GRACE_S if counts[source] > share else _LONG_GRACE_S)
    ]
