"""The methods of a server, each looked up once among the handlers that servicers registered."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc

from catenary_services.errors import InvalidInput, InvalidMessage
from catenary_services.rules.checking import checked

CONTROL_BYTES = 1 << 20
"""The longest message of a method for which nothing else is set."""
_OURS = "/catenary.v1."

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
BufferParser: TypeAlias = Callable[[bytes | bytearray], Any]


@dataclass(frozen=True, slots=True)
class ServedMethod:
    """One method of a server."""

    path: str
    behaviour: Callable[[Any, Any], Any]
    """The function that answers: of coroutines, an asynchronous generator, or a plain one."""
    parse: Callable[[bytes], Any] | None
    """Makes a message of its bytes; None if the bytes are the message."""
    parse_buffer: BufferParser | None
    """Makes a message that may have views of its bytes; in place of `parse`, if there is one."""
    serialize: Callable[[Any], bytes] | None
    """Makes bytes of an answer; None if it is bytes."""
    takes_stream: bool
    answers_stream: bool
    longest_bytes: int
    """The longest message that is accepted."""
    empty: Callable[[], Any] | None
    """Makes the request if its type has no fields, so that none needs to be read."""

    def request_in(self, raw: bytes | bytearray) -> Any:
        """Returns the message in some bytes.

        Raises:
            InvalidInput: There is none in them.
            InvalidMessage: A message of a stream breaks its rules.
        """
        try:
            if self.parse_buffer is not None:
                return self.parse_buffer(raw)
            if self.parse is None:
                return bytes(raw)
            message = self.parse(bytes(raw))
        except Exception as error:  # kinds of exceptions differ between implementations of protobuf
            raise InvalidInput("request", "is not a message of this method") from error
        if isinstance(message, InvalidMessage):
            if self.takes_stream:
                raise message
            # The caller may be a person, who is told as for any other wrong input.
            raise InvalidInput(message.field, message.message.partition(": ")[2])
        return message


class MethodTable:
    """The methods of one server."""

    def __init__(
        self,
        most_bytes: Mapping[str, int],
        usual_bytes: int,
        buffer_parsers: Mapping[str, BufferParser],
    ) -> None:
        """Creates a table without methods.

        Args:
            most_bytes: The longest message of each method that is named.
            usual_bytes: The longest message of every other method.
            buffer_parsers: Parsers of some methods, in place of those of their handlers.
        """
        self._buffer_parsers = buffer_parsers
        self._most_bytes = most_bytes
        self._usual_bytes = usual_bytes
        self._handlers: list[grpc.GenericRpcHandler] = []
        self._found: dict[str, ServedMethod] = {}

    def add(self, handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        """Adds the handlers of services."""
        self._handlers.extend(handlers)

    def find(self, path: str) -> ServedMethod | None:
        """Returns the method at a path; None if nobody serves it."""
        method = self._found.get(path)
        if method is None:
            details = _CallDetails(path)
            found = (each.service(details) for each in self._handlers)
            handler = next((each for each in found if each is not None), None)
            if handler is None:
                return None
            method = self._served(path, handler)
            if len(self._found) < 1_024:  # a handler may serve any path
                self._found[path] = method
        return method

    def _served(self, path: str, handler: Handler) -> ServedMethod:
        parse = handler.request_deserializer
        empty = None if handler.request_streaming else _empty_of(parse)
        if path.startswith(_OURS):
            parse = checked(parse, counted=bool(handler.request_streaming))
        kind = "stream" if handler.request_streaming else "unary"
        kind += "_stream" if handler.response_streaming else "_unary"
        return ServedMethod(
            path=path,
            behaviour=getattr(handler, kind),
            parse=parse,
            parse_buffer=self._buffer_parsers.get(path),
            serialize=handler.response_serializer,
            takes_stream=bool(handler.request_streaming),
            answers_stream=bool(handler.response_streaming),
            longest_bytes=self._most_bytes.get(path, self._usual_bytes),
            empty=empty,
        )


class _CallDetails(grpc.HandlerCallDetails):
    """The question to handlers, which are asked before any call."""

    def __init__(self, method: str) -> None:
        self.method = method
        self.invocation_metadata = ()


def _empty_of(parse: Callable[[bytes], Any] | None) -> Callable[[], Any] | None:
    message = getattr(parse, "__self__", None)
    descriptor = getattr(message, "DESCRIPTOR", None)
    return message if descriptor is not None and not descriptor.fields else None
