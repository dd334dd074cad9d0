"""The receiving end of NIXL: a ring lent to one sender, and the frames that lie in it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from catenary_services.errors import CatenaryError, InvalidInput, PartitionLost
from catenary_services.log import get_logger
from catenary_services.transport.exchange import lost
from catenary_services.transport.frames import MessageKind, MessagePrefix, encode_prefix
from catenary_services.transport.memory import MemoryBlock, MemoryShare
from catenary_services.transport.nixl.nixl_thread import NixlThread, Registration
from catenary_services.transport.nixl.ring import RingDescription, SlotRuns
from catenary_services.transport.tcp.tcp import TcpReceiver

LINGER_S = 30.0
"""Seconds for which the ring of a connection that ended is lent to nobody, because bytes of a WRITE
may still be under way."""
_WAIT_S = 1.0
"""Seconds that a sender's request waits for memory before its connection is closed."""
_MOST_UNREAD_BYTES = 1 << 20
"""Bytes of releases that a sender does not read; beyond, its connection is closed."""

_log = get_logger("catenary_services.transport")


class LentRing:
    """Memory into which one sender may write while its connection lasts."""

    def __init__(
        self,
        receiver: TcpReceiver,
        share: MemoryShare,
        runs: SlotRuns,
        nixl: NixlThread,
        on_retired: Callable[[LentRing], None],
    ) -> None:
        """Lends nothing yet.

        Args:
            receiver: The sender's connection.
            share: Where the ring's memory comes from.
            runs: Its slots.
            nixl: The library, which is to know the memory.
            on_retired: Told that the memory was given back, after the connection ended.
        """
        self._loop = asyncio.get_running_loop()
        self._receiver = receiver
        self._share = share
        self._runs = runs
        self._nixl = nixl
        self._on_retired = on_retired
        self._block: MemoryBlock | None = None
        self._registration: Registration | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def lend(self) -> None:
        """Finds memory, makes it known to NIXL and tells the sender; else ends the connection."""
        nbytes = self._runs.nbytes
        try:
            self._block = await self._share.acquire(nbytes, _WAIT_S)
            memory = self._block.view(nbytes)
            self._registration = ring = await self._nixl.register(memory)
        except CatenaryError as error:
            _log.warning("no_ring_for_sender", error=error.message)
            self._receiver.close(lost("nixl", f"no memory to lend: {error.message}"))
            return
        slots = nbytes // self._runs.slot_bytes
        description = RingDescription(
            ring.address,
            slots,
            self._runs.slot_bytes,
            self._nixl.name,
            self._nixl.version,
            ring.metadata,
        ).encode()
        prefix = encode_prefix(MessagePrefix(MessageKind.RING, len(description)))
        self._receiver.stream.write(prefix + description)

    def take(self, prefix: MessagePrefix, header: bytes) -> None:
        """Hands over the frame that a SLOT announces.

        Raises:
            InvalidInput: It is not in the ring, or where a frame is that was not released.
        """
        if self._registration is None:
            raise InvalidInput("prefix.kind", "SLOT before RING")
        first = prefix.argument
        self._runs.take(first, prefix.payload_bytes)
        begin = first * self._runs.slot_bytes
        payload = self._registration.memory[begin : begin + prefix.payload_bytes]
        self._receiver.hand_over(header, payload.toreadonly(), partial(self._release, first))

    def _release(self, first: int) -> None:
        self._runs.give_back(first)
        stream = self._receiver.stream
        stream.write(encode_prefix(MessagePrefix(MessageKind.RELEASE, argument=first)))
        if stream.unsent_bytes > _MOST_UNREAD_BYTES:
            self._receiver.close(lost("nixl", "the sender does not read what is released"))

    def end(self) -> None:
        """Has the memory given back later, because the connection is gone."""
        self._share.close(PartitionLost("the sender is gone"))
        self._retire_later() if self._block is not None else self._on_retired(self)

    def _retire_later(self) -> None:
        self._timer = self._loop.call_later(LINGER_S, self._retire)

    def _retire(self) -> None:
        if not self._runs.is_unused:
            self._retire_later()
            return
        if self._registration is not None:
            self._nixl.deregister(self._registration)
        if self._block is not None:
            self._share.release(self._block)
        self._on_retired(self)

    def close(self) -> None:
        """Gives up waiting, because the endpoint closes and NIXL forgets all memory."""
        if self._timer is not None:
            self._timer.cancel()
