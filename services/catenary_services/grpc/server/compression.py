"""Messages that a caller compressed, inflated within bounds."""

from __future__ import annotations

import zlib
from typing import Final

from catenary_services.errors import InvalidInput, PayloadTooLarge

_WINDOW_BITS: Final = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
ENCODINGS: Final = frozenset(("identity", *_WINDOW_BITS))
"""The names of the encodings that are understood."""


def inflated(data: bytes | bytearray, encoding: str, longest_bytes: int) -> bytes:
    """Returns what was compressed.

    Raises:
        InvalidInput: The bytes are not of this encoding.
        PayloadTooLarge: They stand for more than `longest_bytes`.
    """
    bits = _WINDOW_BITS.get(encoding)
    if bits is None:
        raise InvalidInput("request", "is compressed although its headers name no encoding")
    machine = zlib.decompressobj(bits)
    try:
        made = machine.decompress(data, longest_bytes + 1)
    except zlib.error:
        raise InvalidInput("request", f"is no {encoding}") from None
    if len(made) > longest_bytes:
        why = f"the message unpacks to more than {longest_bytes} bytes, which are accepted"
        raise PayloadTooLarge(why)
    if not machine.eof:
        raise InvalidInput("request", f"is no whole {encoding}")
    return made
