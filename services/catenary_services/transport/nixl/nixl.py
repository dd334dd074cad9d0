"""Frames over NIXL, for two machines whose network cards reach each other's memory (RDMA).

A receiver lends each sender a ring of slots. The sender writes a frame into it with a one-sided
WRITE, and announces it, with its header, over a connection of the tcp transport; releasing it is a
message the other way. So only who has a peer's certificate is lent memory and believed, and what is
announced has arrived: NIXL ends a WRITE when the other side has it. NIXL's own notifications are
sent after that, too, but name no sender that could be relied on and wake nobody.

What is written is not encrypted, and whoever reaches the ports of NIXL's library can write without
being lent anything. Hence `TransportSettings.trusted_network`.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import replace

from catenary_services.errors import CatenaryError, InvalidInput, PartitionLost
from catenary_services.transport.exchange import lost
from catenary_services.transport.frames import MessageKind, MessagePrefix
from catenary_services.transport.interface import EndpointAddress, FrameHandler, Link
from catenary_services.transport.memory import MemoryPool, MemoryShare, private_segment
from catenary_services.transport.nixl.lent_ring import LentRing
from catenary_services.transport.nixl.nixl_link import CAPABILITIES, PROBE_BYTES, NixlLink
from catenary_services.transport.nixl.nixl_thread import NixlThread, Registration
from catenary_services.transport.nixl.ring import SlotRuns
from catenary_services.transport.settings import TransportSettings
from catenary_services.transport.tcp.tcp import Extension, TcpEndpoint, TcpReceiver

_SLOT_BYTES = 64 << 10
_KINDS = frozenset({MessageKind.RING, MessageKind.SLOT, MessageKind.RELEASE})


class NixlEndpoint:
    """One process's side of the NIXL transport."""

    def __init__(self, peer_id: str, settings: TransportSettings) -> None:
        """Opens nothing yet.

        Raises:
            InvalidInput: Nobody said that the network is trusted.
        """
        if not settings.trusted_network:
            raise InvalidInput(
                "transports",
                "'nixl' sends unencrypted and lets peers write into memory; set trusted_network "
                "if nobody else reaches this network",
            )
        self._peer_id = peer_id
        self._settings = settings
        extension = Extension(CAPABILITIES, _KINDS, self._received, self._ended)
        self._tcp = TcpEndpoint(peer_id, replace(settings, tcp_port=0), extension)
        self._send_pool = MemoryPool(settings.send_bytes, private_segment)
        self._ring_pool = MemoryPool(settings.receive_bytes, private_segment)
        ring_bytes = min(settings.ring_bytes, settings.receive_bytes // 2)
        self._ring_slots = max(1, ring_bytes // _SLOT_BYTES)
        self._nixl: NixlThread | None = None
        self._probe: Registration | None = None
        self._links: set[NixlLink] = set()
        self._rings: dict[TcpReceiver, LentRing] = {}
        """Rings of senders that are connected."""
        self._retired: set[LentRing] = set()
        """Rings of senders that are gone, until their memory is given back."""
        self._lending: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> EndpointAddress:
        """Address at which peers reach this endpoint."""
        return replace(self._tcp.address, transport="nixl")

    async def start(self, handler: FrameHandler) -> None:
        """Starts NIXL, then to receive.

        Raises:
            Unavailable: NIXL is not installed or does not work here.
        """
        nixl = NixlThread(f"{self._peer_id}-{secrets.token_hex(8)}")
        await nixl.start()
        self._nixl = nixl
        try:
            self._probe = await nixl.register(private_segment(4096).view[:PROBE_BYTES])
            await self._tcp.start(handler)
        except BaseException:
            await self.close()
            raise

    async def connect(
        self, address: EndpointAddress, timeout_s: float, peer_id: str | None = None
    ) -> Link:
        """Opens a link to the endpoint at `address`.

        Raises:
            PartitionLost: Nobody answers within `timeout_s`, another peer does, or what is written
                does not arrive there.
        """
        if self._nixl is None or self._probe is None:
            raise lost("nixl", "this endpoint is closed")
        try:
            async with asyncio.timeout(timeout_s):
                control = await self._tcp.connect(address, timeout_s, peer_id)
                link = NixlLink(
                    control, self._nixl, self._send_pool, self._settings, self._links.discard
                )
                self._links.add(link)
                try:
                    await link.open(self._probe)
                except BaseException:
                    await link.close()
                    raise
        except TimeoutError as error:
            raise lost("nixl", f"{address.address}: no answer in {timeout_s:g} s") from error
        except CatenaryError as error:
            if isinstance(error, PartitionLost):
                raise
            raise lost("nixl", f"{address.address}: {error.message}") from error
        return link

    async def close(self) -> None:
        for task in tuple(self._lending):
            task.cancel()
        await self._tcp.close()
        for link in tuple(self._links):
            await link.close()
        nixl, self._nixl = self._nixl, None
        if nixl is not None:
            await nixl.close()
        for ring in self._retired:
            ring.close()

    # ---- senders ----

    def _received(self, receiver: TcpReceiver, prefix: MessagePrefix, header: bytes) -> None:
        ring = self._rings.get(receiver)
        if prefix.kind is MessageKind.RING and ring is None:
            self._lend(receiver)
        elif prefix.kind is MessageKind.SLOT and ring is not None:
            ring.take(prefix, header)
        else:
            raise InvalidInput("prefix.kind", f"unexpected {prefix.kind.name}")

    def _lend(self, receiver: TcpReceiver) -> None:
        assert self._nixl is not None
        ring = LentRing(
            receiver,
            MemoryShare(self._ring_pool),
            SlotRuns(self._ring_slots, _SLOT_BYTES),
            self._nixl,
            self._retired.discard,
        )
        self._rings[receiver] = ring
        task = asyncio.get_running_loop().create_task(ring.lend())
        self._lending.add(task)
        task.add_done_callback(self._lending.discard)

    def _ended(self, receiver: TcpReceiver) -> None:
        ring = self._rings.pop(receiver, None)
        if ring is not None:
            self._retired.add(ring)
            ring.end()
