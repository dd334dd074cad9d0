"""Admission of gRPC calls by their headers, before a byte of their messages is read.

gRPC reads the message of a unary call before its handler runs. Here every method is served as one
that streams its requests, which callers cannot tell, and asks for the first message once the caller
was admitted. Until then a caller can send no more than HTTP/2's first window.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeAlias

import grpc
import grpc.aio

from catenary_services.errors import CatenaryError, InvalidInput, InvalidMessage, PayloadTooLarge
from catenary_services.grpc.error_tables import abort
from catenary_services.grpc.grpc_receiving import MOST_OF_ONE_SOURCE, ReceivingMessages
from catenary_services.rules.checking import checked

CONTROL_BYTES = 1 << 20
"""The longest message of a method for which nothing else is set."""
_OURS = "/catenary.v1."
FIRST_WINDOW_BYTES = 65_535
"""Bytes that a call may send before it is admitted: HTTP/2's first window."""
MAX_RECEIVING_BYTES = 128 * 1024 * 1024
"""Bytes of all messages that are arriving at one port, where nothing else is set."""

Context = grpc.aio.ServicerContext[Any, Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class CallAuthorizer(Protocol):
    """Decides which calls are admitted."""

    def enter(self, method: str, context: Context, peer: str) -> str:
        """Returns who calls, for limits per caller; "" stands for the address of the connection.

        Raises:
            CatenaryError: The caller may not make this call.
        """
        ...

    def refused(self, method: str, context: Context, error: CatenaryError) -> None:
        """Notes an admitted call whose message could not be taken."""
        ...


@dataclass(frozen=True, slots=True)
class CallPolicy:
    """Limits on what a server accepts from its callers."""

    call_authorizer: CallAuthorizer | None = None
    """Decides who may call what; None for the roles of the authorizer, or for everybody without
    one."""
    most_bytes: Mapping[str, int] = field(default_factory=dict)
    """The longest message in bytes of each method that is named."""
    usual_bytes: int = CONTROL_BYTES
    """The longest message in bytes of every other method."""
    receiving_bytes: int = MAX_RECEIVING_BYTES
    """Bytes of all messages that are arriving."""
    receiving_bytes_of_one: int = MOST_OF_ONE_SOURCE
    """Bytes of the messages that are arriving from one source."""


class CallInterceptor(grpc.GenericRpcHandler):
    """Puts every handler of a server behind a `CallAuthorizer`.

    An interceptor of gRPC's own kind runs with every call. This one stands where gRPC looks for the
    handlers of methods, and wraps each of them once.
    """

    def __init__(
        self,
        call_authorizer: CallAuthorizer,
        receiving: ReceivingMessages,
        most_bytes: Mapping[str, int],
        usual_bytes: int = CONTROL_BYTES,
    ) -> None:
        """Creates the interceptor.

        Args:
            call_authorizer: Decides who may call.
            receiving: Bounds what is held of messages that are arriving.
            most_bytes: The longest message of each method that is named.
            usual_bytes: The longest message of every other method.
        """
        self._call_authorizer = call_authorizer
        self._receiving = receiving
        self._most_bytes = most_bytes
        self._usual_bytes = usual_bytes
        self._behind: list[grpc.GenericRpcHandler] = []
        self._made: dict[str, Handler] = {}

    def guard(self, server: grpc.aio.Server) -> None:
        """Takes its place in front of all services that are added to a server from now on."""
        server.add_generic_rpc_handlers((self,))
        server.add_generic_rpc_handlers = self._stand_before  # type: ignore[method-assign]
        # gRPC waits for calls of each registered method apart, and with every call anew for all of
        # them. The generic handlers, which servicers add as well, serve them with one wait.
        server.add_registered_method_handlers = _not_registered  # type: ignore[method-assign]

    def _stand_before(self, generic_rpc_handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        self._behind.extend(generic_rpc_handlers)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        method: str = handler_call_details.method
        made = self._made.get(method)
        if made is None:
            found = (each.service(handler_call_details) for each in self._behind)
            handler = next((each for each in found if each is not None), None)
            if handler is None:
                return None  # gRPC answers that there is no such method
            # Bounded by the number of methods, since unknown names have no handler.
            made = self._made[method] = self._handler(method, handler)
        return made

    def _handler(self, method: str, handler: Handler) -> Handler:
        most = self._most_bytes.get(method, self._usual_bytes)
        parse = handler.request_deserializer
        empty = _empty_of(parse)
        if method.startswith(_OURS):
            parse = checked(parse, counted=bool(handler.request_streaming))
        takes_stream = bool(handler.request_streaming)
        call = _Method(
            method,
            self._call_authorizer,
            self._receiving,
            most,
            parse,
            empty=empty,
            takes_stream=takes_stream,
        )
        # gRPC itself parses messages of a stream, because handlers may read them themselves.
        parse = parse if takes_stream else None
        if handler.response_streaming:
            name = "stream_stream" if handler.request_streaming else "unary_stream"
            behaviour = getattr(handler, name)
            # A behaviour that writes to its context is a coroutine that returns nothing.
            generates = inspect.isasyncgenfunction(behaviour)
            serve: Any = call.generating(behaviour) if generates else call.answering(behaviour)
            made: Handler = grpc.stream_stream_rpc_method_handler(
                serve, parse, handler.response_serializer
            )
            return made
        name = "stream_unary" if handler.request_streaming else "unary_unary"
        serve = call.answering(getattr(handler, name))
        return grpc.stream_unary_rpc_method_handler(serve, parse, handler.response_serializer)


class _Method:
    """One method of a server: it admits the caller, reads the message, and calls the handler."""

    def __init__(  # noqa: PLR0913
        self,
        method: str,
        call_authorizer: CallAuthorizer,
        receiving: ReceivingMessages,
        most_bytes: int,
        parse: Callable[[bytes], Any] | None,
        *,
        empty: Callable[[], Any] | None,
        takes_stream: bool,
    ) -> None:
        self._method = method
        self._call_authorizer = call_authorizer
        self._receiving = receiving
        self._most_bytes = most_bytes
        self._parse = parse
        self._empty = empty
        self._takes_stream = takes_stream

    def answering(
        self, behaviour: Callable[[Any, Context], Awaitable[Any]]
    ) -> Callable[[Any, Context], Awaitable[Any]]:
        """Returns a wrapper for a handler that answers once, or by writing to its context."""

        async def answer(requests: Any, context: Context) -> Any:
            return await behaviour(await self._request(requests, context), context)

        return answer

    def generating(
        self, behaviour: Callable[[Any, Context], AsyncIterator[Any]]
    ) -> Callable[[Any, Context], AsyncIterator[Any]]:
        """Returns a wrapper for a handler that yields its answers."""

        async def generate(requests: Any, context: Context) -> AsyncIterator[Any]:
            responses: Any = behaviour(await self._request(requests, context), context)
            async with aclosing(responses):
                async for response in responses:
                    yield response

        return generate

    async def _request(self, requests: AsyncIterable[Any], context: Context) -> Any:
        """Returns the message of a unary call, or those of a stream, once the caller is in."""
        try:
            peer = context.peer()
            source = self._call_authorizer.enter(self._method, context, peer)
            if self._takes_stream:
                return self._all(requests, peer, source or address_of(peer))
            if self._empty is not None:
                return self._empty()  # a message without fields needs no reading
            try:
                watched = self._receiving.awaiting(
                    peer, source or address_of(peer), self._most_bytes, is_timed=True
                )
                with watched:
                    raw = await context.read()
                return self._message(raw, peer)
            except CatenaryError as error:
                self._call_authorizer.refused(self._method, context, error)
                raise
        except CatenaryError as error:
            await abort(context, error)

    def _message(self, raw: object, peer: str) -> Any:
        """Returns the message in the bytes of a unary call.

        Raises:
            CatenaryError: There is no message, or it cannot be taken.
        """
        if not isinstance(raw, bytes):
            raise InvalidInput("request", "the call has no message")
        self._receiving.took(peer, raw.__len__)
        most = self._most_bytes
        if len(raw) > most:
            raise PayloadTooLarge(f"the message has {len(raw)} bytes; at most {most} are accepted")
        if self._parse is None:
            return raw
        try:
            message = self._parse(raw)
        except Exception as error:  # kinds of exceptions differ between implementations of protobuf
            raise InvalidInput("request", "is not a message of this method") from error
        if isinstance(message, InvalidMessage):
            # The caller may be a person, who is told as for any other wrong input.
            raise InvalidInput(message.field, message.message.partition(": ")[2])
        return message

    async def _all(
        self, requests: AsyncIterable[Any], peer: str, source: str
    ) -> AsyncIterator[Any]:
        """Yields the messages of a stream."""
        messages = aiter(requests)
        receiving, most = self._receiving, self._most_bytes
        while True:
            with receiving.awaiting(peer, source, most, is_timed=False):
                message = await anext(messages, None)
            if message is None:
                return
            if isinstance(message, InvalidMessage):
                raise message
            receiving.took(peer, partial(_size_of, message))
            yield message


def _not_registered(service_name: str, method_handlers: Mapping[str, Handler]) -> None:
    """Does nothing, in place of registering the methods of a service."""


def address_of(peer: str) -> str:
    """Returns the address in gRPC's name of a connection, "ipv4:10.0.0.7:51234"."""
    return peer.rpartition(":")[0]


def _size_of(message: Any) -> int:
    return len(message) if isinstance(message, bytes) else int(message.ByteSize())


def _empty_of(parse: Callable[[bytes], Any] | None) -> Callable[[], Any] | None:
    """Returns a factory of the request if its type has no fields, so that none needs to be read."""
    message = getattr(parse, "__self__", None)
    descriptor = getattr(message, "DESCRIPTOR", None)
    return message if descriptor is not None and not descriptor.fields else None
