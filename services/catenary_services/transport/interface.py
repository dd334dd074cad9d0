"""The one-sided transport interface: `export, push, recv, release, capabilities`.

A process has one *endpoint* per transport. Towards each peer it opens a *link*. To send, it
`export`s a slot of the link (memory the transport can deliver from, ideally without another copy),
fills it in place, and `push`es it with a header. On the other side the endpoint hands the frame to
its handler (`recv`); the frame's payload stays valid until it is `release`d.

Slots are leased: whatever a dead peer held comes back when its connection breaks or its lease
expires. Everything here runs on one event loop except filling and reading slots, which any thread
may do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from catenary_services.security.identity import Role
from catenary_services.transport.acknowledgements import Lost


@dataclass(frozen=True, slots=True)
class EndpointAddress:
    """Where an endpoint can be reached. Mirrors `catenary.v1.TransportAddress`."""

    transport: str
    address: str
    host_id: str


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a link can do, for choosing between links."""

    transport: str
    same_host: bool
    zero_copy: bool
    """True if the receiver reads the very memory the producer wrote."""
    device_memory: bool = False
    """True if slots may live in accelerator memory (none of the built-in transports)."""


@dataclass(slots=True)
class FrameSender:
    """Who is at the other end of a connection that frames come over; one for each connection."""

    name: str
    """The peer id it gave; with TLS the one of its certificate."""
    role: Role | None = None
    """Of its certificate; None where there is none: without TLS, and over shared memory, where
    the kernel says that it is a process of our own user."""
    is_refused: bool = field(default=False, compare=False)
    """It has no business here: the connection is closed at its next frame."""

    def may_be(self, name: str) -> bool:
        """Returns whether this is `name`, as far as is known: frames made in-process have none."""
        return self.name in (name, "")


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
    """A frame that arrived. The payload is valid until `release`."""

    @property
    def header(self) -> bytes:
        """The header bytes the sender pushed (a serialized `catenary.v1.FrameHeader`)."""
        ...

    @property
    def payload(self) -> memoryview:
        """Read-only tensor bytes, 64-byte aligned; empty if none were sent."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """Of the link it came over."""
        ...

    @property
    def sender(self) -> FrameSender:
        """Who sent it."""
        ...

    def release(self) -> None:
        """Gives the memory back to its owner. Idempotent."""
        ...


FrameHandler = Callable[[ReceivedFrame], None]
"""Called on the event loop for every frame; must not block, and must see to its release."""


class Link(Protocol):
    """A connection to one peer, for sending."""

    @property
    def capabilities(self) -> Capabilities:
        """What this link can do."""
        ...

    @property
    def closed(self) -> bool:
        """True once the peer is gone; every further call raises `PartitionLost`."""
        ...

    async def export(self, nbytes: int, timeout_s: float) -> Slot:
        """Returns a slot of `nbytes` (0 allowed).

        Raises:
            Overloaded: no slot became free within `timeout_s`.
            PartitionLost: the peer is gone.
            PayloadTooLarge: more than the transport ever carries.
        """
        ...

    async def push(
        self, slot: Slot, header: bytes, timeout_s: float, lost_frame: Lost | None = None
    ) -> None:
        """Delivers slot and header; returns when the bytes have left this process.

        Frames of one link arrive in the order of their pushes. Should the link break after the
        push and before the frame is known to have arrived, `lost_frame` is told.

        Raises:
            DeadlineExceeded: the peer took no byte for `timeout_s`; the link is closed. A slow
                transfer that moves goes on, however long it takes.
            PartitionLost: the peer is gone.
        """
        ...

    async def close(self) -> None:
        """Closes the link and takes back every slot. Idempotent."""
        ...


class Endpoint(Protocol):
    """One process's side of one transport."""

    @property
    def address(self) -> EndpointAddress:
        """Where peers reach this endpoint; known after `start`."""
        ...

    async def start(self, handler: FrameHandler) -> None:
        """Begins to receive."""
        ...

    async def connect(
        self, address: EndpointAddress, timeout_s: float, peer_id: str | None = None
    ) -> Link:
        """Opens a link to a peer's endpoint of the same transport.

        Args:
            address: Where it listens.
            timeout_s: Longest time to wait.
            peer_id: With TLS, its certificate must name this peer; None: any peer.

        Raises:
            PartitionLost: nobody answers there, or not within `timeout_s`.
        """
        ...

    async def close(self) -> None:
        """Stops receiving, closes every link, frees every slot."""
        ...
