"""What is plain is read as aiohttp reads it; whatever could be read in two ways is not plain."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from unittest import mock

import pytest
from aiohttp.http_parser import HttpRequestParser
from hypothesis import example, given, settings
from hypothesis import strategies as st

from catenary_gateway.endpoints.connections.request_headers import (
    END,
    LONGEST_BYTES,
    header_of,
    may_become_plain,
)

INFER = b"POST /v2/models/toy/infer HTTP/1.1\r\n"
HOST = b"Host: a\r\n"
SIZE = b"Content-Length: 3\r\n"
BEFORE = HOST + SIZE


def test_a_plain_request_says_its_headers_its_size_and_what_to_infer() -> None:
    data = INFER + HOST + b"X-Request-ID:  me \t\r\n" + SIZE + b"\r\n"
    found = header_of(data)
    assert found is not None
    assert found.headers == {"host": "a", "x-request-id": "me", "content-length": "3"}
    assert found.body_bytes == 3
    assert found.target == ("toy", "")


@pytest.mark.parametrize(
    ("path", "target"),
    [
        ("/v2/models/toy/versions/7/infer", ("toy", "7")),
        ("/v2/models/a.b-c_d~e/infer", ("a.b-c_d~e", "")),
        ("/v2/models/../infer", None),
        ("/v2/models/%74oy/infer", None),
        ("/v2/models/toy/infer?a=b", None),
        ("/v2/models/toy/infer/", None),
        ("/v2/models//infer", None),
        ("/v2/models/toy/versions/infer", None),
        ("/v2/models/toy", None),
    ],
)
def test_only_paths_of_inferences_name_a_target(path: str, target: object) -> None:
    found = header_of(f"POST {path} HTTP/1.1\r\n".encode() + BEFORE + b"\r\n")
    assert found is not None
    assert found.target == target


@pytest.mark.parametrize(
    ("method", "more"),
    [
        (b"GET", SIZE),
        (b"POST", b""),
        (b"POST", SIZE + b"Origin: http://page.example\r\n"),
        (b"POST", SIZE + b"Content-Encoding: gzip\r\n"),
    ],
)
def test_other_requests_are_plain_but_for_aiohttp(method: bytes, more: bytes) -> None:
    found = header_of(method + INFER.removeprefix(b"POST") + HOST + more + b"\r\n")
    assert found is not None
    assert found.target is None


@pytest.mark.parametrize(
    "lines",
    [
        SIZE + b"Transfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: chunked\r\n",
        SIZE + SIZE,
        SIZE + b"content-length: 4\r\n",
        b"Content-Length: 3, 3\r\n",
        b"Content-Length: +3\r\n",
        b"Content-Length: 0x3\r\n",
        b"Content-Length: \r\n",
        b"Content-Length: " + b"9" * 19 + b"\r\n",
        b"Content-Length : 3\r\n",
        b" Content-Length: 3\r\n",
        HOST + b" folded: 3\r\n",
        HOST + b"\tfolded\r\n",
        SIZE + b"no colon\r\n",
        SIZE + b": no name\r\n",
        SIZE + b"X: \0\r\n",
        SIZE + b"X: a\rb\r\n",
        SIZE + b"X: a\nContent-Length: 4\r\n",
        SIZE + b"X: \xc3\xa4\r\n",
        SIZE + b"Expect: 100-continue\r\n",
        SIZE + b"Upgrade: websocket\r\nConnection: Upgrade\r\n",
        SIZE + b"Connection: close\r\n",
        SIZE + b"Connection: keep-alive, close\r\n",
        SIZE + b"Proxy-Connection: close\r\n",
        b"".join(b"X-%d: a\r\n" % at for at in range(101)),
        b"X: " + b"a" * LONGEST_BYTES + b"\r\n",
        HOST,
    ],
)
def test_what_could_be_read_in_two_ways_or_asks_for_more_is_not_plain(lines: bytes) -> None:
    assert header_of(INFER + HOST + b"\r\n") is not None
    assert header_of(INFER + HOST + lines + b"\r\n") is None


@pytest.mark.parametrize(
    "line",
    [
        b"POST /v2/models/toy/infer HTTP/1.0\r\n",
        b"POST  /v2/models/toy/infer HTTP/1.1\r\n",
        b"POST /v2/models/toy/infer  HTTP/1.1\r\n",
        b"POST http://a/v2/models/toy/infer HTTP/1.1\r\n",
        b"post /v2/models/toy/infer HTTP/1.1\r\n",
        b"POST /v2/models/toy/infer HTTP/1.1\n",
        b"CONNECT /v2/models/toy/infer HTTP/1.1\r\n",
        b"\r\n" + INFER,
        b"",
    ],
)
def test_lines_of_other_forms_are_not_plain(line: bytes) -> None:
    assert header_of(INFER + BEFORE + b"\r\n") is not None
    assert header_of(line + BEFORE + b"\r\n") is None
    assert header_of(INFER + SIZE + b"\r\n") is None  # HTTP/1.1 demands to be told the host


PLAIN = INFER + HOST + SIZE + b"X-Empty:\r\nX-Long: " + b"a" * 300 + b"\r\n\r\n"


def test_every_beginning_of_a_plain_request_may_become_one() -> None:
    assert header_of(PLAIN) is not None
    for end in range(1, PLAIN.index(END) + len(END)):
        assert may_become_plain(PLAIN[:end]), PLAIN[:end]


@pytest.mark.parametrize(
    "begun",
    [
        b"\x16\x03\x01",
        b"get /",
        b"GET a",
        b"GET /\n",
        b"GET / HTTP/1.1\n",
        b"GET / HTTP/1.1\r\nHost\r\n",
        b"GET / HTTP/1.1\r\nHost a",
        b"GET / HTTP/1.1\r\nHost: a\n",
        b"GET / HTTP/1.1\r\n Host: a",
        b"GET / HTTP/1.1\r\nX: " + b"a" * LONGEST_BYTES,
    ],
)
def test_what_cannot_become_plain_is_left_to_aiohttp_at_once(begun: bytes) -> None:
    assert not may_become_plain(begun)


PIECES = [
    b"POST /v2/models/toy/infer HTTP/1.1",
    b"GET /v2 HTTP/1.1",
    b"PUT /a%20b?c#d HTTP/1.1",
    b"Content-Length: 3",
    b"content-length:0",
    b"Content-Length: 03",
    b"Content-Length: 4",
    b"Content-Length: -1",
    b"Transfer-Encoding: chunked",
    b"Transfer-Encoding : chunked",
    b"Transfer-Encoding:\tchunked",
    b"Connection: keep-alive",
    b"Connection: close",
    b"Connection: upgrade",
    b"Upgrade: websocket",
    b"Host: a",
    b"Host: b",
    b"X-A: \t a\tb \t",
    b"X-A:",
    b"!#$%&'*+-.^_`|~: ~",
    b" folded: a",
    b"X\x00: a",
    b"X: \x7f",
    b": a",
]
ENDS = [b"\r\n"] * 8 + [b"\n", b"\r", b"\r\n\r\n", b"\r\r\n", b" \r\n"]


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.sampled_from(PIECES), min_size=1, max_size=7),
    st.lists(st.sampled_from(ENDS), min_size=7, max_size=7),
)
@example(PIECES[:1] + PIECES[3:4], [b"\r\n"] * 7)
def test_what_is_plain_is_read_by_aiohttp_in_the_same_way(
    pieces: list[bytes], ends: list[bytes]
) -> None:
    lines = [piece + end for piece, end in zip(pieces, ends, strict=False)]
    text = b"".join((lines[0], HOST, *lines[1:], b"\r\n"))
    data = text[: text.index(END) + len(END)] if END in text else text
    found = header_of(data)
    if found is None:
        return
    loop = asyncio.new_event_loop()
    try:
        parser = HttpRequestParser(
            mock.Mock(), loop, 2**16, max_line_size=8190, max_field_size=8190
        )
        nexts = b"GET /next HTTP/1.1\r\nHost: a\r\n\r\n"
        messages, _, tail = parser.feed_data(data + bytes(found.body_bytes) + nexts)
    finally:
        loop.close()
    (message, _), (behind, _) = messages
    assert behind.path == "/next"
    assert not tail
    assert {k.lower(): v for k, v in message.headers.items()} == found.headers
    assert not message.chunked
    assert not message.upgrade
    assert not message.should_close
    if found.target is not None:
        assert (message.method, message.path) == ("POST", "/v2/models/toy/infer")


def test_the_pieces_above_are_plain_often_enough_to_mean_something() -> None:
    lines = [piece + b"\r\n" for piece in PIECES]
    line = lines[0] + HOST
    assert sum(header_of(line + one + b"\r\n") is not None for one in lines) > 5
    assert sum(header_of(line + a + b + b"\r\n") is None for a, b in pairwise(lines)) > 5
