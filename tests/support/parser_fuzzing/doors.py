"""Targets: requests of clients over HTTP/1.1, as far as the gateway reads them itself."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from collections.abc import Iterator
from functools import cache
from typing import Any

from aiohttp import web
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.http_parser import HttpRequestParser

from catenary_gateway.endpoints.connections.http_call import HttpCall
from catenary_gateway.endpoints.connections.http_connection import HttpConnection
from catenary_gateway.endpoints.connections.library_handler import LibraryHandler
from catenary_gateway.endpoints.connections.request_headers import (
    LONGEST_BYTES,
    MOST_HEADERS,
    InferenceTarget,
    header_of,
    may_become_plain,
)
from catenary_gateway.endpoints.http_bodies import inflated
from catenary_services.errors import CatenaryError, InvalidInput, PayloadTooLarge
from parser_fuzzing.scripted import ScriptedTransport, fed, in_loop, settle
from parser_fuzzing.target import BrokenPromise, FuzzTarget

_INFER = "POST /v2/models/toy/infer HTTP/1.1\r\nHost: a\r\n"
_MOST_BODY = 1 << 16


class _AnyPermit:
    """Room for any body."""

    def hold(self, nbytes: int) -> None:
        assert nbytes <= _MOST_BODY


# ---- headers: two readers, one opinion ----


def _read_headers(data: bytes) -> None:
    """Compares what is read of headers with what aiohttp reads, which gets all others."""
    header = header_of(data)
    for end in range(1, len(data), 1 + len(data) // 8):
        if header is not None and not may_become_plain(data[:end]):
            raise BrokenPromise(f"its first {end} bytes seem not to be plain")
    if header is None:
        return
    found = in_loop(lambda: _by_library(data))
    if found is None:
        raise BrokenPromise("aiohttp refuses it")
    message, rest = found
    if rest:
        raise BrokenPromise("aiohttp finds something behind it")
    headers = {name.lower(): value for name, value in message.headers.items()}
    if headers != dict(header.headers):
        raise BrokenPromise(f"{headers} and {header.headers}")
    size = int(headers.get("content-length", "0"))
    if size != header.body_bytes or message.chunked or message.upgrade or message.should_close:
        raise BrokenPromise("aiohttp sees another end of the request")
    if header.target is not None:
        path = f"/v2/models/{header.target.model}"
        path += f"/versions/{header.target.version}" if header.target.version else ""
        if message.method != "POST" or message.path != f"{path}/infer":
            raise BrokenPromise(f"{message.method} {message.path} is taken for {header.target}")


def _by_library(data: bytes) -> Any:
    loop = asyncio.get_running_loop()
    parser = HttpRequestParser(
        BaseProtocol(loop),
        loop,
        2**16,
        max_line_size=LONGEST_BYTES,
        max_field_size=LONGEST_BYTES,
        max_headers=MOST_HEADERS,
        auto_decompress=False,
    )
    try:
        messages, _, rest = parser.feed_data(data)
    except HttpProcessingError:
        return None
    return (messages[0][0], rest) if len(messages) == 1 else None


def _headers() -> Iterator[bytes]:
    yield (_INFER + "Content-Length: 12\r\n\r\n").encode()
    yield b"GET /v2/health/live HTTP/1.1\r\nHost: a\r\nConnection: keep-alive\r\n\r\n"
    yield (_INFER + "Content-Length: 2\r\nX-A: b\r\nOrigin: c\r\n\r\n").encode()
    yield (_INFER + "Transfer-Encoding: chunked\r\n\r\n").encode()
    yield b"POST /v2/models/a.b~c/versions/1-2/infer HTTP/1.1\r\nhost:\r\ncontent-length:0\r\n\r\n"


# ---- connections ----


class _Door:
    """The owner of one connection, which reads every body and answers with its size."""

    scratch = memoryview(bytearray(64 * 1024))

    def __init__(self) -> None:
        self.answered: list[Any] = []
        self.trouble: list[Exception] = []

    def opened(self, connection: HttpConnection) -> None: ...

    def closed(self, connection: HttpConnection) -> None: ...

    def spoke(self, connection: HttpConnection) -> None: ...

    def library_handler(self, connection: HttpConnection) -> LibraryHandler:
        return LibraryHandler(
            connection,
            _library(),
            asyncio.get_running_loop(),
            access_log=None,
            auto_decompress=False,
            max_line_size=LONGEST_BYTES,
            max_field_size=LONGEST_BYTES,
            max_headers=MOST_HEADERS,
        )

    async def answer(self, call: HttpCall, target: InferenceTarget, address: str) -> list[bytes]:
        try:
            permit: Any = _AnyPermit()
            body = bytes(await call.body(_MOST_BODY, permit))
            if len(body) != call.announced_bytes:
                raise BrokenPromise("a body has another length than its headers say")
            self.answered.append((target, body))
        except CatenaryError as error:
            self.answered.append((target, error.reason))
        except Exception as error:
            self.trouble.append(error)
        return [b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"]


@cache
def _library() -> Any:
    async def answer(request: web.BaseRequest) -> web.Response:
        await request.read()
        return web.Response()

    return web.Server(answer)


def _read_connection(data: bytes) -> None:
    """Compares the requests in bytes that come at once with those in bytes that come in pieces."""
    whole = _served(b"\3" + data[1:])
    cut = _served(data)
    if whole != cut:
        raise BrokenPromise(f"in pieces it is {cut}, else {whole}")


def _served(data: bytes) -> list[Any]:
    door, transport = _Door(), ScriptedTransport()

    def make() -> HttpConnection:
        made = HttpConnection(door)
        made.connection_made(transport)
        return made

    connection: HttpConnection = in_loop(make)

    def take(piece: bytes) -> None:
        while piece:
            room = connection.get_buffer(-1)
            if not len(room):
                raise BrokenPromise("there is no room to read into")
            part, piece = piece[: len(room)], piece[len(room) :]
            room[: len(part)] = part
            connection.buffer_updated(len(part))

    try:
        fed(transport, data, take)
    finally:
        in_loop(lambda: connection.connection_lost(None))
        settle()
    if door.trouble:
        raise door.trouble[0]
    return door.answered


def _connections() -> Iterator[bytes]:
    infer = (_INFER + "Content-Length: 4\r\n\r\nabcd").encode()
    live = b"GET /v2/health/live HTTP/1.1\r\nHost: a\r\n\r\n"
    chunked = (_INFER + "Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n").encode()
    expects = (_INFER + "Expect: 100-continue\r\nContent-Length: 1\r\n\r\nx").encode()
    posted = b"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc"
    for at, each in enumerate(
        (infer + infer, live + infer, infer + chunked, posted + infer + live, expects, infer[:60])
    ):
        yield bytes((at,)) + each


# ---- compressed bodies ----


def _read_inflated(data: bytes) -> object:
    return inflated(data[1:], (31, 47)[data[0] & 1 if data else 0], _MOST_BODY)


def _inflated() -> Iterator[bytes]:
    for text in (b"", b"abc" * 9, bytes(1 << 20)):
        yield b"\0" + gzip.compress(text)
        yield b"\1" + zlib.compress(text)
    yield b"\0" + gzip.compress(b"a") + gzip.compress(b"b")


_WORDS = tuple(
    word.encode()
    for word in (
        "Content-Length: ",
        "Transfer-Encoding: chunked",
        "Connection: close",
        "Expect: 100-continue",
        "Upgrade: h2c",
        "\r\n\r\n",
        "\r\n",
        "HTTP/1.1",
        "/infer",
        _INFER,
    )
)
TARGETS = (
    FuzzTarget("doors/headers", _read_headers, (), _headers, words=_WORDS),
    FuzzTarget("doors/connection", _read_connection, (), _connections, 1024, _WORDS),
    FuzzTarget("doors/compressed", _read_inflated, (InvalidInput, PayloadTooLarge), _inflated),
)
