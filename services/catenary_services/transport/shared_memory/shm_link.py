"""The sending side of the shared-memory transport."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from catenary_services.errors import PartitionLost
from catenary_services.transport.acknowledgements import Lost
from catenary_services.transport.exchange import (
    introduction,
    lost,
    push_timed_out,
    unless_stalled,
)
from catenary_services.transport.frames import MessageKind, MessagePrefix, encode_prefix
from catenary_services.transport.interface import Capabilities, Slot
from catenary_services.transport.memory import MemoryPool, MemorySegment, MemoryShare
from catenary_services.transport.memory_link import MemorySlot, StreamLink
from catenary_services.transport.settings import TransportSettings
from catenary_services.transport.shared_memory.unix_stream import UnixStream

CAPABILITIES = Capabilities(transport="shm", same_host=True)


class ShmLink(StreamLink):
    """A connection to a peer on this machine, and the memory this process owns for it."""

    def __init__(
        self,
        sock: socket.socket,
        pool: MemoryPool,
        settings: TransportSettings,
        on_closed: Callable[[ShmLink], None],
    ) -> None:
        share = MemoryShare(pool, self._announce, self._withdraw)
        super().__init__(CAPABILITIES, share, settings)
        self._loop = asyncio.get_running_loop()
        self._on_closed = on_closed
        # Slots that the peer holds, with the ends of their leases, oldest first.
        self._leased: dict[int, tuple[MemorySlot, float]] = {}
        self._lease_timer: asyncio.TimerHandle | None = None
        self._stream = UnixStream(sock, self._on_message, self._lose, settings.max_frame_bytes)

    async def introduce(self, peer_id: str, timeout_s: float) -> None:
        """Sends this process's peer id and waits for the answer."""
        self._stream.write(introduction(MessageKind.HELLO, peer_id))
        try:
            await self._welcomed(timeout_s)
        except TimeoutError:
            raise lost("shm", f"no answer within {timeout_s:g} s") from None

    async def push(
        self, slot: Slot, header: bytes, timeout_s: float, lost_frame: Lost | None = None
    ) -> None:
        """Delivers slot and header; see `Link.push`.

        What has left has arrived, so no frame is lost.
        """
        owned = self._pushed(slot, header)
        nbytes = len(owned.view)
        if owned.block is None:
            prefix = encode_prefix(MessagePrefix(MessageKind.FRAME, len(header), nbytes))
            left = self._stream.write(b"".join((prefix, header, owned.view)))
        else:
            name = owned.block.segment.number << 32 | owned.block.offset >> 6
            self._leased[name] = (owned, self._loop.time() + self._settings.lease_s)
            if self._lease_timer is None:
                self._watch_lease(self._settings.lease_s)
            prefix = encode_prefix(MessagePrefix(MessageKind.SLOT, len(header), nbytes, name))
            left = self._stream.write(prefix + header)
        if left is not None:
            # The message stays queued if the caller is cancelled: a frame is sent whole or not.
            try:
                await unless_stalled(left, timeout_s, lambda: self._stream.taken_bytes)
            except TimeoutError:
                self._lose(lost("shm", "the peer takes no frames"))
                raise push_timed_out("shm", timeout_s) from None
        self._check_open()

    async def close(self) -> None:
        """Closes the link and takes back every slot."""
        self._lose(PartitionLost("the link was closed"))

    def _announce(self, segment: MemorySegment) -> None:
        prefix = MessagePrefix(MessageKind.SEGMENT, 0, len(segment.view), segment.number)
        self._stream.write(encode_prefix(prefix), segment.fd)
        segment.close_fd()

    def _withdraw(self, segment: MemorySegment) -> None:
        self._stream.write(encode_prefix(MessagePrefix(MessageKind.DROP, argument=segment.number)))

    def _on_message(self, prefix: MessagePrefix, body: memoryview) -> None:
        if prefix.kind is MessageKind.RELEASE:
            lease = self._leased.pop(prefix.argument, None)
            if lease is None:
                self._lose(lost("shm", "the peer released a slot it did not have"))
            else:
                lease[0].give_back()
        elif not self._is_welcome(prefix, body):
            self._lose(lost("shm", f"unexpected {prefix.kind.name}"))

    def _watch_lease(self, after_s: float) -> None:
        self._lease_timer = self._loop.call_later(after_s, self._check_lease)

    def _check_lease(self) -> None:
        self._lease_timer = None
        for _, expires in self._leased.values():
            left_s = expires - self._loop.time()
            if left_s > 0:
                self._watch_lease(left_s)
            else:
                # The peer may yet read this memory, so it must not be reused. The whole link goes:
                # its segments live on in the peer's mapping alone, and the next link starts afresh.
                self._lose(lost("shm", f"a slot was not released for {self._settings.lease_s} s"))
            return

    def _lose(self, error: PartitionLost) -> None:
        if self._error is not None:
            return
        self._error = error
        self._stream.close(error)
        if self._lease_timer is not None:
            self._lease_timer.cancel()
        self._fail_welcome(error)
        # The share is closed first, so that nobody gets these slots: the peer may still read them.
        self._share.close(error)
        for slot, _ in self._leased.values():
            slot.give_back()
        self._leased.clear()
        self._on_closed(self)
