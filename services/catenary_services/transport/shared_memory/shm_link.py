"""Both ends of a connection over shared memory: the link that sends, the receiver that reads."""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import socket
from collections.abc import Callable
from functools import partial

from catenary_services.errors import InvalidInput, PartitionLost
from catenary_services.transport.acknowledgements import Lost
from catenary_services.transport.exchange import (
    EMPTY,
    HANDSHAKE_S,
    MemoryFrame,
    aligned,
    deliver,
    introduction,
    lost,
    peer_id_of,
    push_timed_out,
    unless_stalled,
)
from catenary_services.transport.frames import (
    PREFIX_BYTES,
    MessageKind,
    MessagePrefix,
    encode_prefix,
)
from catenary_services.transport.interface import (
    NOBODY,
    Capabilities,
    FrameHandler,
    FrameSender,
    Slot,
)
from catenary_services.transport.memory import MemoryPool, MemorySegment, MemoryShare
from catenary_services.transport.memory_link import INLINE_BYTES, MemorySlot, StreamLink
from catenary_services.transport.settings import TransportSettings
from catenary_services.transport.shared_memory.unix_stream import UnixStream

CAPABILITIES = Capabilities(transport="shm", same_host=True)
_MAX_SEGMENTS = 4096
_REQUIRED_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


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
        left = self._write(slot, header)
        if left is not None:
            # The message stays queued if the caller is cancelled: a frame is sent whole or not.
            try:
                await unless_stalled(left, timeout_s, lambda: self._stream.taken_bytes)
            except TimeoutError:
                self._lose(lost("shm", "the peer takes no frames"))
                raise push_timed_out("shm", timeout_s) from None
        self._check_open()

    def try_push(self, slot: Slot, header: bytes) -> bool:
        """Delivers slot and header unless messages wait for the peer; see `Link.try_push`."""
        if not self._stream.takes(PREFIX_BYTES + len(header) + INLINE_BYTES):
            return False
        self._write(slot, header)
        self._check_open()
        return True

    def _write(self, slot: Slot, header: bytes) -> asyncio.Future[None] | None:
        """Sends the message of a push, and what was written before it; see `UnixStream.write`.

        It is not left to the end of this turn of the loop: if the peer is gone, the caller is to
        hear of it now, as nobody would later.
        """
        owned = self._pushed(slot, header)
        nbytes = len(owned.view)
        if owned.block is None:
            prefix = encode_prefix(MessagePrefix(MessageKind.FRAME, len(header), nbytes))
            left = self._stream.write(b"".join((prefix, header, owned.view)))
            self._stream.flush()
            return left
        name = owned.block.segment.number << 32 | owned.block.offset >> 6
        self._leased[name] = (owned, self._loop.time() + self._settings.lease_s)
        if self._lease_timer is None:
            self._watch_lease(self._settings.lease_s)
        prefix = encode_prefix(MessagePrefix(MessageKind.SLOT, len(header), nbytes, name))
        left = self._stream.write(prefix + header)
        self._stream.flush()
        return left

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


class ShmReceiver:
    """One connected sender: its segments, mapped for reading, and the frames held of it."""

    def __init__(
        self,
        sock: socket.socket,
        peer_id: str,
        settings: TransportSettings,
        handler: FrameHandler,
        on_closed: Callable[[ShmReceiver], None],
    ) -> None:
        self._peer_id = peer_id
        self._settings = settings
        self._handler = handler
        self._on_closed = on_closed
        self._segments: dict[int, memoryview] = {}
        self._held: set[int] = set()
        self._unreleased = 0
        self._greeted = False
        self.since_s = asyncio.get_running_loop().time()
        self._sender = NOBODY
        self._stream = UnixStream(sock, self._on_message, self.close, settings.max_frame_bytes)
        self._handshake = asyncio.get_running_loop().call_later(
            HANDSHAKE_S, self.close, lost("shm", "the peer did not say who it is")
        )

    def _on_message(self, prefix: MessagePrefix, body: memoryview) -> None:
        if prefix.kind is MessageKind.HELLO and not self._greeted:
            self._sender = FrameSender(peer_id_of(body))
            self._greeted = True
            self._stream.trust()
            self._handshake.cancel()
            self._stream.write(introduction(MessageKind.WELCOME, self._peer_id))
        elif not self._greeted:
            raise InvalidInput("prefix.kind", f"{prefix.kind.name} before HELLO")
        elif prefix.kind is MessageKind.FRAME:
            self._on_inline(prefix, body)
        elif prefix.kind is MessageKind.SLOT:
            self._on_slot(prefix, body)
        elif prefix.kind is MessageKind.SEGMENT:
            self._on_segment(prefix)
        elif prefix.kind is MessageKind.DROP:
            self._segments.pop(prefix.argument, None)
        else:
            raise InvalidInput("prefix.kind", f"unexpected {prefix.kind.name}")

    @property
    def is_known(self) -> bool:
        """True once the sender has given its peer id."""
        return self._greeted

    def _on_inline(self, prefix: MessagePrefix, body: memoryview) -> None:
        payload = EMPTY
        if prefix.payload_bytes:
            copy = aligned(prefix.payload_bytes)
            copy[:] = body[prefix.header_bytes :]
            payload = copy.toreadonly()
        self._hand_over(bytes(body[: prefix.header_bytes]), payload, self._released)

    def _on_slot(self, prefix: MessagePrefix, body: memoryview) -> None:
        segment = self._segments.get(prefix.argument >> 32)
        begin = (prefix.argument & 0xFFFFFFFF) << 6
        if segment is None or begin + prefix.payload_bytes > len(segment):
            raise InvalidInput("prefix.argument", "names no slot")
        if prefix.argument in self._held:
            raise InvalidInput("prefix.argument", "names a slot that was not released")
        self._held.add(prefix.argument)
        payload = segment[begin : begin + prefix.payload_bytes]
        self._hand_over(bytes(body), payload, partial(self._slot_released, prefix.argument))

    def _on_segment(self, prefix: MessagePrefix) -> None:
        fd = self._stream.take_descriptor()
        try:
            if len(self._segments) >= _MAX_SEGMENTS or prefix.argument in self._segments:
                raise InvalidInput("segment", "one too many")
            # Without the seals the sender could shorten the file, and this process would die of
            # SIGBUS at its next access.
            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _REQUIRED_SEALS != _REQUIRED_SEALS:
                raise InvalidInput("segment", "is not sealed")
            if prefix.payload_bytes == 0 or os.fstat(fd).st_size != prefix.payload_bytes:
                raise InvalidInput("segment", "has another size than announced")
            memory = mmap.mmap(
                fd, prefix.payload_bytes, mmap.MAP_SHARED | mmap.MAP_POPULATE, mmap.PROT_READ
            )
        except OSError as error:
            raise InvalidInput("segment", f"cannot be mapped: {error}") from error
        finally:
            os.close(fd)
        self._segments[prefix.argument] = memoryview(memory)

    def _hand_over(
        self, header: bytes, payload: memoryview, on_release: Callable[[], None]
    ) -> None:
        if self._sender.is_refused:
            raise InvalidInput("peer_id", f"{self._sender.name} is in no directory")
        self._unreleased += 1
        if self._unreleased >= self._settings.max_unreleased_frames:
            self._stream.pause()
        deliver(self._handler, MemoryFrame(header, payload, CAPABILITIES, on_release, self._sender))

    def _released(self) -> None:
        self._unreleased -= 1
        if self._unreleased < self._settings.max_unreleased_frames:
            self._stream.resume()

    def _slot_released(self, name: int) -> None:
        self._held.discard(name)
        self._stream.write(encode_prefix(MessagePrefix(MessageKind.RELEASE, argument=name)))
        self._released()

    def close(self, error: PartitionLost) -> None:
        """Ends the connection; frames that were handed over stay readable. Idempotent."""
        self._handshake.cancel()
        self._stream.close(error)
        # A mapping is freed with its last frame.
        self._segments.clear()
        self._on_closed(self)
