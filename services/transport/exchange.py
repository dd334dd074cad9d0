"""What the transports have in common: slots, received frames, and the call of the handler."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from services.errors import DeadlineExceeded, InvalidInput, PartitionLost
from services.log import get_logger
from services.transport.frames import ALIGNMENT, MAX_HEADER_BYTES
from services.transport.interface import Capabilities, FrameHandler, Link, ReceivedFrame, Slot
from services.transport.memory import Block, Share

EMPTY = memoryview(b"")
HANDSHAKE_S = 5.0
"""How long a new connection may take to say who it is."""
MEMORY_WAIT_S = 60.0
"""How long a connection waits for receive memory before it is given up."""

_log = get_logger("services.transport")


def aligned(nbytes: int) -> memoryview:
    """Returns fresh writable memory that begins at a multiple of 64."""
    if nbytes == 0:
        return memoryview(bytearray())
    buffer = np.empty(nbytes + ALIGNMENT, np.uint8)
    # Not `buffer.ctypes.data`: that builds an object of ten times the cost for every small frame.
    start = -buffer.__array_interface__["data"][0] % ALIGNMENT
    return buffer.data[start : start + nbytes]


class MemorySlot:
    """A slot in a share's memory, or in fresh memory if it is small (`block` is None)."""

    __slots__ = ("_share", "_spent", "block", "link", "view")

    def __init__(self, link: Link, share: Share, block: Block | None, nbytes: int) -> None:
        self.link = link
        self._share = share
        self.block = block
        self._spent = False
        self.view = aligned(nbytes) if block is None else block.view(nbytes)

    def spend(self) -> None:
        """Marks the slot as pushed: `release` does nothing any more."""
        self._spent = True

    @property
    def spent(self) -> bool:
        """True once pushed or released."""
        return self._spent

    def release(self) -> None:
        """Gives the slot back without pushing it."""
        if not self._spent:
            self._spent = True
            self.give_back()

    def give_back(self) -> None:
        """Returns the memory to the share."""
        block, self.block = self.block, None
        if block is not None:
            self._share.release(block)


def pushable(link: Link, slot: Slot, header: bytes) -> MemorySlot:
    """Returns `slot`, marked as pushed.

    Raises:
        InvalidInput: it is another link's, or was pushed or released, or the header is too long.
    """
    if not isinstance(slot, MemorySlot) or slot.link is not link:
        raise InvalidInput("slot", "was not exported by this link")
    if slot.spent:
        raise InvalidInput("slot", "was already pushed or released")
    if len(header) > MAX_HEADER_BYTES:
        raise InvalidInput("header", f"{len(header)} bytes exceed {MAX_HEADER_BYTES}")
    slot.spend()
    return slot


class Received:
    """A frame that arrived, and what to call when it is released."""

    __slots__ = ("_on_release", "capabilities", "header", "payload")

    def __init__(
        self,
        header: bytes,
        payload: memoryview,
        capabilities: Capabilities,
        on_release: Callable[[], None] | None,
    ) -> None:
        self.header = header
        self.payload = payload
        self.capabilities = capabilities
        self._on_release = on_release

    def release(self) -> None:
        """Gives the memory back to its owner. Idempotent."""
        on_release, self._on_release = self._on_release, None
        self.payload = EMPTY
        if on_release is not None:
            on_release()


def deliver(handler: FrameHandler, frame: ReceivedFrame) -> None:
    """Hands a frame over; a handler that fails loses that frame, not the connection."""
    try:
        handler(frame)
    except Exception:
        _log.exception("frame_handler_failed")
        frame.release()


def refused(transport: str, error: InvalidInput) -> None:
    """Notes that a peer sent what no peer of ours sends."""
    _log.warning("malformed_frame", transport=transport, error=error.message)


def lost(transport: str, why: str) -> PartitionLost:
    """Returns the error of a link whose peer is gone."""
    return PartitionLost(f"{transport} link lost: {why}")


def push_timed_out(transport: str, timeout_s: float) -> DeadlineExceeded:
    """Returns the error of a push the peer did not accept in time."""
    return DeadlineExceeded(
        f"the peer took no frame over {transport} for {timeout_s:g} s",
        details={"stage": "transfer"},
    )
