"""The sending half of a connection: frames joined for one write, within the windows of the peer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from catenary_services.http2.flood_limit import FloodLimit
from catenary_services.http2.frames import (
    CANCEL,
    DATA,
    END_HEADERS,
    END_STREAM,
    FLOW_CONTROL_ERROR,
    FRAME_BYTES,
    HEAD,
    HEADERS,
    INITIAL_WINDOW,
    LARGEST_WINDOW,
    NO_ERROR,
    ConnectionViolation,
    frame,
    frame_head,
    reset_frame,
)
from catenary_services.http2.limits import DATA_GIVES_BACK
from catenary_services.http2.stream import Piece, ServerStream

_COPIED_BYTES = 16_384
"""Shorter pieces are copied to be joined with what stands around them."""


class FrameSender:
    """The sending half of one connection.

    Attributes:
        out: What is ready to be written.
        window: Bytes that the peer takes on the whole connection.
        stream_window: Bytes that it takes on a new stream.
        streams: The streams that are open, by number.
        waiting_bytes: Bytes of all streams that wait for windows.
        waiting_streams: The number of these streams.
        is_held: Whether the connection takes nothing for now.
        data_sent: A count that grows with everything that is sent on streams.
    """

    __slots__ = (
        "_flood_limit",
        "_ready",
        "_wanted",
        "data_sent",
        "frame_bytes",
        "is_held",
        "now_s",
        "out",
        "stream_window",
        "streams",
        "waiting_bytes",
        "waiting_streams",
        "window",
    )

    def __init__(self, flood_limit: FloodLimit, wanted: Callable[[], None], now_s: float) -> None:
        """Creates the half of a connection on which nothing was sent yet.

        Args:
            flood_limit: Of the peer; data that it takes restores it.
            wanted: Called when `out` is no longer empty.
            now_s: The time; whoever feeds the connection keeps it.
        """
        self.out: list[Piece] = []
        self.window = INITIAL_WINDOW
        self.stream_window = INITIAL_WINDOW
        self.frame_bytes = FRAME_BYTES
        self.streams: dict[int, ServerStream] = {}
        self.waiting_bytes = 0
        self.waiting_streams = 0
        self.is_held = False
        self.data_sent = 0
        self.now_s = now_s
        self._flood_limit = flood_limit
        self._wanted = wanted
        self._ready: dict[int, ServerStream] = {}
        """The streams that wait for nothing but the connection, in the order of their turns."""

    def push(self, piece: Piece) -> None:
        """Adds bytes that go out as they are; data asks the windows first."""
        self.out.append(piece)
        if len(self.out) == 1:
            self._wanted()

    def take(self) -> list[Piece]:
        """Returns what is ready, which is the caller's then."""
        out, self.out = self.out, []
        return out

    def answer(self, stream: ServerStream, head: bytes, body: Piece, trailers: bytes) -> None:
        """Sends a whole answer: headers, a body and trailers; both blocks are encoded."""
        if stream.is_closed:
            return
        size, number = len(body), stream.number
        if (
            size <= stream.send_window
            and size <= self.window
            and size <= _COPIED_BYTES
            and not self.is_held
        ):
            self.window -= size
            self.data_sent += 1
            self._flood_limit.restore(DATA_GIVES_BACK)
            self.push(
                b"".join(
                    (
                        HEAD.pack(len(head) << 8 | HEADERS, END_HEADERS, number),
                        head,
                        HEAD.pack(size << 8 | DATA, 0, number),
                        body,
                        HEAD.pack(len(trailers) << 8 | HEADERS, END_HEADERS | END_STREAM, number),
                        trailers,
                    )
                )
            )
            self._close(stream)
            return
        self.headers(stream, head)
        self.data(stream, body)
        self.trailers(stream, trailers)

    def headers(self, stream: ServerStream, block: bytes) -> None:
        """Sends the headers with which an answer begins."""
        if not stream.is_closed:
            self.data_sent += 1
            self.push(frame(HEADERS, END_HEADERS, stream.number, block))

    def data(self, stream: ServerStream, body: Piece) -> None:
        """Sends a piece of the body, or keeps it until the windows have room."""
        if stream.is_closed:
            return
        if stream.waiting is None:
            stream.waiting = deque()
        stream.waiting.append(body)
        stream.waiting_bytes += len(body)
        self.waiting_bytes += len(body)
        if len(stream.waiting) == 1:
            self.waiting_streams += 1
            stream.stalled_since_s = self.now_s
        self._ready[stream.number] = stream
        self.go_on()

    def trailers(self, stream: ServerStream, block: bytes) -> None:
        """Ends the stream with trailers, after all that waits on it."""
        if stream.is_closed or stream.trailers:
            return
        ending = frame(HEADERS, END_HEADERS | END_STREAM, stream.number, block)
        if stream.waiting:
            stream.trailers = ending
            return
        self.data_sent += 1
        self.push(ending)
        self._close(stream)

    def reset(self, stream: ServerStream, code: int = CANCEL) -> None:
        """Ends a stream at once."""
        if not stream.is_closed:
            self.push(reset_frame(stream.number, code))
            self.forget(stream)

    def forget(self, stream: ServerStream) -> None:
        """Closes a stream that is over for the peer, too, with all that waits on it."""
        stream.is_closed = True
        self.streams.pop(stream.number, None)
        self._ready.pop(stream.number, None)
        self.waiting_bytes -= stream.waiting_bytes
        if stream.waiting:
            self.waiting_streams -= 1
        stream.waiting, stream.waiting_bytes = None, 0

    def widen(self, stream: ServerStream | None, nbytes: int) -> None:
        """Notes that the peer takes `nbytes` more, on a stream or on the connection.

        Raises:
            ConnectionViolation: More than there may be, on the connection.
        """
        if stream is None:
            self.window += nbytes
            if self.window > LARGEST_WINDOW:
                raise ConnectionViolation(FLOW_CONTROL_ERROR, "the window is too large")
        else:
            stream.send_window += nbytes
            if stream.waiting and stream.send_window > 0:
                self._ready[stream.number] = stream
        self.go_on()

    def resize(self, window: int) -> None:
        """Sets the window of new streams, and changes those of the present ones by as much.

        Raises:
            ConnectionViolation: A window becomes larger than there may be.
        """
        change, self.stream_window = window - self.stream_window, window
        for stream in self.streams.values():
            stream.send_window += change
            if stream.send_window > LARGEST_WINDOW:
                raise ConnectionViolation(FLOW_CONTROL_ERROR, "the window is too large")
            if stream.waiting and stream.send_window > 0:
                self._ready[stream.number] = stream
        self.go_on()

    def go_on(self) -> None:
        """Sends what waits and has room by now, one frame of each stream in turn."""
        ready = self._ready
        while ready and self.window > 0 and not self.is_held:
            number, stream = next(iter(ready.items()))
            del ready[number]  # it may come back, as the last one
            self._send_one(stream)

    def stalled(self, since_s: float) -> list[ServerStream]:
        """Returns the streams of which nothing could be sent since a time."""
        return [
            each
            for each in self.streams.values()
            if each.waiting and each.stalled_since_s < since_s
        ]

    def _send_one(self, stream: ServerStream) -> None:
        """Sends one frame of what waits on a stream."""
        waiting = stream.waiting
        if not waiting:
            return
        piece = waiting[0]
        size = min(len(piece), stream.send_window, self.window, self.frame_bytes)
        if size <= 0:
            return
        if size == len(piece):
            part: Piece = piece
            waiting.popleft()
            if not waiting:
                self.waiting_streams -= 1
        else:
            view = memoryview(piece)
            part, waiting[0] = view[:size], view[size:]
        stream.send_window -= size
        self.window -= size
        stream.waiting_bytes -= size
        self.waiting_bytes -= size
        self.data_sent += 1
        self._flood_limit.restore(DATA_GIVES_BACK)
        self.push(frame_head(size, DATA, 0, stream.number))
        self.push(part)
        stream.stalled_since_s = self.now_s
        if waiting:
            if stream.send_window > 0:
                self._ready[stream.number] = stream
        elif stream.trailers:
            self.push(stream.trailers)
            self._close(stream)
            return
        if stream.receiver is not None:
            stream.receiver.on_drained()

    def _close(self, stream: ServerStream) -> None:
        """Closes a stream whose last frame is out."""
        if not stream.has_peer_ended:
            # The peer need not send the rest.
            self.push(reset_frame(stream.number, NO_ERROR))
        self.forget(stream)
