"""The sending side that all transports share: slots in a pool's memory, and a link's end."""

from __future__ import annotations

import asyncio

from catenary_services.errors import InvalidInput, PartitionLost, PayloadTooLarge
from catenary_services.transport.acknowledgements import LinkState
from catenary_services.transport.exchange import aligned
from catenary_services.transport.frames import MAX_HEADER_BYTES, MessageKind, MessagePrefix
from catenary_services.transport.interface import Capabilities, Slot
from catenary_services.transport.memory import MemoryBlock, MemoryShare
from catenary_services.transport.settings import TransportSettings

INLINE_BYTES = 8192
"""Payloads up to this size need no slot of the pool, which would cost more than their copy."""


class MemorySlot:
    """A slot in a share's memory, or in fresh memory if it is small (`block` is None)."""

    __slots__ = ("_share", "block", "link", "spent", "view")

    def __init__(
        self, link: object, share: MemoryShare, block: MemoryBlock | None, nbytes: int
    ) -> None:
        self.link = link
        self._share = share
        self.block = block
        self.spent = False
        """True once the slot was pushed or released."""
        self.view = aligned(nbytes) if block is None else block.view(nbytes)

    def release(self) -> None:
        """Gives the slot back without pushing it."""
        if not self.spent:
            self.spent = True
            self.give_back()

    def give_back(self) -> None:
        """Returns the slot's memory to the share."""
        block, self.block = self.block, None
        if block is not None:
            self._share.release(block)


class MemoryLink:
    """The part of a link that is alike in all transports; see `Link`.

    Args:
        capabilities: Properties of the link.
        share: The memory of its slots.
        settings: Limits of the transport.
    """

    def __init__(
        self, capabilities: Capabilities, share: MemoryShare, settings: TransportSettings
    ) -> None:
        self._capabilities = capabilities
        self._share = share
        self._settings = settings
        self._error: PartitionLost | None = None

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    @property
    def closed(self) -> bool:
        return self._error is not None

    def try_export(self, nbytes: int) -> Slot | None:
        if self._error is not None:
            raise self._error
        if nbytes > self._settings.max_frame_bytes:
            raise PayloadTooLarge(f"{nbytes} bytes exceed {self._settings.max_frame_bytes}")
        if nbytes <= INLINE_BYTES:
            return MemorySlot(self, self._share, None, nbytes)
        block = self._share.try_acquire(nbytes)
        return None if block is None else MemorySlot(self, self._share, block, nbytes)

    async def export(self, nbytes: int, timeout_s: float) -> Slot:
        slot = self.try_export(nbytes)
        if slot is None:
            block = await self._share.acquire(nbytes, timeout_s)
            slot = MemorySlot(self, self._share, block, nbytes)
        return slot

    def try_push(self, slot: Slot, header: bytes) -> bool:
        """Returns False: over a network, only a task can wait for what a push waits for."""
        return False

    def transit(self) -> LinkState | None:
        """Returns None: what is on its way is unknown."""
        return None

    def _check_open(self) -> None:
        if self._error is not None:
            raise self._error

    def _pushed(self, slot: Slot, header: bytes) -> MemorySlot:
        """Returns `slot`, marked as pushed.

        Raises:
            InvalidInput: The slot is another link's, or was pushed or released, or the header is
                too long.
            PartitionLost: The peer is gone; the slot was given back.
        """
        if not isinstance(slot, MemorySlot) or slot.link is not self:
            raise InvalidInput("slot", "was not exported by this link")
        if slot.spent:
            raise InvalidInput("slot", "was already pushed or released")
        if len(header) > MAX_HEADER_BYTES:
            raise InvalidInput("header", f"{len(header)} bytes exceed {MAX_HEADER_BYTES}")
        slot.spent = True
        if self._error is not None:
            slot.give_back()
            raise self._error
        return slot


class StreamLink(MemoryLink):
    """A link over a byte stream, on which the peer answers this process's peer id with its own."""

    def __init__(
        self, capabilities: Capabilities, share: MemoryShare, settings: TransportSettings
    ) -> None:
        super().__init__(capabilities, share, settings)
        self._welcome: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def peer_id(self) -> str:
        """The peer id in the answer."""
        return self._welcome.result()

    async def _welcomed(self, timeout_s: float) -> None:
        async with asyncio.timeout(timeout_s):
            await asyncio.shield(self._welcome)

    def _is_welcome(self, prefix: MessagePrefix, peer_id: bytes | memoryview) -> bool:
        """Returns True for the peer's answer, of which it takes note, and False for all else."""
        if prefix.kind is not MessageKind.WELCOME or self._welcome.done():
            return False
        self._welcome.set_result(str(peer_id, "utf-8", "replace"))
        return True

    def _fail_welcome(self, error: PartitionLost) -> None:
        if not self._welcome.done():
            self._welcome.set_exception(error)
            self._welcome.exception()  # nobody may be waiting for it
