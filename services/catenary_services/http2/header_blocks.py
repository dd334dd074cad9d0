"""Header blocks: decoded once for the same bytes, and encoded so that nothing has to be remembered.

A block that adds nothing to HPACK's dynamic table means the same as long as the table does not
change. Callers repeat themselves, so that most blocks are looked up. Table and Huffman's code are
those of the library `hpack`; its decoder takes four times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from hpack import HPACKError
from hpack.huffman_table import decode_huffman
from hpack.table import HeaderTable

from catenary_services.http2.frames import (
    COMPRESSION_ERROR,
    ENHANCE_YOUR_CALM,
    ConnectionViolation,
)

Headers = Sequence[tuple[bytes, bytes]]
T = TypeVar("T")

_LONGEST_KNOWN_BYTES = 2_048
"""The longest list of headers that is remembered, and the longest block."""
_MOST_KNOWN_BYTES = 4_096
"""The most bytes of blocks, their lists of headers as HTTP/2 counts these, and what else they cost,
that a connection remembers beside the last; there are thousands of connections."""
_KNOWN_OVERHEAD = 256
"""Bytes of what is made of a block, beside those of its headers."""
_SMALL = 0x7F
_TABLE_BYTES = 4_096
"""The size of the dynamic table that HTTP/2 has where no setting says otherwise."""
_FIELD_OVERHEAD = 32
"""Bytes that HTTP/2 counts for each header beside name and value."""
_ENTRY_BYTES = 128
"""Bytes that a header of the dynamic table takes here at least."""


class _NotedTable(HeaderTable):
    """A dynamic table that counts its changes."""

    changes = 0

    def add(self, name: bytes, value: bytes) -> None:
        self.changes += 1
        super().add(name, value)

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory that the table takes, about."""
        return int(self._current_size) + _ENTRY_BYTES * len(self.dynamic_entries)

    @property
    def maxsize(self) -> int:
        return self._maxsize

    @maxsize.setter
    def maxsize(self, newmax: int) -> None:
        self.changes += 1
        # A property of a parent is set through the parent.
        HeaderTable.maxsize.fset(self, newmax)  # type: ignore[attr-defined]


class HeaderDecoder(Generic[T]):
    """The decoder of one connection."""

    def __init__(self, parse: Callable[[Headers], T], longest_list_bytes: int) -> None:
        """Creates a decoder.

        Args:
            parse: Makes of the headers of a block what the decoder returns; must not raise.
            longest_list_bytes: The most that a block may unpack to, as HTTP/2 counts.
        """
        self._parse = parse
        self._longest_list_bytes = longest_list_bytes
        self._table = _NotedTable()
        self._known: dict[bytes, T] = {}
        self._known_bytes = 0

    @property
    def table_bytes(self) -> int:
        """Bytes of memory that the dynamic table takes, which its peer has filled."""
        return self._table.memory_bytes

    def decode(self, block: bytes) -> T:
        """Returns what `parse` made of a block.

        Raises:
            ConnectionViolation: It cannot be decoded, or has too much in it.
        """
        known = self._known.get(block)
        if known is not None:
            return known
        before = self._table.changes
        try:
            fields, size = self._fields(block)
            made = self._parse(fields)
        except (HPACKError, IndexError):
            raise ConnectionViolation(COMPRESSION_ERROR, "the headers cannot be read") from None
        if self._table.changes != before:
            self._forget_known()
        elif size <= _LONGEST_KNOWN_BYTES >= len(block):
            nbytes = len(block) + size + _KNOWN_OVERHEAD
            if self._known_bytes + nbytes > _MOST_KNOWN_BYTES:
                self._forget_known()
            self._known[block] = made
            self._known_bytes += nbytes
        return made

    def let_go(self) -> None:
        """Forgets what a connection that is over has said before."""
        self._forget_known()
        self._table = _NotedTable()

    def _forget_known(self) -> None:
        self._known.clear()
        self._known_bytes = 0

    def _fields(self, block: bytes) -> tuple[Headers, int]:
        """Returns the headers in a block, and their size.

        Raises:
            ConnectionViolation: They are too large.
            HPACKError: They cannot be read.
            IndexError: The block ends too soon.
        """
        fields: list[tuple[bytes, bytes]] = []
        table, at, size = self._table, 0, 0
        while at < len(block):
            first = block[at]
            if first & 0x80:
                index, at = _integer(block, at, 0x7F)
                name, value = table.get_by_index(index)
            elif first & 0xE0 == 0x20:
                most, at = _integer(block, at, 0x1F)
                if fields or most > _TABLE_BYTES:
                    raise HPACKError
                table.maxsize = most
                continue
            else:
                index, at = _integer(block, at, 0x3F if first & 0x40 else 0x0F)
                if index:
                    name = table.get_by_index(index)[0]
                else:
                    name, at = _text(block, at)
                value, at = _text(block, at)
                if first & 0x40:
                    table.add(name, value)
            size += len(name) + len(value) + _FIELD_OVERHEAD
            if size > self._longest_list_bytes:
                raise ConnectionViolation(ENHANCE_YOUR_CALM, "the headers are too large")
            fields.append((name, value))
        return fields, size


def _integer(block: bytes, at: int, mask: int) -> tuple[int, int]:
    """Returns a number that begins within a byte, and where it ends."""
    value = block[at] & mask
    at += 1
    if value < mask:
        return value, at
    for shift in range(0, 29, 7):
        more = block[at]
        at += 1
        value += (more & 0x7F) << shift
        if more < 0x80:
            return value, at
    raise HPACKError


def _text(block: bytes, at: int) -> tuple[bytes, int]:
    """Returns a text, and where it ends."""
    is_packed = block[at] & 0x80
    size, at = _integer(block, at, 0x7F)
    end = at + size
    if end > len(block):
        raise HPACKError
    raw = block[at:end]
    return (bytes(decode_huffman(raw)) if is_packed else raw), end


def encoded(headers: Headers) -> bytes:
    """Returns a block of headers that leaves the dynamic table of the peer alone."""
    return b"".join(
        b"\0" + _length(len(name)) + name + _length(len(value)) + value for name, value in headers
    )


def _length(size: int) -> bytes:
    if size < _SMALL:
        return bytes((size,))
    made = bytearray((_SMALL,))
    size -= _SMALL
    while size >= 0x80:
        made.append(size & 0x7F | 0x80)
        size >>= 7
    made.append(size)
    return bytes(made)
