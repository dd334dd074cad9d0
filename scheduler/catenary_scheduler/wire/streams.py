"""The scheduler's end of one control stream: whole packs come in, and messages go out in packs.

Messages are serialised as they are sent, each as a pack of its own: packs one after the other are
again a pack. So what many peers are told is serialised once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from google.protobuf.message import Message

from catenary_protos.catenary.v1 import scheduler_pb2
from catenary_services.control.control_stream import ControlStream
from catenary_services.control.pack_writer import PackWriter
from catenary_services.errors import CatenaryError, InvalidInput, Overloaded, Unavailable
from catenary_services.rules import parsed
from catenary_services.transport.frames import MessageKind

Out = TypeVar("Out")
Pack = TypeVar("Pack", scheduler_pb2.AgentMessages, scheduler_pb2.GatewayMessages)

Speaks = Callable[[str], None]
"""Raises PermissionDenied unless the opener of a stream may speak for this gateway or agent."""


class PeerStream(Generic[Out]):
    """The scheduler's end of one stream.

    Attributes:
        handle: Takes in the bytes of a pack; an error that it raises ends the stream.
        left: Called once the stream is over.
    """

    def __init__(self, stream: ControlStream, pack_of: Callable[..., Message]) -> None:
        """Sends over `stream` packs of the type `pack_of`, e.g. `SchedulerToAgentMessages`."""
        self._stream = stream
        self._pack_of = pack_of
        self._writer: PackWriter[bytes] = PackWriter(self._write, self._is_full)
        self.handle: Callable[[bytes], None] = _unexpected
        self.left: Callable[[], None] = _nothing

    @property
    def closed(self) -> bool:
        """True once either side has ended the stream."""
        return self._stream.closed

    @property
    def heard_s(self) -> float:
        """Moment at which the peer last sent anything, on `time.monotonic`."""
        return self._stream.heard_s

    def send(self, message: Out) -> None:
        """Queues a message; a peer that does not read loses its session, which bounds memory."""
        if not self._stream.closed:
            self._put(self._pack_of(messages=[message]).SerializeToString())

    @staticmethod
    def send_all(message: Out, streams: Iterable[PeerStream[Out]]) -> None:
        """Queues one message for many peers of one kind, as `send` does for one."""
        data = b""
        for stream in streams:
            if not stream.closed:
                data = data or stream._pack_of(messages=[message]).SerializeToString()
                stream._put(data)

    def _put(self, data: bytes) -> None:
        try:
            self._writer.put(data)
        except Overloaded as error:
            self.close(Unavailable(error.message))

    def flush(self) -> None:
        """Writes what is queued, unless the peer reads too slowly."""
        self._writer.flush()

    def resumed(self) -> None:
        """Goes on writing after the peer has read."""
        self._writer.resumed()

    def close(self, error: CatenaryError) -> None:
        """Ends the session; the peer is told `error`. Idempotent."""
        self._stream.close(error)

    def ended(self) -> None:
        """Forgets what is queued, and tells whom it concerns that the stream is over."""
        self._writer.close()
        self.left()

    def _is_full(self) -> bool:
        return self._stream.is_full

    def _write(self, packs: list[bytes]) -> None:
        self._stream.write(MessageKind.PACK, packs[0] if len(packs) == 1 else b"".join(packs))


def read_pack(kind: type[Pack], data: bytes) -> Pack:
    """Returns the pack of messages in bytes that a gateway or an agent sent.

    Raises:
        InvalidMessage: The bytes are none, or a message in it is impossible.
    """
    return parsed(kind, data, counted=True)


def first_pack(kind: type[Pack], data: bytes, who: str) -> Pack:
    """Returns the first pack of a stream, which begins with the peer's hello.

    Args:
        kind: The type of packs.
        data: The bytes of the pack.
        who: The peer in words.

    Raises:
        InvalidInput: There is no hello.
        InvalidMessage: A message is impossible.
    """
    pack = read_pack(kind, data)
    if not pack.messages or not pack.messages[0].HasField("hello"):
        raise InvalidInput("hello", f"must be the first message of {who}")
    return pack


def _unexpected(_: bytes) -> None:
    raise AssertionError("nobody takes in packs of this stream")


def _nothing() -> None:
    """Does nothing; the default of `PeerStream.left`."""
