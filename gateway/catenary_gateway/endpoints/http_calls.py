"""Helpers that all HTTP routes of a gateway share."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping

from aiohttp import web
from aiohttp.typedefs import Middleware

from catenary_gateway.admission.request_pipeline import Caller, RequestPipeline
from catenary_gateway.endpoints.connections.http_call import (
    JSON_TYPE,
    REQUEST_ID,
    error_answer,
)
from catenary_gateway.endpoints.error_forms import error_form
from catenary_services.errors import CatenaryError, ModelNotFound, PayloadTooLarge, forget_frames
from catenary_services.grpc.error_tables import error_of_exception
from catenary_services.security.keys import Principal

PIPELINE: web.AppKey[RequestPipeline] = web.AppKey("pipeline", RequestPipeline)
_LONGEST_ID = 256

_NO_ROUTE = ModelNotFound("no such route")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def errors_as_json(pipeline: RequestPipeline, note: Callable[[web.Request], None]) -> Middleware:
    """Returns a middleware that answers any error with JSON, and charges its sender for it.

    `note` is told of every request.
    """

    @web.middleware
    async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        note(request)
        arrived = pipeline.arrived(address_of(request), request.headers)
        return await _answered(request, handler, arrived)

    return answer


async def _answered(request: web.Request, handler: Handler, arrived: Caller) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPRequestEntityTooLarge:
        error: CatenaryError = PayloadTooLarge("the body is larger than accepted")
    except web.HTTPException as exc:
        # aiohttp raises these: no such route, wrong method, a body it could not read.
        arrived.charge(_NO_ROUTE)
        try:
            arrived.quotas.require_good(arrived.subject)
        except CatenaryError as flood:
            return error_response(request, flood)
        return _plain_error(request, exc)
    except Exception as exc:
        error = error_of_exception(exc)
        forget_frames(exc)
    arrived.charge(error)
    return error_response(request, error)


def enter(request: web.Request, *, counts: bool = False) -> Principal:
    """Lets a caller in before its body is read; see `RequestPipeline.enter`.

    Raises:
        CatenaryError: The caller is refused.
    """
    return request.app[PIPELINE].enter(bearer(request), counts=counts)


def address_of(request: web.Request) -> str:
    """Returns the network address of a request's sender, "unknown" if it is gone."""
    return request.remote or "unknown"


def error_response(request: web.Request, error: CatenaryError) -> web.Response:
    """Returns the response that reports `error` in the form of the request's protocol."""
    answer = error_answer(request.path, error, request_id_of(request))
    response = web.Response(
        body=b"".join(answer.pieces), status=answer.status, headers=answer.headers
    )
    if request.content.exception() is not None:
        # After a broken body the next request cannot be found, so the connection is closed.
        response.force_close()
    return response


def json_response(
    document: object, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    """Returns a response with `document` as JSON."""
    return web.Response(
        body=json.dumps(document).encode(),
        status=status,
        headers=headers,
        content_type=JSON_TYPE,
    )


def request_id_of(request: web.Request) -> str:
    """Returns the id that the caller gave, cut to 256 characters; "" if it cannot be echoed."""
    given = request.headers.get(REQUEST_ID, "")[:_LONGEST_ID]
    return given if given.isprintable() else ""


def bearer(request: web.Request) -> str | None:
    """Returns the header with the key that the caller presents; None if it has none."""
    return presented_key(request.headers)


def presented_key(headers: Mapping[str, str]) -> str | None:
    """Returns the key in headers that are looked up by names in lower case; None if it is in none.

    Clients of Anthropic's protocol send the bare key in a header of its own.
    """
    return headers.get("authorization", headers.get("x-api-key"))


def _plain_error(request: web.Request, exc: web.HTTPException) -> web.Response:
    message = f"{exc.reason}: {request.method} {request.path[:200]}"
    body = error_form(request.path).plain(message, exc.status)
    headers = {"Allow": exc.headers["Allow"]} if "Allow" in exc.headers else {}
    return web.json_response(body, status=exc.status, headers=headers)
