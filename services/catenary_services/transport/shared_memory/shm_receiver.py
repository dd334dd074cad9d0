"""The receiving side of the shared-memory transport."""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import socket
from collections.abc import Callable
from functools import partial

from catenary_services.errors import InvalidInput, PartitionLost
from catenary_services.transport.exchange import (
    EMPTY,
    HANDSHAKE_S,
    MemoryFrame,
    aligned,
    deliver,
    introduction,
    lost,
    peer_id_of,
)
from catenary_services.transport.frames import MessageKind, MessagePrefix, encode_prefix
from catenary_services.transport.interface import NOBODY, FrameHandler, FrameSender
from catenary_services.transport.settings import TransportSettings
from catenary_services.transport.shared_memory.shm_link import CAPABILITIES
from catenary_services.transport.shared_memory.unix_stream import UnixStream

_MAX_SEGMENTS = 4096
_REQUIRED_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


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
