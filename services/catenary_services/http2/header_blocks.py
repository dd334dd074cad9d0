"""Header blocks: decoded once for the same bytes, and encoded so that nothing has to be remembered.

A block that adds nothing to HPACK's dynamic table means the same as long as the table does not
change. Callers repeat themselves, so that nearly every block is looked up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from hpack import Decoder, HPACKError, OversizedHeaderListError
from hpack.table import HeaderTable

from catenary_services.http2.frames import (
    COMPRESSION_ERROR,
    ENHANCE_YOUR_CALM,
    ConnectionViolation,
)

Headers = Sequence[tuple[bytes, bytes]]
T = TypeVar("T")

_MOST_KNOWN = 64
_LONGEST_KNOWN_BYTES = 1_024
_SMALL = 0x7F


class _NotedTable(HeaderTable):
    """A dynamic table that counts its changes."""

    changes = 0

    def add(self, name: bytes, value: bytes) -> None:
        self.changes += 1
        super().add(name, value)

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
        self._table = _NotedTable()
        self._decoder = Decoder(longest_list_bytes)
        self._decoder.header_table = self._table
        self._known: dict[bytes, T] = {}

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
            headers = self._decoder.decode(block, raw=True)
        except OversizedHeaderListError:
            raise ConnectionViolation(ENHANCE_YOUR_CALM, "the headers are too large") from None
        except (HPACKError, IndexError, ValueError):
            raise ConnectionViolation(COMPRESSION_ERROR, "the headers cannot be read") from None
        made = self._parse([(bytes(name), bytes(value)) for name, value, *_ in headers])
        if self._table.changes != before:
            self._known.clear()
        elif len(block) <= _LONGEST_KNOWN_BYTES:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[block] = made
        return made


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
