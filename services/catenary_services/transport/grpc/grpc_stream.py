"""Frames over one gRPC stream, for networks where only a gRPC port is open.

Messages are raw bytes, never protobuf: the first of a frame is prefix, header and the beginning of
the payload, the following ones are the rest, 1 MiB each (faster than one large message). The
receiver reports how many bytes it has taken, and the sender keeps at most `_WINDOW_BYTES` ahead of
that, so that neither side's gRPC buffers more, whatever the frame's size.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import grpc
import grpc.aio

from catenary_services.addresses import host_port
from catenary_services.errors import (
    InvalidInput,
    OverloadError,
    PartitionLost,
    PayloadTooLarge,
    PermissionDenied,
    Unauthenticated,
)
from catenary_services.grpc.grpc_kit import bind, create_server
from catenary_services.grpc.server.call_policy import CallPolicy
from catenary_services.grpc.server.server import GrpcServer
from catenary_services.http2.limits import ConnectionLimits
from catenary_services.security.identity import peer_identity
from catenary_services.security.roles import RoleAuthorizer
from catenary_services.transport.exchange import (
    EMPTY,
    HANDSHAKE_S,
    MEMORY_WAIT_S,
    MemoryFrame,
    deliver,
    introduction,
    lost,
    refused,
    sender_of,
)
from catenary_services.transport.frames import (
    PREFIX_BYTES,
    MessageKind,
    MessagePrefix,
    decode_prefix,
    encode_prefix,
)
from catenary_services.transport.grpc.grpc_link import (
    CAPABILITIES,
    CHUNK_BYTES,
    METHOD,
    SERVICE,
    GrpcLink,
)
from catenary_services.transport.interface import NOBODY, EndpointAddress, FrameHandler, Link
from catenary_services.transport.memory import MemoryPool, MemoryShare, private_segment
from catenary_services.transport.settings import TransportSettings, host_id

Stream = grpc.aio.ServicerContext[bytes, bytes]

_CREDIT_EVERY_BYTES = 1 << 20
_MAX_CONNECTIONS = 1024
STALLED_S = 30.0
"""A frame of which nothing arrives for so long is given up together with its connection."""
_LIMITS = ConnectionLimits(
    most_streams=4,
    # A sender may send ahead one chunk before it is known, and later what is asked for.
    first_window=CHUNK_BYTES,
    ping_after_s=5.0,
    ping_answer_s=3.0,
    ping_every_s=1.0,
)


class GrpcEndpoint:
    """One process's side of the gRPC transport."""

    def __init__(self, peer_id: str, settings: TransportSettings) -> None:
        self._peer_id = peer_id
        self._settings = settings
        self._send_pool = MemoryPool(settings.send_bytes, private_segment)
        self._receive_pool = MemoryPool(settings.receive_bytes, private_segment)
        self._server: GrpcServer | None = None
        self._port = 0
        self._handler: FrameHandler | None = None
        self._links: set[GrpcLink] = set()
        self._receivers = 0

    @property
    def address(self) -> EndpointAddress:
        return EndpointAddress(
            "grpc", host_port(self._settings.reachable_host, self._port), host_id()
        )

    async def start(self, handler: FrameHandler) -> None:
        self._handler = handler
        security = self._settings.security.server
        authorizer = RoleAuthorizer(security.cluster, insecure=security.insecure)
        receive_bytes = self._settings.receive_bytes
        server = create_server(
            security,
            authorizer=authorizer,
            call_policy=CallPolicy(
                usual_bytes=4 * CHUNK_BYTES,
                receiving_bytes=receive_bytes,
                receiving_bytes_of_one=receive_bytes // 2,
            ),
            max_message_bytes=CHUNK_BYTES,
            limits=_LIMITS,
        )
        frames: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(
            self._serve
        )
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, {METHOD: frames}),)
        )
        self._port = bind(server, self._settings.host, self._settings.grpc_port, security)
        await server.start()
        self._server = server

    async def _serve(self, _: object, context: Stream) -> None:
        assert self._handler is not None
        if self._receivers >= _MAX_CONNECTIONS:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many peers")
        self._receivers += 1
        receiver = GrpcReceiver(
            self._peer_id, self._settings, self._handler, context, MemoryShare(self._receive_pool)
        )
        try:
            await receiver.run()
        except InvalidInput as error:
            refused("grpc", error)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, error.message)
        except (PermissionDenied, Unauthenticated) as error:
            refused("grpc", error)
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, error.message)
        except OverloadError as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, error.message)
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the peer fell silent")
        finally:
            self._receivers -= 1
            receiver.close()

    async def connect(
        self, address: EndpointAddress, timeout_s: float, peer_id: str | None = None
    ) -> Link:
        """Opens a link to the endpoint at `address`.

        Raises:
            PartitionLost: Nobody answers within `timeout_s`, or another peer does.
        """
        target = (address.address, peer_id)
        link = GrpcLink(target, self._send_pool, self._settings, self._links.discard)
        self._links.add(link)
        try:
            async with asyncio.timeout(timeout_s):
                await link.introduce(self._peer_id)
        except BaseException as error:
            await link.close()
            if isinstance(error, TimeoutError):
                raise lost("grpc", f"{address.address}: no answer in time") from error
            raise
        return link

    async def close(self) -> None:
        for link in tuple(self._links):
            await link.close()
        server, self._server = self._server, None
        if server is not None:
            await server.stop(grace=0)


class GrpcReceiver:
    """One connected sender."""

    def __init__(
        self,
        peer_id: str,
        settings: TransportSettings,
        handler: FrameHandler,
        context: Stream,
        share: MemoryShare,
    ) -> None:
        self._peer_id = peer_id
        self._settings = settings
        self._handler = handler
        self._context = context
        self._share = share
        self._sender = NOBODY
        self._unreleased = 0
        self._room = asyncio.Event()
        self._room.set()
        self._taken = 0
        self._credited = 0

    async def run(self) -> None:
        """Reads frames until the sender ends the stream."""
        async with asyncio.timeout(HANDSHAKE_S):
            hello = await self._read()
        if hello is None:
            return
        prefix = decode_prefix(hello, 0)
        if prefix.kind is not MessageKind.HELLO:
            raise InvalidInput("prefix.kind", f"{prefix.kind.name} before HELLO")
        self._sender = sender_of(
            hello[PREFIX_BYTES:],
            self._settings.security.server,
            lambda: peer_identity(self._context),
        )
        await self._context.write(introduction(MessageKind.WELCOME, self._peer_id))
        while (message := await self._read()) is not None:
            if not await self._receive(message):
                return
            if not self._room.is_set():
                async with asyncio.timeout(MEMORY_WAIT_S):
                    await self._room.wait()

    async def _read(self) -> bytes | None:
        message = await self._context.read()
        return message if isinstance(message, bytes) else None

    async def _receive(self, message: bytes) -> bool:
        """Receives the frame that begins with `message`; False if the sender ended within it."""
        prefix = decode_prefix(message, self._settings.max_frame_bytes)
        begin = PREFIX_BYTES + prefix.header_bytes
        if prefix.kind is not MessageKind.FRAME:
            raise InvalidInput("prefix.kind", f"unexpected {prefix.kind.name}")
        if self._sender.is_refused:
            raise PermissionDenied(f"{self._sender.name} is in no directory")
        if len(message) < begin or len(message) - begin > prefix.payload_bytes:
            raise InvalidInput("prefix", "does not describe its message")
        header = message[PREFIX_BYTES:begin]
        await self._take(len(message))
        if prefix.payload_bytes == 0:
            self._hand_over(header, EMPTY, _nothing)
            return True
        try:
            block = await self._share.acquire(prefix.payload_bytes, MEMORY_WAIT_S)
        except PayloadTooLarge as error:
            raise InvalidInput("prefix.payload_bytes", error.message) from error
        release = partial(self._share.release, block)
        payload = block.view(prefix.payload_bytes)
        try:
            complete = await self._fill(payload, memoryview(message)[begin:])
        except BaseException:
            release()
            raise
        if complete:
            self._hand_over(header, payload.toreadonly(), release)
        else:
            release()
        return complete

    async def _fill(self, payload: memoryview, first: memoryview) -> bool:
        filled = len(first)
        payload[:filled] = first
        while filled < len(payload):
            async with asyncio.timeout(STALLED_S):
                message = await self._read()
            if message is None:
                return False
            if not 0 < len(message) <= len(payload) - filled:
                raise InvalidInput("payload", "is longer than announced")
            payload[filled : filled + len(message)] = message
            filled += len(message)
            await self._take(len(message))
        return True

    async def _take(self, nbytes: int) -> None:
        self._taken += nbytes
        if self._taken - self._credited >= _CREDIT_EVERY_BYTES:
            self._credited = self._taken
            await self._context.write(
                encode_prefix(MessagePrefix(MessageKind.CREDIT, argument=self._taken))
            )

    def _hand_over(self, header: bytes, payload: memoryview, release: Callable[[], None]) -> None:
        self._unreleased += 1
        if self._unreleased >= self._settings.max_unreleased_frames:
            self._room.clear()
        done = partial(self._released, release)
        frame = MemoryFrame(header, payload, CAPABILITIES, done, self._sender)
        deliver(self._handler, frame)

    def _released(self, release: Callable[[], None]) -> None:
        release()
        self._unreleased -= 1
        if self._unreleased < self._settings.max_unreleased_frames:
            self._room.set()

    def close(self) -> None:
        """Gives the memory back; frames that were handed over stay readable."""
        self._share.close(PartitionLost("the connection ended"))


def _nothing() -> None:
    """Releases an empty payload, which holds nothing."""
