"""Helpers that all gRPC methods of a gateway share."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import grpc.aio

from catenary_gateway.admission.callers import charge
from catenary_services.grpc.error_tables import abort, error_of_exception

S = TypeVar("S")
P = ParamSpec("P")
Request = TypeVar("Request")
Response = TypeVar("Response")
_Context = grpc.aio.ServicerContext[Any, Any]
_Method = Callable[[S, Request, _Context], Awaitable[Response]]


def answered(
    method: Callable[Concatenate[S, Request, P], Awaitable[Response]],
) -> Callable[Concatenate[S, Request, P], Awaitable[Response]]:
    """Wraps `method`: any error it raises ends the call with a status and details."""

    @functools.wraps(method)
    async def call(self: S, request: Request, /, *args: P.args, **kwargs: P.kwargs) -> Response:
        try:
            return await method(self, request, *args, **kwargs)
        except Exception as exc:
            context, error = args[0], error_of_exception(exc)
            charge(error)
            await abort(context, error)  # type: ignore[arg-type]

    return call


def metadata_of(context: _Context) -> dict[str, str]:
    """Returns the text metadata of a call."""
    pairs = context.invocation_metadata() or ()
    return {key: value for key, value in pairs if isinstance(value, str)}
