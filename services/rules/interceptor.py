"""Checks what unary calls ask before a servicer hears of it."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import Message

from services.error_tables import abort
from services.errors import InvalidInput, InvalidMessage
from services.rules.checking import check

_OURS = "/catenary.v1."
Context = grpc.aio.ServicerContext[Any, Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class RulesInterceptor(grpc.aio.ServerInterceptor):
    """Refuses requests that do not keep the rules; streams check what they read themselves."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Returns the method's handler behind the check."""
        found = await continuation(handler_call_details)
        method = str(handler_call_details.method)
        if found is None or found.request_streaming or not method.startswith(_OURS):
            return found
        handler: Any = found  # its stubs know the servicers of threads only
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(
                _streaming(handler.unary_stream),
                handler.request_deserializer,
                handler.response_serializer,
            )
        return grpc.unary_unary_rpc_method_handler(
            _answering(handler.unary_unary),
            handler.request_deserializer,
            handler.response_serializer,
        )


async def _check(request: Any, context: Context) -> None:
    if not isinstance(request, Message):
        return  # a servicer of raw bytes reads them itself
    try:
        check(request)
    except InvalidMessage as error:
        # Whoever calls may be a person: told like any other wrong input.
        await abort(context, InvalidInput(error.field, error.message.partition(": ")[2]))


def _answering(
    behaviour: Callable[[Any, Context], Awaitable[Any]],
) -> Callable[[Any, Context], Awaitable[Any]]:
    async def answer(request: Any, context: Context) -> Any:
        await _check(request, context)
        return await behaviour(request, context)

    return answer


def _streaming(behaviour: Callable[[Any, Context], Any]) -> Callable[[Any, Context], Any]:
    if not inspect.isasyncgenfunction(behaviour):
        return _answering(behaviour)  # it writes to the context

    async def generate(request: Any, context: Context) -> AsyncIterator[Any]:
        await _check(request, context)
        async for response in behaviour(request, context):
            yield response

    return generate
