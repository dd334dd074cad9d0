"""Frames over TCP, for two machines (or two containers that share no folder).

A frame is a 32-byte prefix, the header and the raw payload. The payload is written from the slot
to the socket and read from the socket into a pooled buffer: no copy but the kernel's two.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from catenary_services.addresses import host_port
from catenary_services.errors import CatenaryError, InvalidInput, PartitionLost
from catenary_services.security.identity import identity_of_socket
from catenary_services.tcp_listener import TcpListener
from catenary_services.transport.acknowledgements import LinkState, Lost
from catenary_services.transport.exchange import (
    MemoryFrame,
    check_receiver,
    deliver,
    introduction,
    lost,
    push_timed_out,
    refused,
    sender_of,
)
from catenary_services.transport.frames import MessageKind, MessagePrefix, encode_prefix
from catenary_services.transport.interface import (
    Capabilities,
    EndpointAddress,
    FrameHandler,
    FrameSender,
    Slot,
)
from catenary_services.transport.memory import MemoryPool, MemoryShare, private_segment
from catenary_services.transport.memory_link import StreamLink
from catenary_services.transport.settings import TransportSettings, host_id
from catenary_services.transport.tcp.tcp_stream import FRAME_KINDS, TcpStream

_CAPABILITIES = Capabilities(transport="tcp", same_host=False)
_MAX_CONNECTIONS = 1024


@dataclass(frozen=True, slots=True)
class Extension:
    """Messages that another transport exchanges over these connections, beside frames."""

    capabilities: Capabilities
    """Properties of the other transport's links, which frames that come this way have, too."""
    kinds: frozenset[MessageKind]
    """The kinds of its messages. They carry no payload."""
    received: Callable[[TcpReceiver, MessagePrefix, bytes], None]
    """A function that is given a message of a sender: prefix and header. It may raise
    `InvalidInput`, which ends the connection."""
    ended: Callable[[TcpReceiver], None]
    """A function that is told that the connection to a sender ended."""


class TcpEndpoint:
    """One process's side of the TCP transport."""

    def __init__(
        self, peer_id: str, settings: TransportSettings, extension: Extension | None = None
    ) -> None:
        self._peer_id = peer_id
        self._settings = settings
        self._extension = extension
        self._send_pool = MemoryPool(settings.send_bytes, private_segment)
        self._receive_pool = MemoryPool(settings.receive_bytes, private_segment)
        self._listener: TcpListener | None = None
        self._port = 0
        self._server_context = settings.security.server.ssl_context()
        settings.security.client.ssl_context()  # reports bad files now
        self._links: set[TcpLink] = set()
        self._receivers: set[TcpReceiver] = set()

    @property
    def address(self) -> EndpointAddress:
        return EndpointAddress(
            "tcp", host_port(self._settings.reachable_host, self._port), host_id()
        )

    async def start(self, handler: FrameHandler) -> None:
        def accepted(settled: Callable[[], None]) -> TcpStream:
            share = partial(MemoryShare, self._receive_pool)
            receiver = TcpReceiver(
                self._peer_id, self._settings, handler, share, settled, self._extension
            )
            receiver.on_known = self._known
            return receiver.stream

        register = self._settings.security.server.register
        self._listener = TcpListener(
            accepted, self._server_context, first_byte=b"C", register=register
        )
        self._port = await self._listener.start(self._settings.host, self._settings.tcp_port)

    def _known(self, receiver: TcpReceiver) -> None:
        """Takes a connection over from the listener, which handles those of unknown peers."""
        if len(self._receivers) >= _MAX_CONNECTIONS:
            receiver.close(lost("tcp", "too many connections"))
        else:
            self._receivers.add(receiver)
            receiver.on_closed = self._ended

    def _ended(self, receiver: TcpReceiver) -> None:
        self._receivers.discard(receiver)
        if self._extension is not None:
            self._extension.ended(receiver)

    async def connect(
        self, address: EndpointAddress, timeout_s: float, peer_id: str | None = None
    ) -> TcpLink:
        """Opens a link to the endpoint at `address`.

        Raises:
            PartitionLost: Nobody answers within `timeout_s`, or another peer does.
        """
        host, _, port = address.address.rpartition(":")
        link = TcpLink(self._send_pool, self._settings, self._links.discard, self._extension)
        self._links.add(link)
        try:
            async with asyncio.timeout(timeout_s):
                transport, _ = await asyncio.get_running_loop().create_connection(
                    lambda: link.stream,
                    host.strip("[]"),
                    int(port),
                    ssl=self._settings.security.client.peer_context(),
                    # The peer is recognised by the identity in its certificate, not by a host name.
                    server_hostname=None if self._settings.security.client.insecure else "",
                )
                self._settings.security.client.register(transport)
                await link.introduce(self._peer_id, timeout_s)
                link.check_peer(peer_id)
        except BaseException as error:
            await link.close()
            if isinstance(error, CatenaryError) and not isinstance(error, PartitionLost):
                raise lost("tcp", f"{address.address}: {error.message}") from error
            if isinstance(error, OSError | TimeoutError | ValueError):
                raise lost("tcp", f"{address.address}: {error}") from error
            raise
        return link

    async def close(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()
        for receiver in tuple(self._receivers):
            receiver.close(PartitionLost("this process is closing"))
        for link in tuple(self._links):
            await link.close()


class TcpReceiver:
    """One connected sender."""

    def __init__(
        self,
        peer_id: str,
        settings: TransportSettings,
        handler: FrameHandler,
        make_share: Callable[[], MemoryShare],
        settled: Callable[[], None],
        extension: Extension | None,
    ) -> None:
        self._settled = settled
        self._extension = extension
        self._capabilities = _CAPABILITIES if extension is None else extension.capabilities
        self._peer_id = peer_id
        self._limit = settings.max_unreleased_frames
        self._handler = handler
        self._security = settings.security.server
        self._unreleased = 0
        self._sender: FrameSender | None = None
        """The peer at the other end, once it has given its id."""
        self.on_known: Callable[[TcpReceiver], None] = lambda _: None
        self.on_closed: Callable[[TcpReceiver], None] = lambda _: None
        self.stream = TcpStream(
            settings.max_frame_bytes,
            self._on_frame,
            self._on_lost,
            secure=not settings.security.server.insecure,
            make_share=make_share,
            kinds=_kinds_with(extension),
        )

    def _on_frame(
        self, prefix: MessagePrefix, header: bytes, payload: memoryview, release: Callable[[], None]
    ) -> None:
        sender = self._sender
        if sender is not None and sender.is_refused:
            release()
            self.close(lost("tcp", f"{sender.name} is in no directory"))
        elif prefix.kind is MessageKind.FRAME and sender is not None:
            self.hand_over(header, payload, release)
        elif prefix.kind is MessageKind.HELLO and sender is None:
            self._greet(header)
        elif sender is not None and self._extension and prefix.kind in self._extension.kinds:
            self._extension.received(self, prefix, header)
        else:
            release()
            error = InvalidInput("prefix.kind", f"unexpected {prefix.kind.name}")
            refused("tcp", error)
            self.close(lost("tcp", error.message))

    def hand_over(self, header: bytes, payload: memoryview, release: Callable[[], None]) -> None:
        """Hands a frame of the sender, who is known, to the handler of this process."""
        assert self._sender is not None
        self._unreleased += 1
        if self._unreleased >= self._limit:
            self.stream.hold_up()
        frame = MemoryFrame(
            header, payload, self._capabilities, partial(self._released, release), self._sender
        )
        deliver(self._handler, frame)

    def _greet(self, header: bytes) -> None:
        try:
            self._sender = sender_of(
                header, self._security, lambda: identity_of_socket(self.stream.ssl_object)
            )
        except CatenaryError as error:
            refused("tcp", error)
            self.close(lost("tcp", error.message))
            return
        self.stream.trust()
        self._settled()
        self.on_known(self)
        if self.stream.closed:
            return
        self.stream.write(introduction(MessageKind.WELCOME, self._peer_id))

    def _released(self, release: Callable[[], None]) -> None:
        release()
        self._unreleased -= 1
        if self._unreleased < self._limit:
            self.stream.go_on()

    def _on_lost(self, _: PartitionLost) -> None:
        self._settled()
        self.on_closed(self)

    def close(self, error: PartitionLost) -> None:
        """Ends the connection; frames that were handed over stay readable. Idempotent."""
        self.stream.close(error)


class TcpLink(StreamLink):
    """A TCP connection to one peer, for sending."""

    def __init__(
        self,
        pool: MemoryPool,
        settings: TransportSettings,
        on_closed: Callable[[TcpLink], None],
        extension: Extension | None = None,
    ) -> None:
        super().__init__(_CAPABILITIES, MemoryShare(pool), settings)
        self._on_closed = on_closed
        self.on_message: Callable[[MessagePrefix, bytes], None] | None = None
        """A function that gets the receiver's further messages; without it none may come."""
        self.on_lost: Callable[[PartitionLost], None] | None = None
        """A function that is told that the connection ended."""
        self.stream = TcpStream(
            settings.max_frame_bytes,
            self._on_frame,
            self._on_lost,
            secure=not settings.security.client.insecure,
            make_share=None,
            kinds=_kinds_with(extension),
        )

    async def introduce(self, peer_id: str, timeout_s: float) -> None:
        """Sends this process's peer id and waits for the answer."""
        self.stream.write(introduction(MessageKind.HELLO, peer_id))
        await self._welcomed(timeout_s)

    def check_peer(self, peer_id: str | None) -> None:
        """Checks that the certificate names `peer_id`, or without one the peer id in the answer.

        Raises:
            Unauthenticated: The certificate names no identity of this system.
            PermissionDenied: The certificate names another peer.
        """
        security = self._settings.security.client
        check_receiver(security, self.stream.ssl_object, peer_id or self.peer_id)

    def _on_frame(
        self, prefix: MessagePrefix, header: bytes, payload: memoryview, release: Callable[[], None]
    ) -> None:
        if self.on_message is not None and prefix.kind is not MessageKind.WELCOME:
            self.on_message(prefix, header)
        elif not self._is_welcome(prefix, header):
            self.stream.close(lost("tcp", f"unexpected {prefix.kind.name}"))

    async def push(
        self, slot: Slot, header: bytes, timeout_s: float, lost_frame: Lost | None = None
    ) -> None:
        """Delivers slot and header; see `Link.push`."""
        owned = self._pushed(slot, header)
        head = (
            encode_prefix(MessagePrefix(MessageKind.FRAME, len(header), len(owned.view))) + header
        )
        try:
            await self.stream.send(head, owned.view, owned.give_back, timeout_s, lost_frame)
        except TimeoutError:
            self.stream.close(lost("tcp", "the peer takes no frames"))
            raise push_timed_out("tcp", timeout_s) from None
        self._check_open()

    def transit(self) -> LinkState | None:
        """Returns what is on its way to the peer; None once the link is closed."""
        return None if self.stream.closed else self.stream.transit()

    async def close(self) -> None:
        """Closes the link and takes back every slot."""
        self.stream.close(PartitionLost("the link was closed"))

    def _on_lost(self, error: PartitionLost) -> None:
        self._error = error
        self._share.close(error)
        self._fail_welcome(error)
        self._on_closed(self)
        if self.on_lost is not None:
            self.on_lost(error)


def _kinds_with(extension: Extension | None) -> frozenset[MessageKind]:
    return FRAME_KINDS if extension is None else FRAME_KINDS | extension.kinds
