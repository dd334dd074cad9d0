"""What every HTTP route of a gateway has in common."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from gateway.front_desk import FrontDesk
from services.error_tables import (
    error_of_exception,
    http_body,
    http_headers,
    http_status,
    openai_body,
)
from services.errors import CatenaryError, DeadlineExceeded, InvalidInput, PayloadTooLarge

DESK: web.AppKey[FrontDesk] = web.AppKey("desk", FrontDesk)
OPENAI_PREFIX = "/v1/"
REQUEST_ID = "X-Request-Id"
BODY_TIMEOUT_S = 60.0
"""A client that sends slower than this is cut off: it holds admitted bytes."""
_LONGEST_ID = 256

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turns whatever a route raises into the error body its clients parse."""
    try:
        return await handler(request)
    except web.HTTPRequestEntityTooLarge:
        return error_response(request, PayloadTooLarge("the body is larger than accepted"))
    except web.HTTPException as exc:
        # aiohttp's own: no such route, wrong method, a body it could not read.
        return _plain_error(request, exc)
    except Exception as exc:
        return error_response(request, error_of_exception(exc))


def error_response(request: web.Request, error: CatenaryError) -> web.Response:
    """Returns `error` as an answer to `request`."""
    openai = request.path.startswith(OPENAI_PREFIX)
    headers = http_headers(error)
    request_id = request_id_of(request) if openai else ""
    if request_id:
        headers[REQUEST_ID] = request_id
    response = web.json_response(
        openai_body(error) if openai else http_body(error),
        status=http_status(error),
        headers=headers,
    )
    if request.content.exception() is not None:
        # The rest of a broken body cannot be told from the next request; say so.
        response.force_close()
    return response


def json_response(
    document: object, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    """Returns `document` as JSON."""
    return web.Response(
        body=json.dumps(document).encode(),
        status=status,
        headers=headers,
        content_type="application/json",
    )


def request_id_of(request: web.Request) -> str:
    """Returns the id the caller gave, shortened if too long; empty if none that can be echoed."""
    given = request.headers.get(REQUEST_ID, "")[:_LONGEST_ID]
    return given if given.isprintable() else ""


def announced_size(request: web.Request, largest: int) -> int:
    """Returns how many bytes the body may turn out to have."""
    compressed = request.headers.get("Content-Encoding", "identity") != "identity"
    length = request.content_length
    return largest if compressed or length is None else length


async def body_of(request: web.Request, most_bytes: int | None = None) -> bytes:
    """Returns the body, decompressed.

    Args:
        request: Whose.
        most_bytes: More is refused as soon as it is there; None: the limit of every request.

    Raises:
        PayloadTooLarge: it has more than `most_bytes`.
        DeadlineExceeded: it came too slowly.
        InvalidInput: it is not compressed as announced.
    """
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            if most_bytes is None:
                return await request.read()
            body = bytearray()
            async for chunk in request.content.iter_any():
                body += chunk
                if len(body) > most_bytes:
                    raise PayloadTooLarge(f"the body has more than {most_bytes} bytes")
            return bytes(body)
    except TimeoutError:
        raise DeadlineExceeded(
            "the body did not arrive in time", details={"stage": "arrival"}
        ) from None
    except (web.RequestPayloadError, HttpProcessingError):
        raise InvalidInput("body", "does not decompress as its Content-Encoding says") from None


def bearer(request: web.Request) -> str | None:
    """Returns the key the caller presented."""
    return request.headers.get("Authorization")


def _plain_error(request: web.Request, exc: web.HTTPException) -> web.Response:
    message = f"{exc.reason}: {request.method} {request.path[:200]}"
    body: dict[str, object] = {"error": message}
    if request.path.startswith(OPENAI_PREFIX):
        detail = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
        body = {"error": detail}
    headers = {"Allow": exc.headers["Allow"]} if "Allow" in exc.headers else {}
    return web.json_response(body, status=exc.status, headers=headers)
