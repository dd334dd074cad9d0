"""The headers and trailers of answers, encoded; those of most answers are constants."""

from __future__ import annotations

import binascii
from collections.abc import Iterable
from typing import Final

import grpc

from catenary_services.http2.header_blocks import encoded

Pair = tuple[str, str | bytes]

_STATUS_200: Final = b"\x88"
"""":status: 200" of HPACK's static table."""
_CONTENT_TYPE: Final = encoded([(b"content-type", b"application/grpc")])
HEAD_BLOCK: Final = _STATUS_200 + _CONTENT_TYPE
"""The headers of an answer without metadata."""
_LONGEST_TRAILERS_BYTES: Final = 16 * 1024
_PLAIN: Final = frozenset(range(0x20, 0x7F)) - {ord("%")}


def head_block(metadata: Iterable[Pair]) -> bytes:
    """Returns the headers of an answer."""
    return HEAD_BLOCK + _metadata_block(metadata)


def trailers_block(code: grpc.StatusCode, message: str, metadata: Iterable[Pair]) -> bytes:
    """Returns the trailers of an answer; metadata that is too long is left out."""
    number: int = code.value[0]
    block = encoded([(b"grpc-status", str(number).encode())])
    if message:
        block += encoded([(b"grpc-message", _percent_encoded(message))])
    more = _metadata_block(metadata)
    return block + more if len(block) + len(more) <= _LONGEST_TRAILERS_BYTES else block


def http_error_block(status: int) -> bytes:
    """Returns the headers of the answer to what is no call of gRPC."""
    return encoded([(b":status", str(status).encode())])


def _metadata_block(metadata: Iterable[Pair]) -> bytes:
    return encoded([(key.lower().encode(), _value_of(key, value)) for key, value in metadata])


def _value_of(key: str, value: str | bytes) -> bytes:
    raw = value.encode("utf-8") if isinstance(value, str) else bytes(value)
    if key.endswith("-bin"):
        return binascii.b2a_base64(raw, newline=False).rstrip(b"=")
    return bytes(each if 0x20 <= each < 0x7F else 0x3F for each in raw)


def _percent_encoded(message: str) -> bytes:
    raw = message.encode("utf-8", "replace")
    if _PLAIN.issuperset(raw):
        return raw
    return b"".join(bytes((each,)) if each in _PLAIN else b"%%%02X" % each for each in raw)


OK_TRAILERS: Final = trailers_block(grpc.StatusCode.OK, "", ())
"""The trailers of an answer without metadata."""
