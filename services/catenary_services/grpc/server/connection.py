"""One connection of a server: it makes calls of streams."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import grpc

from catenary_services.errors import DeadlineExceeded
from catenary_services.grpc.server.call import Call, CallServer
from catenary_services.grpc.server.compression import ENCODINGS
from catenary_services.grpc.server.methods import ServedMethod
from catenary_services.grpc.server.request_head import RequestHead, head_of
from catenary_services.grpc.server.response_blocks import (
    HEAD_BLOCK,
    http_error_block,
    trailers_block,
)
from catenary_services.http2.connection import ServerConnection
from catenary_services.http2.frames import REFUSED_STREAM, StreamViolation
from catenary_services.http2.header_blocks import Headers
from catenary_services.http2.protocol import ConnectionProtocol
from catenary_services.http2.stream import ServerStream

if TYPE_CHECKING:
    from catenary_services.grpc.server.methods import MethodTable

_UNKNOWN = (grpc.StatusCode.UNIMPLEMENTED, "there is no such method here")


class ConnectionServer(CallServer, Protocol):
    """The part of a server that its connections use."""

    methods: MethodTable
    calls: int
    most_calls: int

    def call_left(self, source: str) -> None:
        """Learns that a call of a source is over; "" is the source of one that was not admitted."""
        ...


class CallConnection:
    """One connection, and the calls on it.

    Attributes:
        server: The server.
        loop: Its event loop.
        calls: The calls that are worked on, of which some may be over for the caller.
        unheard: Calls that are admitted and of whose message no byte has come.
    """

    def __init__(self, server: ConnectionServer, protocol: ConnectionProtocol[RequestHead]) -> None:
        self.server = server
        self.loop = asyncio.get_running_loop()
        self.calls: set[Call] = set()
        self.unheard: dict[Call, None] = {}
        self._protocol = protocol

    @property
    def http2(self) -> ServerConnection[RequestHead]:
        """The state of the connection."""
        return self._protocol.connection

    def parse(self, headers: Headers) -> RequestHead | StreamViolation:
        """Returns what the headers of a stream say."""
        return head_of(headers)

    def opened(self, stream: ServerStream, head: RequestHead, is_whole: bool) -> None:
        """Takes a new stream: answers it at once if it is no good, or begins a call."""
        sending, server = self.http2.sending, self.server
        if len(self.calls) >= server.limits.most_streams:
            # Their callers have gone, but they are still being ended.
            sending.reset(stream, REFUSED_STREAM)
            return
        if head.http_status != 200:
            sending.trailers(stream, http_error_block(head.http_status))
            return
        method = server.methods.find(head.path)
        refusal = self._refusal_of(head, method)
        if method is None or refusal is not None:
            sending.trailers(stream, HEAD_BLOCK + trailers_block(*(refusal or _UNKNOWN), ()))
            return
        call = Call(self, stream, head, method)
        stream.receiver = call
        self.calls.add(call)
        server.calls += 1
        call.start(is_whole)

    def _refusal_of(
        self, head: RequestHead, method: ServedMethod | None
    ) -> tuple[grpc.StatusCode, str] | None:
        server = self.server
        if head.size_bytes > server.limits.header_bytes:
            return grpc.StatusCode.RESOURCE_EXHAUSTED, "the metadata is too large"
        if head.wrong:
            return grpc.StatusCode.INTERNAL, f"the call has {head.wrong}"
        if method is None:
            return _UNKNOWN
        if head.encoding not in ENCODINGS:
            why = f"messages cannot be compressed by {head.encoding[:32]!r}"
            return grpc.StatusCode.UNIMPLEMENTED, why
        if server.calls >= server.most_calls:
            return grpc.StatusCode.RESOURCE_EXHAUSTED, "too many calls are worked on"
        return None

    def left(self, call: Call) -> None:
        """Forgets a call that is over and no longer worked on."""
        self.unheard.pop(call, None)
        if call in self.calls:
            self.calls.discard(call)
            self.server.call_left(call.source)

    def look(self, now_s: float) -> None:
        """Gives up calls whose message does not begin, and looks after the connection."""
        silence_s = self.server.budget.silence_s
        for call in list(self.unheard):
            if now_s - call.since_s > silence_s:
                why = "the message did not arrive in time"
                call.give_up(DeadlineExceeded(why, details={"stage": "arrival"}))
        self._protocol.look(now_s)

    def leave(self) -> None:
        """Takes no further calls."""
        self._protocol.leave()

    def tasks(self) -> list[asyncio.Task[None]]:
        """Returns what works on the calls."""
        return [call.task for call in self.calls if call.task is not None]

    def abort(self) -> None:
        """Closes the connection at once, whatever is still to be sent."""
        self._protocol.abort()

    def close(self) -> None:
        """Ends all calls and the connection."""
        for call in list(self.calls):
            call.stop()
        self._protocol.close()

    @cached_property
    def peer(self) -> str:
        """Address and port of the other side, as gRPC writes them."""
        host, port = self._protocol.peer
        host = host.removeprefix("::ffff:") if "." in host else host
        return f"ipv6:%5B{host}%5D:{port}" if ":" in host else f"ipv4:{host}:{port}"

    @cached_property
    def address(self) -> str:
        """The address of the other side, as gRPC writes it."""
        return self.peer.rpartition(":")[0]

    @cached_property
    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        """The facts that the handshake told of the other side, by gRPC's names."""
        transport = self._protocol.transport
        connection = None if transport is None else transport.get_extra_info("ssl_object")
        if connection is None:
            return {}
        told: dict[str, list[bytes]] = {"transport_security_type": [b"ssl"]}
        certificate = connection.getpeercert() or {}
        for kind, value in certificate.get("subjectAltName", ()):
            told.setdefault("x509_subject_alternative_name", []).append(value.encode())
            if kind == "URI" and value.startswith("spiffe://"):
                told.setdefault("peer_spiffe_id", []).append(value.encode())
        return told
