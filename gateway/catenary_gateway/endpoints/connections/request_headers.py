"""Reading of the headers of plain HTTP/1.1 requests, which is most of what a gateway is sent.

What is plain can be read in one way only: no header is folded or comes twice, the body is as long
as a header says, and nothing asks for another protocol. Everything else is left to aiohttp, which
reads it or refuses it. So nothing is refused here, and there are no two opinions of where a request
ends.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

LONGEST_BYTES = 8190
"""The most bytes of a request's line and headers together. aiohttp has this limit for each line, so
that whatever is plain is within aiohttp's limits as well."""
MOST_HEADERS = 100
END = b"\r\n\r\n"

_LINE = rb"(DELETE|GET|HEAD|OPTIONS|PATCH|POST|PUT) (/[!-~]*) HTTP/1\.1\r\n"
_NAME = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_HEADERS = rb"((?:" + _NAME + rb":[\t -~]*\r\n)*)"
_WHOLE = re.compile(_LINE + _HEADERS + rb"\r\n")
_BEGUN_LINE = re.compile(rb"[A-Z]{1,7}(?: (?:/[!-~]*(?: [HTP/1.]{0,8}\r?)?)?)?")
_BEGUN_HEADERS = re.compile(_LINE + _HEADERS + rb"(?:" + _NAME + rb"(?::[\t -~]*)?)?\r?")
_INFER = re.compile(
    r"/v2/models/(?P<model>\w[\w.~-]*)(?:/versions/(?P<version>\w[\w.~-]*))?/infer", re.ASCII
)
_SIZE = re.compile(r"[0-9]{1,18}")
_NOT_PLAIN = frozenset(
    (
        "expect",
        "http2-settings",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    )
)
_NOT_OURS = frozenset(("content-encoding", "origin"))
"""Headers of plain requests that aiohttp answers all the same: bodies are compressed, or web pages
ask, which are told more (`cross_origin`)."""


class InferenceTarget(NamedTuple):
    """The model that a path asks to infer, and its version; "" if it names none."""

    model: str
    version: str


class RequestHeader(NamedTuple):
    """The line and the headers of a plain request."""

    headers: Mapping[str, str]
    """The headers by their names in lower case."""
    body_bytes: int
    target: InferenceTarget | None
    """The model to infer; None if the request is not one that a connection answers itself."""


def header_of(data: bytes) -> RequestHeader | None:
    """Returns what `data`, which ends with an empty line, says; None if it is not plain."""
    found = _WHOLE.fullmatch(data) if len(data) <= LONGEST_BYTES else None
    if found is None:
        return None
    method, path, lines = (part.decode("ascii") for part in found.groups())
    headers: dict[str, str] = {}
    fields = lines.split("\r\n")[:-1]
    for line in fields:
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip(" \t")
    if len(headers) != len(fields) or len(fields) > MOST_HEADERS:
        return None
    if "host" not in headers or not _NOT_PLAIN.isdisjoint(headers):
        return None
    if headers.get("connection", "keep-alive").lower() != "keep-alive":
        return None
    size = headers.get("content-length", "0")
    if not _SIZE.fullmatch(size):
        return None
    target: InferenceTarget | None = None
    asked = _INFER.fullmatch(path) if method == "POST" and "content-length" in headers else None
    if asked is not None and _NOT_OURS.isdisjoint(headers):
        target = InferenceTarget(asked["model"], asked["version"] or "")
    return RequestHeader(headers, int(size), target)


def may_become_plain(data: bytes) -> bool:
    """Returns whether `data`, which has no empty line yet, may be how a plain request begins."""
    if len(data) > LONGEST_BYTES:
        return False
    found = _BEGUN_HEADERS if b"\n" in data else _BEGUN_LINE
    return found.fullmatch(data) is not None
