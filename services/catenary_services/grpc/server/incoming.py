"""The messages of one call, cut out of the data of its stream as far as there is room for them."""

from __future__ import annotations

from collections import deque
from typing import Any, TypeAlias

from catenary_services.errors import InvalidInput, PayloadTooLarge
from catenary_services.grpc.server.compression import inflated
from catenary_services.grpc.server.receiving_budget import (
    ArrivingMessage,
    MessageOwner,
    ReceivingBudget,
)
from catenary_services.http2.connection import ServerConnection
from catenary_services.http2.stream import ServerStream

Message: TypeAlias = bytes | bytearray
"""The bytes of a message, which nobody else holds."""
PREFIX_BYTES = 5
"""Bytes before each message: whether it is compressed, and its length."""


class IncomingMessages:
    """The part of a call's messages that has arrived.

    Attributes:
        complete: Messages that nobody has taken yet.
    """

    __slots__ = (
        "_arriving",
        "_budget",
        "_connection",
        "_encoding",
        "_first_window",
        "_is_compressed",
        "_longest",
        "_owner",
        "_part",
        "_prefix",
        "_source",
        "_stream",
        "_untaken",
        "complete",
    )

    def __init__(  # noqa: PLR0913 - they are what a call consists of
        self,
        owner: MessageOwner,
        source: str,
        connection: ServerConnection[Any],
        stream: ServerStream,
        budget: ReceivingBudget,
        *,
        longest: int,
        first_window: int,
        encoding: str,
    ) -> None:
        """Creates what has no message yet.

        Args:
            owner: The call.
            source: Who is charged for unfinished messages.
            connection: The connection of the call.
            stream: Its stream.
            budget: The room for unfinished messages.
            longest: The longest message in bytes.
            first_window: Bytes that the caller may send unasked.
            encoding: How messages may be compressed.
        """
        self._owner = owner
        self._source = source
        self._connection = connection
        self._stream = stream
        self._budget = budget
        self._longest = longest
        self._first_window = first_window
        self._encoding = encoding
        self.complete: deque[Message] = deque()
        self._untaken = 0
        self._prefix = b""
        self._is_compressed = False
        self._part = bytearray()
        self._arriving: ArrivingMessage | None = None

    @property
    def is_within(self) -> bool:
        """True if the caller owes the rest of a message."""
        return self._arriving is not None or bool(self._prefix)

    def feed(self, data: bytes, begin: int, end: int) -> None:
        """Takes the bytes of `data` from `begin` to `end`.

        Raises:
            PayloadTooLarge: A message is longer than it may be.
            InvalidInput: It is compressed, and in another way than was said.
            Overloaded: There is no room for it, nor in the queue for room.
        """
        arriving = self._arriving
        if arriving is not None and begin < end:
            arriving.moved_s = self._connection.sending.now_s
        while begin < end:
            arriving = self._arriving
            if arriving is None:
                begin = self._begin(data, begin, end)
                continue
            taken = min(arriving.nbytes - len(self._part), end - begin)
            self._part += memoryview(data)[begin : begin + taken]
            begin += taken
            if len(self._part) == arriving.nbytes:
                message, self._part = self._part, bytearray()
                self.leave()
                self._add(message)
        self._ask_for_more()

    def take(self) -> Message:
        """Returns the first of the complete messages."""
        message = self.complete.popleft()
        self._untaken -= len(message) + PREFIX_BYTES
        self._ask_for_more()
        return message

    def on_room(self) -> None:
        """Lets the caller send the rest of a message for which there is room now."""
        if self._arriving is not None:
            self._arriving.moved_s = self._connection.sending.now_s
        self._ask_for_more()

    def leave(self) -> None:
        """Gives the room of an unfinished message back."""
        arriving, self._arriving = self._arriving, None
        if arriving is not None:
            self._budget.leave(arriving)

    def _begin(self, data: bytes, begin: int, end: int) -> int:
        """Reads the beginning of a message; returns where to go on."""
        missing = PREFIX_BYTES - len(self._prefix)
        prefix = self._prefix + data[begin : begin + missing]
        begin += missing
        if len(prefix) < PREFIX_BYTES:
            self._prefix = prefix
            return end
        self._prefix = b""
        nbytes = int.from_bytes(prefix[1:], "big")
        if nbytes > self._longest:
            why = f"the message has {nbytes} bytes; at most {self._longest} are accepted"
            raise PayloadTooLarge(why)
        if prefix[0] > 1:
            raise InvalidInput("request", "begins with a byte that is neither 0 nor 1")
        self._is_compressed = bool(prefix[0])
        if end - begin >= nbytes:
            self._add(data[begin : begin + nbytes])
            return begin + nbytes
        now_s = self._connection.sending.now_s
        arriving = ArrivingMessage(self._owner, self._source, nbytes, now_s)
        self._budget.enter(arriving)
        self._arriving = arriving
        return begin

    def _add(self, message: Message) -> None:
        if self._is_compressed:
            message = inflated(message, self._encoding, self._longest)
        self._untaken += len(message) + PREFIX_BYTES
        self.complete.append(message)

    def _ask_for_more(self) -> None:
        """Widens the stream's window by what has room."""
        ahead = self._first_window - self._untaken - len(self._prefix)
        rest = 0
        if self._arriving is not None:
            if self._arriving.has_room:
                rest = self._arriving.nbytes - len(self._part)
            else:
                ahead -= len(self._part)
        wanted, now = max(ahead, 0) + rest, self._stream.receive_window
        if now < rest or wanted - now > self._first_window // 2:
            self._connection.request(self._stream, wanted)
