"""The bound on the memory of long messages that have arrived in part, over all streams."""

from __future__ import annotations

from typing import Protocol

from catenary_services.errors import Overloaded
from catenary_services.log import get_logger
from catenary_services.transport.frames import MessageKind

_FIRST_BYTES = 64 << 10
_RETRY_NS = 1_000_000_000

_log = get_logger("catenary_services.control")


class HoldsMemory(Protocol):
    """The part of a stream that gives up the memory it holds."""

    def close(self, error: Overloaded) -> None:
        """Ends the stream that holds it, with the reason told to the peer."""
        ...


class ArrivalBudget:
    """Counts the bytes of unfinished messages; above the bound, the stream that holds most ends."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._held: dict[HoldsMemory, int] = {}
        self._sum = 0

    @property
    def held(self) -> int:
        """Bytes of memory of all unfinished messages."""
        return self._sum

    def hold(self, stream: HoldsMemory, nbytes: int) -> None:
        """Notes that a stream holds `nbytes` bytes by now."""
        self._sum += nbytes - self._held.get(stream, 0)
        self._held[stream] = nbytes
        while self._sum > self._most_bytes:
            greediest = max(self._held, key=lambda each: self._held[each])
            _log.warning("message_cut_off", bytes=self._held[greediest])
            self.forget(greediest)
            why = "too much of unfinished messages is held"
            greediest.close(Overloaded(why, retry_after_ns=_RETRY_NS))

    def forget(self, stream: HoldsMemory) -> None:
        """Notes that a stream holds nothing any more."""
        self._sum -= self._held.pop(stream, 0)


class MessageBuffer:
    """The memory of a message that is longer than what is read at once.

    Its memory doubles as it arrives, so that a length alone costs the reader nothing.
    """

    __slots__ = ("_filled", "_memory", "_size", "kind")

    def __init__(self, kind: MessageKind, size: int, begun: memoryview) -> None:
        self.kind = kind
        self._size = size
        self._filled = len(begun)
        self._memory = bytearray(min(size, max(_FIRST_BYTES, 2 * self._filled)))
        self._memory[: self._filled] = begun

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return len(self._memory)

    @property
    def rest(self) -> memoryview:
        """The memory for the next bytes."""
        return memoryview(self._memory)[self._filled :]

    @property
    def is_complete(self) -> bool:
        """True once all of it is there."""
        return self._filled == self._size

    def arrived(self, nbytes: int) -> None:
        """Notes that `rest` has been filled so far."""
        self._filled += nbytes
        if self._filled == len(self._memory) < self._size:
            larger = bytearray(min(self._size, 2 * len(self._memory)))
            larger[: self._filled] = self._memory
            self._memory = larger

    def content(self) -> bytes:
        """Returns the whole message."""
        return bytes(self._memory)
