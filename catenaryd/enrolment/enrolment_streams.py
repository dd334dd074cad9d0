"""Messages of enrolment on a byte stream: a length of four bytes, then the message.

Every message is held against its rules (`protos/catenary/v1/enrolment.proto`) as it is read. What
is longer than its bound is refused by its length, before it is read.
"""

from __future__ import annotations

import asyncio
import struct
from typing import TypeVar

from google.protobuf.message import Message

from catenary_services.errors import InvalidMessage, Unavailable
from catenary_services.rules.checking import parsed

LARGEST_REQUEST_BYTES = 384 * 1024
"""64 requests for certificates with all else; a machine with few devices sends a thousand bytes."""
LARGEST_ANSWER_BYTES = 18 * 1024 * 1024
_LENGTH = struct.Struct(">I")
M = TypeVar("M", bound=Message)


async def read_message(reader: asyncio.StreamReader, kind: type[M], most_bytes: int) -> M | None:
    """Returns the next message; None if the other side has ended the stream before it.

    Raises:
        InvalidMessage: It is longer than `most_bytes`, is none, or breaks a rule.
        Unavailable: The stream ends inside a message.
    """
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if length > most_bytes:
            raise InvalidMessage(
                kind.DESCRIPTOR.name, "length", f"is {length}; at most {most_bytes} are accepted"
            )
        data = await reader.readexactly(length)
    except asyncio.IncompleteReadError as error:
        if not error.partial and error.expected == _LENGTH.size:
            return None
        raise Unavailable("the connection ended inside a message") from None
    return parsed(kind, data)


def write_message(writer: asyncio.StreamWriter, message: Message) -> None:
    """Queues a message; `drain` of the writer sends it."""
    data = message.SerializeToString()
    writer.write(_LENGTH.pack(len(data)) + data)
