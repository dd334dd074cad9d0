"""A request to infer and its answer, however the connection is served: here, or by aiohttp."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from email.utils import formatdate
from http import HTTPStatus
from typing import NamedTuple, Protocol

from aiohttp.http import SERVER_SOFTWARE

from catenary_gateway.admission.concurrency_limiter import ConcurrencyPermit
from catenary_gateway.endpoints.error_forms import error_form
from catenary_services.errors import CatenaryError
from catenary_services.grpc.error_tables import http_headers, http_status

Body = bytes | memoryview
OK_LINE = "HTTP/1.1 200 OK\r\n"
JSON_TYPE = "application/json"
REQUEST_ID = "X-Request-Id"
_ERROR_TYPE = "application/json; charset=utf-8"
_COPIED_BYTES = 16 * 1024
"""Answers up to this size are written in one piece."""


class HttpCall(Protocol):
    """A request whose headers have arrived."""

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers, to be looked up by names in lower case."""
        ...

    @property
    def announced_bytes(self) -> int:
        """The size of the body as its headers say it; 0 if they do not."""
        ...

    async def body(self, most_bytes: int, permit: ConcurrencyPermit) -> Body:
        """Returns the body; see `http_bodies.body_of`.

        Raises:
            CatenaryError: It is too large, too slow, or not what its headers say.
        """
        ...


class HttpAnswer(NamedTuple):
    """The answer to a request, without the headers that every answer has."""

    status: int
    headers: Mapping[str, str]
    pieces: Sequence[Body]


def error_answer(path: str, error: CatenaryError, request_id: str = "") -> HttpAnswer:
    """Returns the answer that reports an error in the form of a path's protocol.

    `request_id` is the id that the caller gave, which some forms have, too.
    """
    form = error_form(path)
    headers = http_headers(error) | {"Content-Type": _ERROR_TYPE}
    if request_id and form.echoes_id:
        headers[REQUEST_ID] = request_id
    return HttpAnswer(http_status(error), headers, [json.dumps(form.body(error)).encode()])


class AnswerEncoder:
    """The HTTP/1.1 form of answers. The headers that all have are made once a second."""

    def __init__(self) -> None:
        self._made_s = 0
        self._common = ""

    def encoded(self, answer: HttpAnswer) -> list[Body]:
        """Returns the bytes of an answer, in few pieces."""
        status, headers, pieces = answer
        line = OK_LINE if status == HTTPStatus.OK else _line(status)
        size = sum(map(len, pieces))
        fields = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        head = f"{line}{fields}Content-Length: {size}\r\n{self._common_now()}".encode()
        if size <= _COPIED_BYTES:
            return [b"".join((head, *pieces))]
        return [head, *pieces]

    def _common_now(self) -> str:
        now_s = int(time.time())
        if now_s != self._made_s:
            self._made_s = now_s
            self._common = (
                f"Date: {formatdate(now_s, usegmt=True)}\r\nServer: {SERVER_SOFTWARE}\r\n\r\n"
            )
        return self._common


def _line(status: int) -> str:
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:  # a status that no standard has
        phrase = ""
    return f"HTTP/1.1 {status} {phrase}\r\n"
