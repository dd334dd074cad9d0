"""The one-sided transport interface: `export, push, recv, release, capabilities`.

A process has one *endpoint* per transport. Towards each peer it opens a *link*. To send, it
`export`s a slot of the link (memory the transport can deliver from, ideally without another copy),
fills it in place, and `push`es it with a header. On the other side the endpoint hands the frame to
its handler (`recv`); the frame's payload stays valid until it is `release`d.

Slots are leased: those that a dead peer held are returned when its connection breaks or the lease
expires. Everything here runs on one event loop, except that any thread may fill and read slots.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from catenary_services.security.identity import Role
from catenary_services.transport.acknowledgements import LinkState, Lost


@dataclass(frozen=True, slots=True)
class EndpointAddress:
    """An address at which an endpoint can be reached. It mirrors `catenary.v1.TransportAddress`."""

    transport: str
    address: str
    host_id: str


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Properties of a link, for choosing between links."""

    transport: str
    same_host: bool


@dataclass(slots=True)
class FrameSender:
    """The peer at the other end of a connection over which frames arrive.

    Each connection has a sender of its own, even if several come from one peer.
    """

    name: str
    """The peer id it gave; with TLS, that of its certificate. Empty for frames of this process."""
    role: Role | None = None
    """The role in its certificate. None without TLS, and over shared memory, where the kernel says
    that it is a process of this process's user."""
    is_refused: bool = field(default=False, compare=False)
    """True if it may not send: the connection is closed at its next frame."""


NOBODY = FrameSender("")
"""The sender of frames that came over no connection."""


class Slot(Protocol):
    """Memory to fill before a push. Unused slots are given back with `release`."""

    @property
    def view(self) -> memoryview:
        """Writable bytes, exactly as many as were exported, 64-byte aligned."""
        ...

    def release(self) -> None:
        """Gives the slot back without pushing it. Idempotent; no effect after a push."""
        ...


class ReceivedFrame(Protocol):
    """A frame that arrived. Its payload is valid until `release`."""

    @property
    def header(self) -> bytes:
        """Header bytes that the sender pushed (a serialized `catenary.v1.FrameHeader`)."""
        ...

    @property
    def payload(self) -> memoryview:
        """Read-only tensor bytes, 64-byte aligned; empty if none were sent."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """Properties of the link over which it arrived."""
        ...

    @property
    def sender(self) -> FrameSender:
        """The peer that sent it."""
        ...

    def release(self) -> None:
        """Gives the memory back to its owner; idempotent."""
        ...


FrameHandler = Callable[[ReceivedFrame], None]
"""A function called on the event loop for every frame. It must not block, and it or a later step
must release the frame."""


class Link(Protocol):
    """A connection to one peer, for sending."""

    @property
    def capabilities(self) -> Capabilities:
        """Properties of this link."""
        ...

    @property
    def closed(self) -> bool:
        """True once the peer is gone; every further call raises `PartitionLost`."""
        ...

    def try_export(self, nbytes: int) -> Slot | None:
        """Returns a slot as `export` does, or None where that would wait for memory."""
        ...

    def try_push(self, slot: Slot, header: bytes) -> bool:
        """Delivers slot and header as `push` does, or returns False where that might wait.

        In that case nothing was sent, and the slot is as it was.

        Raises:
            PartitionLost: The peer is gone.
        """
        ...

    async def export(self, nbytes: int, timeout_s: float) -> Slot:
        """Returns a slot of `nbytes` bytes, which may be 0.

        Raises:
            Overloaded: No slot became free within `timeout_s`.
            PartitionLost: The peer is gone.
            PayloadTooLarge: The transport never carries so much.
        """
        ...

    async def push(
        self, slot: Slot, header: bytes, timeout_s: float, lost_frame: Lost | None = None
    ) -> None:
        """Delivers slot and header, and returns when the bytes have left this process.

        Frames of one link arrive in the order of their pushes. If the link breaks after the push
        and before the frame is known to have arrived, `lost_frame` is called.

        Raises:
            DeadlineExceeded: The peer took no byte for `timeout_s`; the link is closed. A slow
                transfer that makes progress goes on, however long it takes.
            PartitionLost: The peer is gone.
        """
        ...

    def transit(self) -> LinkState | None:
        """Returns what is on its way over the link.

        None where nothing queues up behind a push (shared memory), or where that is unknown.
        """
        ...

    async def close(self) -> None:
        """Closes the link and takes back every slot; idempotent."""
        ...


class Endpoint(Protocol):
    """One process's side of one transport."""

    @property
    def address(self) -> EndpointAddress:
        """Address at which peers reach this endpoint; known after `start`."""
        ...

    async def start(self, handler: FrameHandler) -> None:
        """Starts to receive frames, which `handler` gets."""
        ...

    async def connect(
        self, address: EndpointAddress, timeout_s: float, peer_id: str | None = None
    ) -> Link:
        """Opens a link to a peer's endpoint of the same transport.

        Args:
            address: Address at which the peer listens.
            timeout_s: The longest time to wait.
            peer_id: With TLS, the peer that the certificate must name; None for any peer.

        Raises:
            PartitionLost: Nobody answers there within `timeout_s`.
        """
        ...

    async def close(self) -> None:
        """Stops receiving, closes every link and frees every slot."""
        ...
