"""How gRPC reads messages of peers: checked where their bytes are at hand.

A message that cannot be is read as an `InvalidMessage`: it is returned, not raised, because gRPC
would keep what a parser raises to itself. Whoever reads a stream raises it.
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
    """Returns what gRPC is to read messages with: an `InvalidMessage` of those that cannot be.

    Args:
        parse: What a stub or a servicer would read them with.
        counted: Also look at how many values they have, before they are made.
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
    """Returns a channel for a stub that has streams only: what is read from them is checked."""
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
