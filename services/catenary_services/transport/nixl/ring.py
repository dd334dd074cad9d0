"""The memory that a receiver lends a sender: a ring of equal slots, as both sides see it.

The sender chooses the slots of a frame and the receiver checks the choice, so that both keep the
same record of which are taken. Pure: whatever a peer says comes in as bytes and numbers.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

from catenary_services.errors import InvalidInput

_MOST_RING_BYTES = 1 << 30
_MOST_SLOTS = 1 << 14
_MOST_METADATA_BYTES = 64 << 10
"""The longest metadata; those seen have some hundred bytes."""
_MOST_WORD_BYTES = 256
_HEAD = struct.Struct("<QIIHH")
_DIGEST_BYTES = 32


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
    """The words in which a receiver describes the ring that it lends.

    NIXL does not check the metadata that it reads: of those with changed bytes some ended the
    process. Therefore they travel with a digest, and are for the same version of NIXL only. A peer
    that lies with a right digest can still do harm, as it could by what it writes.
    """

    address: int
    """Address of the first slot in the receiver's process."""
    slots: int
    slot_bytes: int
    name: str
    """Name under which the receiver is known to NIXL."""
    version: str
    """Version of the receiver's NIXL."""
    metadata: bytes
    """NIXL's own description of the receiver and of this memory."""

    def encode(self) -> bytes:
        """Returns the bytes that `decode` reads."""
        name, version = self.name.encode(), self.version.encode()
        head = _HEAD.pack(self.address, self.slots, self.slot_bytes, len(name), len(version))
        body = b"".join((head, name, version, self.metadata))
        return hashlib.sha256(body).digest() + body

    @classmethod
    def decode(cls, data: bytes) -> RingDescription:
        """Reads what a peer sent.

        Raises:
            InvalidInput: It is no description, or one of more than a ring may be.
        """
        digest, body = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
        if len(body) < _HEAD.size or hashlib.sha256(body).digest() != digest:
            raise InvalidInput("ring", "is damaged")
        address, slots, slot_bytes, name_bytes, version_bytes = _HEAD.unpack_from(body)
        if not 1 <= slots <= _MOST_SLOTS:
            raise InvalidInput("ring.slots", f"{slots} slots")
        if not 1 <= slots * slot_bytes <= _MOST_RING_BYTES:
            raise InvalidInput("ring.slot_bytes", f"{slots} slots of {slot_bytes} bytes")
        if address == 0 or address + slots * slot_bytes > 1 << 64:
            raise InvalidInput("ring.address", "is in no memory")
        at_version = _HEAD.size + name_bytes
        at_metadata = at_version + version_bytes
        metadata = body[at_metadata:]
        if not 1 <= len(metadata) <= _MOST_METADATA_BYTES:
            raise InvalidInput("ring.metadata", f"{len(metadata)} bytes")
        name = _word("ring.name", body[_HEAD.size : at_version])
        version = _word("ring.version", body[at_version:at_metadata])
        return cls(address, slots, slot_bytes, name, version, metadata)


def _word(field: str, data: bytes) -> str:
    text = data.decode("utf-8", "replace")
    if not 1 <= len(data) <= _MOST_WORD_BYTES or not text.isprintable():
        raise InvalidInput(field, "is none")
    return text
