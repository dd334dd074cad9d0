"""Checks of the messages that gRPC reads, made where their bytes are at hand.

A bad message is read as an `InvalidMessage`, which is returned, not raised, because gRPC would keep
an exception of a parser to itself. Whoever reads the stream raises it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import grpc.aio
from google.protobuf.message import Message

from catenary_services.rules.checking import checker_of
from catenary_services.rules.sizing import too_many

Parse = Callable[[bytes], Any]


def checked(parse: Parse | None, *, counted: bool = False) -> Parse | None:
    """Returns a parser for gRPC that gives an `InvalidMessage` for each message that breaks a rule.

    Args:
        parse: The parser of a stub or a servicer.
        counted: Whether to count the values of a message, too, before they are made.
    """
    kind = getattr(parse, "__self__", None)
    if parse is None or not isinstance(kind, type) or not issubclass(kind, Message):
        return parse
    descriptor: Any = kind.DESCRIPTOR
    offence = checker_of(descriptor).offence

    def read(data: bytes) -> Any:
        message = parse(data)
        return offence(message, data) or message

    if not counted:
        return read
    return lambda data: too_many(descriptor, data) or read(data)


def checking(channel: grpc.aio.Channel) -> grpc.aio.Channel:
    """Returns a channel for a stub with streams only, which checks what it reads from them."""
    return cast(grpc.aio.Channel, _CheckingChannel(channel))


class _CheckingChannel:
    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel

    def stream_stream(
        self, method: str, request_serializer: Any, response_deserializer: Any, **others: Any
    ) -> Any:
        return self._channel.stream_stream(
            method, request_serializer, checked(response_deserializer), **others
        )
