"""The headers with which a call begins, read once for the same bytes."""

from __future__ import annotations

import binascii
from dataclasses import dataclass, field
from typing import Final

from catenary_services.http2.frames import PROTOCOL_ERROR, StreamViolation
from catenary_services.http2.header_blocks import Headers

Metadata = tuple[tuple[str, str | bytes], ...]

_PSEUDO: Final = frozenset((b":method", b":scheme", b":path", b":authority"))
_CONNECTION: Final = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade")
)
_RESERVED: Final = frozenset(
    (b"te", b"content-type", b"grpc-timeout", b"grpc-encoding", b"grpc-accept-encoding")
)
_UNITS_S: Final = {
    b"H": 3600.0,
    b"M": 60.0,
    b"S": 1.0,
    b"m": 1e-3,
    b"u": 1e-6,
    b"n": 1e-9,
}
_LONGEST_TIMEOUT: Final = 8
_FIELD_OVERHEAD: Final = 32
"""Bytes that HTTP/2 counts for each header beside name and value."""
_TOKEN: Final = frozenset(b"abcdefghijklmnopqrstuvwxyz0123456789_-.")


@dataclass(frozen=True, slots=True)
class RequestHead:
    """The content of the headers of a call."""

    path: str = ""
    """The method, as in "/package.Service/Method"."""
    metadata: Metadata = ()
    timeout_s: float | None = None
    """Seconds until the caller gives up."""
    encoding: str = "identity"
    """The way in which messages may be compressed."""
    http_status: int = 200
    """Another number where this is no call of gRPC."""
    size_bytes: int = field(default=0)
    """Bytes of all headers, as HTTP/2 counts them."""
    wrong: str = ""
    """The part that gRPC does not accept; "" if there is none."""


def head_of(headers: Headers) -> RequestHead | StreamViolation:
    """Returns what the headers of a stream say, or why they are none of HTTP/2."""
    pseudo: dict[bytes, bytes] = {}
    others: dict[bytes, bytes] = {}
    metadata: list[tuple[str, str | bytes]] = []
    wrong, size = "", 0
    for name, value in headers:
        size += len(name) + len(value) + _FIELD_OVERHEAD
        if name[:1] == b":":
            if name not in _PSEUDO or name in pseudo or metadata or others:
                return StreamViolation(PROTOCOL_ERROR, "the headers of HTTP/2 are wrong")
            pseudo[name] = value
        elif not name or name in _CONNECTION or not _TOKEN.issuperset(name):
            return StreamViolation(PROTOCOL_ERROR, "a header may not be there")
        elif name in _RESERVED:
            others[name] = value
        elif name[-4:] == b"-bin":
            pairs = _binary(name, value)
            wrong = wrong or ("" if pairs is not None else "metadata that is not base64")
            metadata.extend(pairs or ())
        elif value.isascii() and value.decode("ascii").isprintable():
            metadata.append((name.decode("ascii"), value.decode("ascii")))
        else:
            return StreamViolation(PROTOCOL_ERROR, "a header has characters that none may have")
    if not pseudo.get(b":path") or b":method" not in pseudo or b":scheme" not in pseudo:
        return StreamViolation(PROTOCOL_ERROR, "the headers of HTTP/2 are missing")
    timeout_s = None
    if b"grpc-timeout" in others:
        timeout_s = _seconds(others[b"grpc-timeout"])
        wrong = wrong or ("" if timeout_s is not None else "a grpc-timeout of another form")
    encoding = others.get(b"grpc-encoding", b"identity").decode("latin-1")
    return RequestHead(
        path=pseudo[b":path"].decode("latin-1"),
        metadata=tuple(metadata),
        timeout_s=timeout_s,
        encoding=encoding,
        http_status=_http_status(pseudo[b":method"], others.get(b"content-type", b"")),
        size_bytes=size,
        wrong=wrong,
    )


def _http_status(method: bytes, content_type: bytes) -> int:
    if method != b"POST":
        return 405
    kind = content_type.partition(b";")[0]
    is_grpc = kind == b"application/grpc" or kind.startswith(b"application/grpc+")
    return 200 if is_grpc else 415


def _seconds(timeout: bytes) -> float | None:
    number, unit = timeout[:-1], _UNITS_S.get(timeout[-1:])
    if unit is None or not number.isdigit() or len(number) > _LONGEST_TIMEOUT:
        return None
    return int(number) * unit


def _binary(name: bytes, value: bytes) -> list[tuple[str, str | bytes]] | None:
    """Returns the values of a binary header, which may stand joined by commas."""
    key = name.decode("ascii")
    parts = [part.strip().rstrip(b"=") for part in value.split(b",")]
    try:
        return [
            (key, binascii.a2b_base64(part + b"=" * (-len(part) % 4), strict_mode=True))
            for part in parts
        ]
    except binascii.Error:
        return None
