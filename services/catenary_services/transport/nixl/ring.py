"""The memory that a receiver lends a sender: a ring of equal slots, as both sides see it.

The sender chooses the slots of a frame and the receiver checks the choice, so that both keep the
same record of which are taken. Pure: whatever a peer says comes in as bytes and numbers.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from catenary_services.errors import InvalidInput

MOST_RING_BYTES = 1 << 30
MOST_SLOTS = 1 << 14
MOST_METADATA_BYTES = 64 << 10
"""The longest description of a peer's memory; those seen have some hundred bytes."""
MOST_NAME_BYTES = 256

_HEAD = struct.Struct("<QIIH")


class SlotRuns:
    """The slots of a ring, and the runs of adjacent slots that frames take.

    Invariant: no two runs share a slot.
    """

    def __init__(self, slots: int, slot_bytes: int) -> None:
        """Begins with `slots` free slots of `slot_bytes` each."""
        self.slot_bytes = slot_bytes
        self._free = bytearray(b"\1" * slots)
        self._runs: dict[int, int] = {}
        """Length of each taken run, by its first slot."""

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return len(self._free) * self.slot_bytes

    @property
    def is_unused(self) -> bool:
        """True if no slot is taken."""
        return not self._runs

    def take_any(self, nbytes: int) -> int | None:
        """Takes the first free run that holds `nbytes`; returns its first slot, or None."""
        first = self._free.find(b"\1" * self._length(nbytes))
        if first < 0:
            return None
        self._mark(first, self._length(nbytes))
        return first

    def take(self, first: int, nbytes: int) -> None:
        """Takes the run that begins at slot `first` and holds `nbytes`.

        Raises:
            InvalidInput: It is not inside of the ring, is empty or not free.
        """
        length = self._length(nbytes)
        if nbytes < 1 or first + length > len(self._free):
            raise InvalidInput("slot", f"{nbytes} bytes at slot {first} are not in the ring")
        if self._free.count(b"\1", first, first + length) != length:
            raise InvalidInput("slot", f"slot {first} was not released")
        self._mark(first, length)

    def give_back(self, first: int) -> None:
        """Frees the run that begins at slot `first`.

        Raises:
            InvalidInput: No run that is taken begins there.
        """
        length = self._runs.pop(first, None)
        if length is None:
            raise InvalidInput("slot", f"slot {first} was released and had not been taken")
        self._free[first : first + length] = b"\1" * length

    def _length(self, nbytes: int) -> int:
        return -(-nbytes // self.slot_bytes)

    def _mark(self, first: int, length: int) -> None:
        self._free[first : first + length] = bytes(length)
        self._runs[first] = length


@dataclass(frozen=True, slots=True)
class RingDescription:
    """What a receiver says of the ring that it lends."""

    address: int
    """Address of the first slot in the receiver's process."""
    slots: int
    slot_bytes: int
    name: str
    """Name under which the receiver is known to NIXL."""
    metadata: bytes
    """NIXL's own description of the receiver and of this memory."""

    def encode(self) -> bytes:
        """Returns the bytes that `decode` reads."""
        name = self.name.encode()
        head = _HEAD.pack(self.address, self.slots, self.slot_bytes, len(name))
        return b"".join((head, name, self.metadata))

    @classmethod
    def decode(cls, data: bytes) -> RingDescription:
        """Reads what a peer sent.

        Raises:
            InvalidInput: It is no description, or one of more than a ring may be.
        """
        if len(data) < _HEAD.size:
            raise InvalidInput("ring", "is too short")
        address, slots, slot_bytes, name_bytes = _HEAD.unpack_from(data)
        if not 1 <= slots <= MOST_SLOTS:
            raise InvalidInput("ring.slots", f"{slots} slots")
        if not 1 <= slots * slot_bytes <= MOST_RING_BYTES:
            raise InvalidInput("ring.slot_bytes", f"{slots} slots of {slot_bytes} bytes")
        if address == 0 or address + slots * slot_bytes > 1 << 64:
            raise InvalidInput("ring.address", "is in no memory")
        end = _HEAD.size + name_bytes
        name = data[_HEAD.size : end].decode("utf-8", "replace")
        if not 1 <= name_bytes <= MOST_NAME_BYTES or not name.isprintable():
            raise InvalidInput("ring.name", "is none")
        metadata = data[end:]
        if not 1 <= len(metadata) <= MOST_METADATA_BYTES:
            raise InvalidInput("ring.metadata", f"{len(metadata)} bytes")
        return cls(address, slots, slot_bytes, name, metadata)
