"""A server of gRPC on one port, or several."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import grpc

from catenary_services.errors import Overloaded
from catenary_services.grpc.server.call_policy import CallAuthorizer
from catenary_services.grpc.server.connection import CallConnection
from catenary_services.grpc.server.methods import MethodTable
from catenary_services.grpc.server.receiving_budget import ReceivingBudget
from catenary_services.grpc.server.request_head import RequestHead
from catenary_services.http2.connection import StreamOpener
from catenary_services.http2.flood_limit import TurnBudget, TurnQueue
from catenary_services.http2.held_memory import LOOKED_FOR_AFTER, held_bytes, surplus
from catenary_services.http2.limits import ConnectionLimits
from catenary_services.http2.protocol import ConnectionProtocol
from catenary_services.log import get_logger
from catenary_services.memory import give_back_soon
from catenary_services.security.tls import ServerSecurity
from catenary_services.tcp_listener import ListenerLimits, TcpListener

MAX_CONNECTIONS = 8_192
"""The most connections to one server."""
MOST_CALLS = 1 << 20
"""The most concurrent calls of a server, where nothing else is set."""
MOST_CALLS_OF_ONE_SOURCE = 16_384
"""The most concurrent calls of one key, or address without one; each holds some kilobytes."""
_LOOK_S = 0.5
_RETRY_NS = 1_000_000_000
_FLUSH_S = 0.2
"""Seconds within which a peer must take the last answers when the server stops."""
_LISTENER_LIMITS = ListenerLimits(most_waiting=2_048, most_opening=128, wait_s=10.0)
_FIRST_BYTE = b"P"
"""The beginning of all that clients of HTTP/2 send."""

_log = get_logger("catenary_services.grpc")


class GrpcServer:
    """A server, to which servicers are added before it starts.

    Attributes:
        call_authorizer: Decides which calls are admitted.
        methods: What is served.
        budget: The room for messages that are arriving.
        limits: What a peer may do.
        longest_answer: The longest message in bytes that is sent.
        most_calls: The most concurrent calls.
        most_connections: The most connections.
        calls: The number of calls that are worked on.
        turn_budget: The work that all connections may do in one turn of the event loop.
    """

    def __init__(  # noqa: PLR0913
        self,
        call_authorizer: CallAuthorizer,
        methods: MethodTable,
        budget: ReceivingBudget,
        limits: ConnectionLimits,
        *,
        longest_answer: int,
        most_calls: int = MOST_CALLS,
        most_connections: int = MAX_CONNECTIONS,
    ) -> None:
        """Creates a server without ports."""
        self.call_authorizer = call_authorizer
        self.methods = methods
        self.budget = budget
        self.limits = limits
        self.longest_answer = longest_answer
        self.most_calls = most_calls
        self.calls = 0
        self.most_connections = most_connections
        self._calls_of: dict[str, int] = {}
        self.turn_budget = TurnBudget(_at_next_turn)
        self._turns: TurnQueue[ConnectionProtocol[RequestHead]] = TurnQueue()
        self._is_turning = False
        self._begun_bytes = 0
        self._connections: dict[CallConnection, None] = {}
        self._listeners: list[TcpListener] = []
        self._refused = 0
        self._timer: asyncio.TimerHandle | None = None
        self._ended = asyncio.Event()
        self._moved = asyncio.Event()

    @property
    def connections(self) -> int:
        """The number of connections."""
        return len(self._connections)

    def add(self, servicer: object, register: Callable[[Any, Any], None]) -> None:
        """Adds a servicer by the function that was generated for its service."""
        register(servicer, self)

    def add_generic_rpc_handlers(self, handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        """Adds the handlers of a service."""
        self.methods.add(handlers)

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """Does nothing: generated code adds the same as generic handlers."""

    def bind(self, host: str, port: int, security: ServerSecurity) -> int:
        """Takes a port, and returns it; for port 0 a free one is chosen.

        Raises:
            Unavailable: The address is in use or does not belong to this machine.
            InvalidInput: The files of certificates are not good.
        """
        listener = TcpListener(
            self._connected,
            security.ssl_context("h2"),
            _FIRST_BYTE,
            _LISTENER_LIMITS,
            security.register,
        )
        bound = listener.bind(host, port)
        self._listeners.append(listener)
        return bound

    async def start(self) -> None:
        """Begins to take connections."""
        for listener in self._listeners:
            listener.listen()
        self._look()

    async def stop(self, grace: float | None = None) -> None:
        """Takes no further calls, and ends those that are not over within `grace` seconds.

        Idempotent.
        """
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()
        for connection in list(self._connections):
            connection.leave()
        await self._until(lambda: not self.calls, grace or 0.0)
        tasks = [task for each in self._connections for task in each.tasks()]
        for connection in list(self._connections):
            connection.close()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._until(lambda: not self._connections, _FLUSH_S)
        for connection in list(self._connections):
            connection.abort()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._ended.set()

    def calls_of(self, source: str) -> int:
        """Returns the number of admitted calls of a source."""
        return self._calls_of.get(source, 0)

    def call_admitted(self, source: str) -> None:
        """Counts an admitted call of a source.

        Raises:
            Overloaded: The source has too many.
        """
        count = self._calls_of.get(source, 0)
        if count >= MOST_CALLS_OF_ONE_SOURCE:
            why = "too many calls of this caller are worked on"
            raise Overloaded(why, retry_after_ns=_RETRY_NS)
        self._calls_of[source] = count + 1

    def call_left(self, source: str) -> None:
        """Learns that a call of a source is over; "" is the source of one that was not admitted."""
        self.calls -= 1
        if source:
            left = self._calls_of[source] - 1
            if left:
                self._calls_of[source] = left
            else:
                del self._calls_of[source]
        self._moved.set()

    async def _until(self, is_reached: Callable[[], bool], seconds: float) -> None:
        """Waits until something holds of the calls or the connections, or the time is up."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not is_reached():
                    self._moved.clear()
                    await self._moved.wait()

    async def wait_for_termination(self) -> None:
        """Waits until the server was stopped."""
        await self._ended.wait()

    # ---- connections ----

    def open(self, connection: ConnectionProtocol[RequestHead]) -> CallConnection:
        """Returns who takes the calls of a connection."""
        return CallConnection(self, connection)

    def made(self, opener: StreamOpener[RequestHead]) -> None:
        """Counts a connection."""
        assert isinstance(opener, CallConnection)
        self._connections[opener] = None

    def lost(
        self, connection: ConnectionProtocol[RequestHead], opener: StreamOpener[RequestHead]
    ) -> None:
        """Forgets a connection."""
        assert isinstance(opener, CallConnection)
        self._connections.pop(opener, None)
        self._turns.drop(connection.peer[0], connection)
        self._moved.set()

    def wait_for_turn(self, connection: ConnectionProtocol[RequestHead]) -> None:
        """Has a connection with much to be read go on after others.

        Of all such connections one goes on in each turn of the event loop, so that callers with
        thousands of calls, or long headers, on many connections delay the others' single ones by
        little.
        """
        self._turns.add(connection.peer[0], connection)
        self._take_turns_soon()

    def begun(self, nbytes: int) -> None:
        """Looks for those who hold most once much was begun, and not only when it is time."""
        self._begun_bytes += nbytes
        if self._begun_bytes > LOOKED_FOR_AFTER:
            self._begun_bytes = 0
            loop = asyncio.get_running_loop()
            loop.call_soon(self._end_largest, loop.time())

    def _take_turns_soon(self) -> None:
        if self._turns and not self._is_turning:
            self._is_turning = True
            asyncio.get_running_loop().call_soon(self._take_turns)

    def _take_turns(self) -> None:
        self._is_turning = False
        if self._turns:
            self._turns.take().take_turn()
        self._take_turns_soon()

    def _connected(self, settled: Callable[[], None]) -> asyncio.BaseProtocol:
        if len(self._connections) >= self.most_connections:
            settled()
            self._refused += 1
            return _Refusal()
        protocol: ConnectionProtocol[RequestHead] = ConnectionProtocol(self, self.limits, settled)
        return protocol

    def _look(self) -> None:
        """Looks after everything that may take too long."""
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(_LOOK_S, self._look)  # whatever happens now
        now_s = loop.time()
        for connection in list(self._connections):
            connection.look(now_s)
        self.budget.look(now_s)
        self._end_largest(now_s)
        if self._refused:
            refused, self._refused = self._refused, 0
            _log.warning("connections_dropped", count=refused, most=self.most_connections)

    def _end_largest(self, now_s: float) -> None:
        """Ends the connections of those who make the server hold too much."""
        connections = list(self._connections)
        ended = surplus([(each.address, held_bytes(each.http2, now_s)) for each in connections])
        for at in ended:
            connections[at].abort()
        if ended:
            source = connections[ended[0]].address
            _log.warning("connections_held_too_much", count=len(ended), source=source)
            give_back_soon()


def _at_next_turn(begun: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_soon(begun)


class _Refusal(asyncio.Protocol):
    """The protocol of a connection too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).abort()
