"""The sending end of NIXL: frames are written into the ring that the receiver lends."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from catenary_services.errors import InvalidInput, PartitionLost, Unavailable
from catenary_services.transport.acknowledgements import Lost
from catenary_services.transport.exchange import EMPTY, lost, push_timed_out, unless_stalled
from catenary_services.transport.frames import MessageKind, MessagePrefix, encode_prefix
from catenary_services.transport.interface import Capabilities, Slot
from catenary_services.transport.memory import MemoryPool, MemorySegment, MemoryShare
from catenary_services.transport.memory_link import INLINE_BYTES, MemoryLink, MemorySlot
from catenary_services.transport.nixl.nixl_thread import NixlThread, Registration, Write
from catenary_services.transport.nixl.ring import RingDescription, SlotRuns
from catenary_services.transport.settings import TransportSettings
from catenary_services.transport.tcp.tcp import TcpLink

CAPABILITIES = Capabilities(transport="nixl", same_host=False)
PROBE_BYTES = 64
"""Bytes that a new link writes to see whether they arrive."""


class NixlLink(MemoryLink):
    """A ring of a peer to write into, and the connection over which frames are announced.

    Small frames, and those larger than the ring, travel over the connection.
    """

    def __init__(
        self,
        control: TcpLink,
        nixl: NixlThread,
        pool: MemoryPool,
        settings: TransportSettings,
        on_closed: Callable[[NixlLink], None],
    ) -> None:
        super().__init__(CAPABILITIES, MemoryShare(pool, on_drop=self._forget), settings)
        self._loop = asyncio.get_running_loop()
        self._control = control
        self._nixl = nixl
        self._on_closed = on_closed
        self._described: asyncio.Future[RingDescription] = self._loop.create_future()
        self._ring_address = 0
        self._runs = SlotRuns(0, 1)
        """Slots of the peer's ring; none before it is known to take what is written."""
        self._peer = ""
        """Name by which NIXL knows the peer; empty while it does not."""
        self._turn = asyncio.Lock()
        """Held by the push whose frame is sent: frames arrive in their order."""
        self._pushes: set[asyncio.Task[None]] = set()
        self._room: asyncio.Future[None] | None = None
        """Done when a slot of the ring becomes free, if a frame waits for that."""
        self._registered: dict[int, Registration] = {}
        """Segments of the share that NIXL knows, by their numbers."""
        self._write: Write | None = None
        """The WRITE that NIXL has not ended."""
        self._moved = 0
        """A number that grows with each frame sent, each slot released and all bytes written."""
        control.on_message = self._on_message
        control.on_lost = self._lose
        if control.closed:
            self._lose(lost("nixl", "the peer closed the connection"))

    @property
    def peer_id(self) -> str:
        """The peer id in the answer."""
        return self._control.peer_id

    async def open(self, probe: Registration) -> None:
        """Asks for a ring, and writes the first bytes of `probe` into it, to see that this works.

        Raises:
            PartitionLost: The peer lends no ring, has another version of NIXL, or nothing arrives.
            InvalidInput: NIXL cannot read what the peer says of its ring.
        """
        self._check_open()
        self._control.stream.trust()
        self._control.stream.write(encode_prefix(MessagePrefix(MessageKind.RING)))
        ring = await self._described
        if ring.version != self._nixl.version:
            raise lost("nixl", f"the peer has version {ring.version}, not {self._nixl.version}")
        await self._nixl.add_peer(ring.name, ring.metadata)
        self._peer = ring.name
        if self._error is not None:
            self._part()
        self._ring_address = ring.address
        probe.memory[:PROBE_BYTES] = os.urandom(PROBE_BYTES)
        await self._write_bytes(probe, 0, PROBE_BYTES, 0)
        self._runs = SlotRuns(ring.slots, ring.slot_bytes)

    def try_export(self, nbytes: int) -> Slot | None:
        if self._fits_ring(nbytes):
            return super().try_export(nbytes)
        return self._control.try_export(nbytes)

    async def export(self, nbytes: int, timeout_s: float) -> Slot:
        if self._fits_ring(nbytes):
            return await super().export(nbytes, timeout_s)
        return await self._control.export(nbytes, timeout_s)

    def _fits_ring(self, nbytes: int) -> bool:
        return INLINE_BYTES < nbytes <= self._runs.nbytes

    async def push(
        self, slot: Slot, header: bytes, timeout_s: float, lost_frame: Lost | None = None
    ) -> None:
        """Delivers slot and header; see `Link.push`."""
        if not isinstance(slot, MemorySlot) or slot.link is not self._control:
            slot = self._pushed(slot, header)
        elif not self._pushes:  # none to wait behind, and nothing to be written first
            await self._control.push(slot, header, timeout_s, lost_frame)
            self._moved += 1
            return
        # It goes on if the caller is cancelled: a frame is sent whole or not at all, and its memory
        # is free only once NIXL has read it.
        task = self._loop.create_task(self._deliver(slot, header, timeout_s, lost_frame))
        self._pushes.add(task)
        task.add_done_callback(self._push_ended)
        try:
            await unless_stalled(task, timeout_s, self._progress)
        except TimeoutError:
            self._lose(lost("nixl", "the peer takes no frames"))
            raise push_timed_out("nixl", timeout_s) from None
        self._check_open()

    async def close(self) -> None:
        """Closes the link and takes back every slot."""
        self._lose(PartitionLost("the link was closed"))

    # ---- sending ----

    async def _deliver(
        self, slot: MemorySlot, header: bytes, timeout_s: float, lost_frame: Lost | None
    ) -> None:
        async with self._turn:
            if slot.link is self._control:
                await self._control.push(slot, header, timeout_s, lost_frame)
            else:
                prefix = await self._write_slot(slot, len(header))
                message = encode_prefix(prefix) + header
                stream = self._control.stream
                await stream.send(message, EMPTY, _nothing, timeout_s, lost_frame)
            self._moved += 1

    async def _write_slot(self, slot: MemorySlot, header_bytes: int) -> MessagePrefix:
        """Writes a slot into the ring; returns the prefix of the message that tells the peer."""
        nbytes = len(slot.view)
        assert slot.block is not None
        try:
            first = await self._take_run(nbytes)
            source = await self._known_to_nixl(slot.block.segment)
            await self._write_bytes(
                source, slot.block.offset, nbytes, first * self._runs.slot_bytes
            )
        finally:
            slot.give_back()
        return MessagePrefix(MessageKind.SLOT, header_bytes, nbytes, first)

    async def _take_run(self, nbytes: int) -> int:
        self._check_open()
        while (first := self._runs.take_any(nbytes)) is None:
            self._room = self._loop.create_future()
            await self._room
        return first

    async def _known_to_nixl(self, segment: MemorySegment) -> Registration:
        registration = self._registered.get(segment.number)
        if registration is None:
            try:
                registration = await self._nixl.register(segment.view)
            except Unavailable as error:
                self._lose(lost("nixl", error.message))
                self._check_open()
                raise
            if self._error is not None:
                self._nixl.deregister(registration)
                raise self._error
            self._registered[segment.number] = registration
        return registration

    async def _write_bytes(
        self, source: Registration, begin: int, nbytes: int, ring_offset: int
    ) -> None:
        self._check_open()
        target = self._ring_address + ring_offset
        write = self._nixl.write(source, begin, nbytes, self._peer, target)
        self._write = write
        write.ended.add_done_callback(self._write_ended)
        await asyncio.shield(write.ended)
        self._check_open()

    def _write_ended(self, ended: asyncio.Future[None]) -> None:
        assert self._write is not None
        self._moved += self._write.written_bytes
        self._write = None
        error = ended.exception()
        if self._error is not None:
            self._part()
        elif isinstance(error, PartitionLost):
            self._lose(error)

    def _progress(self) -> int:
        transit = self._control.transit()
        written_bytes = self._write.written_bytes if self._write is not None else 0
        return self._moved + written_bytes + (transit.acknowledged if transit is not None else 0)

    def _push_ended(self, task: asyncio.Task[None]) -> None:
        self._pushes.discard(task)
        task.exception()  # nobody may be waiting for it

    # ---- what the peer says ----

    def _on_message(self, prefix: MessagePrefix, header: bytes) -> None:
        if prefix.kind is MessageKind.RING and not self._described.done():
            self._described.set_result(RingDescription.decode(header))
        elif prefix.kind is MessageKind.RELEASE:
            self._runs.give_back(prefix.argument)
            self._moved += 1
            if self._room is not None and not self._room.done():
                self._room.set_result(None)
        else:
            raise InvalidInput("prefix.kind", f"unexpected {prefix.kind.name}")

    # ---- the end ----

    def _forget(self, segment: MemorySegment) -> None:
        registration = self._registered.pop(segment.number, None)
        if registration is not None:
            self._nixl.deregister(registration)

    def _lose(self, error: PartitionLost) -> None:
        if self._error is not None:
            return
        self._error = error
        self._control.stream.close(error)
        self._share.close(error)
        for waiting in (self._described, self._room):
            if waiting is not None and not waiting.done():
                waiting.set_exception(error)
                waiting.exception()  # nobody may be waiting for it
        if self._write is not None:
            self._nixl.abandon(self._write)
        else:
            self._part()
        self._on_closed(self)

    def _part(self) -> None:
        """Has NIXL forget the peer and the memory of this link."""
        peer, self._peer = self._peer, ""
        if peer:
            self._nixl.remove_peer(peer)
        while self._registered:
            self._nixl.deregister(self._registered.popitem()[1])


def _nothing() -> None:
    """Releases the payload of an announcement, which has none."""
