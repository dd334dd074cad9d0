"""The server's side of an HTTP/2 connection as a state machine: bytes in, calls and bytes out.

It knows neither sockets nor clocks. However the bytes of a peer are cut into pieces, the same calls
come out in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from catenary_services.http2 import frames
from catenary_services.http2.control_frames import ControlFrames
from catenary_services.http2.flood_limit import FloodLimit, TurnBudget
from catenary_services.http2.frame_reader import FrameReader, HeaderFrames
from catenary_services.http2.frames import (
    ACK,
    END_STREAM,
    FLOW_CONTROL_ERROR,
    FRAME_SIZE_ERROR,
    INITIAL_WINDOW,
    LARGEST_WINDOW,
    PADDED,
    PROTOCOL_ERROR,
    REFUSED_STREAM,
    STREAM_CLOSED,
    WORD,
    ConnectionViolation,
    StreamViolation,
    frame,
    goaway_frame,
    settings_frame,
    window_frame,
)
from catenary_services.http2.header_blocks import HeaderDecoder, Headers
from catenary_services.http2.limits import (
    BLOCK_BYTES,
    COST_OF_CONTROL,
    COST_OF_FRAME,
    DATA_GIVES_BACK,
    MOST_WAITING_STREAMS,
    QUEUED_BYTES,
    ConnectionLimits,
)
from catenary_services.http2.sending import FrameSender
from catenary_services.http2.stream import ServerStream

T = TypeVar("T")
_CONNECTION_WINDOW = 64 * 1024 * 1024
"""Bytes that all streams of a connection may send together; each has a window of its own."""
_word_at = WORD.unpack_from


class StreamOpener(Protocol[T]):
    """The one who takes new streams of a connection."""

    def parse(self, headers: Headers) -> T | StreamViolation:
        """Returns what the headers of a stream mean, or what is wrong with them."""
        ...

    def opened(self, stream: ServerStream, head: T, is_whole: bool) -> None:
        """Takes a new stream and sets its receiver; a whole one has no data."""
        ...


class ServerConnection(Generic[T]):
    """The receiving half of one connection.

    Attributes:
        sending: What goes out.
        last_number: The number of the last stream that is served.
        control: What concerns no stream in particular.
        is_leaving: Whether new streams are turned away.
    """

    def __init__(
        self,
        opener: StreamOpener[T],
        limits: ConnectionLimits,
        budget: TurnBudget,
        wanted: Callable[[], None],
        now_s: float,
    ) -> None:
        """Creates a connection on which nothing has arrived yet; the settings are ready to go out.

        Args:
            opener: Who takes new streams.
            limits: The limits of the server.
            budget: The work that its connections may do in one turn.
            wanted: Called when there is something to be written.
            now_s: The time.
        """
        self._opener = opener
        self._limits = limits
        self._flood_limit = FloodLimit(now_s)
        self.sending = FrameSender(self._flood_limit, wanted, now_s)
        self.control = ControlFrames(self.sending, self._flood_limit)
        self._streams = self.sending.streams
        self._decoder: HeaderDecoder[T | StreamViolation] = HeaderDecoder(opener.parse, BLOCK_BYTES)
        self._handlers: dict[int, Callable[[int, int, bytes], None]] = {
            frames.PRIORITY: self.control.on_priority,
            frames.RST_STREAM: self._on_reset,
            frames.SETTINGS: self.control.on_settings,
            frames.PUSH_PROMISE: self.control.on_push,
            frames.PING: self.control.on_ping_frame,
            frames.GOAWAY: self.control.on_goaway,
            frames.WINDOW_UPDATE: self._on_window,
        }
        self._window = INITIAL_WINDOW
        self._headers = HeaderFrames(self._take_block, self._flood_limit, budget)
        self._reader = FrameReader(
            self._on_data, self._on_frame, self._headers, limits.calls_at_once, budget
        )
        self.last_number = 0
        self._highest = 0
        self.is_leaving = False
        self.sending.push(
            settings_frame(
                {
                    frames.MAX_CONCURRENT_STREAMS: limits.most_streams,
                    frames.INITIAL_WINDOW_SIZE: limits.first_window,
                    frames.MAX_HEADER_LIST_SIZE: limits.header_bytes,
                }
            )
        )
        self._refill()

    @property
    def unfinished_bytes(self) -> int:
        """Bytes of a frame and of a block of headers that are not finished, or that wait."""
        return self._reader.unfinished_bytes + self._headers.unfinished_bytes

    @property
    def table_bytes(self) -> int:
        """Bytes of the headers that the peer has had noted to refer to them."""
        return self._decoder.table_bytes

    @property
    def has_more(self) -> bool:
        """Whether bytes that were received wait for the next call of `receive`."""
        return self._reader.has_more

    def receive(self, data: bytes, now_s: float) -> None:
        """Takes bytes of the peer.

        Raises:
            ConnectionViolation: The peer did what ends its connection.
        """
        self.sending.now_s = self._flood_limit.now_s = now_s
        self._reader.receive(data)

    def request(self, stream: ServerStream, window: int) -> None:
        """Lets the peer send on a stream until `window` bytes are on their way."""
        if window > stream.receive_window and not (stream.has_peer_ended or stream.is_closed):
            self.sending.push(window_frame(stream.number, window - stream.receive_window))
            stream.receive_window = window

    def ping(self) -> None:
        """Asks the peer whether it is there."""
        self.sending.push(frame(frames.PING, 0, 0, bytes(8)))

    def leave(self, code: int = frames.NO_ERROR, why: str = "") -> None:
        """Tells the peer that later streams are not served."""
        if not self.is_leaving:
            self.is_leaving = True
            self.sending.push(goaway_frame(self.last_number, code, why))

    def end(self) -> None:
        """Tells the receivers of all streams that the connection is lost, and lets go of its bytes.

        The garbage collector comes late to the connection itself, whose parts know each other.
        """
        for stream in list(self._streams.values()):
            self._end_by_peer(stream)
        self._reader.let_go()
        self._headers.let_go()
        self._decoder.let_go()
        self.sending.take()

    # ---- frames ----

    def _on_frame(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if kind == frames.HEADERS and self.control.has_settings:
            self._headers.on_headers(flags, number, payload)
        elif kind == frames.CONTINUATION:
            self._headers.on_continuation(flags, payload)
        elif self.control.has_settings or (kind == frames.SETTINGS and not flags & ACK):
            self._handlers.get(kind, self.control.on_extension)(flags, number, payload)
        else:
            raise ConnectionViolation(PROTOCOL_ERROR, "the settings do not come first")

    def _on_data(self, flags: int, number: int, data: bytes, begin: int, end: int) -> None:
        size = end - begin
        if number == 0 or number > self._highest:
            raise ConnectionViolation(PROTOCOL_ERROR, "data without a stream")
        self._window -= size
        if self._window < 0:
            raise ConnectionViolation(FLOW_CONTROL_ERROR, "data beyond the window")
        if self._window < _CONNECTION_WINDOW // 2:
            self._refill()
        if flags & PADDED:
            self._flood_limit.spend(COST_OF_FRAME)
            if size == 0 or data[begin] >= size:
                raise ConnectionViolation(PROTOCOL_ERROR, "more padding than there is frame")
            begin, end = begin + 1, end - data[begin]
        stream = self._streams.get(number)
        if stream is None:
            # What was on its way while the stream ended here; it takes no place.
            self._flood_limit.spend(COST_OF_FRAME)
            return
        is_last = bool(flags & END_STREAM)
        if stream.has_peer_ended:
            self._fail(stream, STREAM_CLOSED)
            return
        stream.receive_window -= size
        if stream.receive_window < 0:
            self._fail(stream, FLOW_CONTROL_ERROR)
            return
        if end > begin:
            self._flood_limit.restore(DATA_GIVES_BACK)
        elif not is_last:
            self._flood_limit.spend(COST_OF_FRAME)
        stream.has_peer_ended = is_last
        if stream.receiver is not None:
            stream.receiver.on_data(data, begin, end, is_last)

    def _take_block(self, number: int, block: bytes, is_last: bool) -> None:
        head = self._decoder.decode(block)  # in any case, to keep the table right
        known = self._streams.get(number)
        if known is not None:
            if known.has_peer_ended or not is_last:
                self._fail(known, STREAM_CLOSED if known.has_peer_ended else PROTOCOL_ERROR)
                return
            known.has_peer_ended = True  # trailers of a request, of which gRPC has none
            if known.receiver is not None:
                known.receiver.on_data(b"", 0, 0, True)
            return
        if number <= self._highest:
            # It may have ended here while this was on its way, but only trailers may be.
            self._flood_limit.spend(COST_OF_CONTROL)
            if not is_last:
                raise ConnectionViolation(STREAM_CLOSED, "headers on a stream that has ended")
            return
        self._highest = number
        if self.is_leaving:
            return  # the farewell has told that it is not served
        self.last_number = number
        sending = self.sending
        if (
            len(self._streams) >= self._limits.most_streams
            or sending.waiting_bytes > QUEUED_BYTES
            or sending.waiting_streams > MOST_WAITING_STREAMS
        ):
            self._refuse(number, REFUSED_STREAM)
            return
        if isinstance(head, StreamViolation):
            self._refuse(number, head.code)
            return
        stream = ServerStream(number, sending.stream_window, self._limits.first_window)
        stream.has_peer_ended = is_last
        self._streams[number] = stream
        self._opener.opened(stream, head, is_last)

    def _on_reset(self, flags: int, number: int, payload: bytes) -> None:
        if number == 0 or number > self._highest:
            raise ConnectionViolation(PROTOCOL_ERROR, "a reset of no stream")
        if len(payload) != 4:
            raise ConnectionViolation(FRAME_SIZE_ERROR, "a reset has another length")
        self._flood_limit.spend(COST_OF_CONTROL)
        stream = self._streams.get(number)
        if stream is not None:
            self._end_by_peer(stream)

    def _on_window(self, flags: int, number: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionViolation(FRAME_SIZE_ERROR, "a window has another length")
        if number > self._highest:
            raise ConnectionViolation(PROTOCOL_ERROR, "a window of no stream")
        self._flood_limit.spend(COST_OF_FRAME)
        more = _word_at(payload)[0] & LARGEST_WINDOW
        if number == 0:
            if more == 0:
                raise ConnectionViolation(PROTOCOL_ERROR, "a window does not grow")
            self.sending.widen(None, more)
            return
        stream = self._streams.get(number)
        if stream is None:
            return
        if more == 0 or stream.send_window + more > LARGEST_WINDOW:
            self._fail(stream, PROTOCOL_ERROR if more == 0 else FLOW_CONTROL_ERROR)
            return
        self.sending.widen(stream, more)

    # ---- ends ----

    def _refuse(self, number: int, code: int) -> None:
        self._flood_limit.spend(COST_OF_CONTROL)
        self.sending.push(frames.reset_frame(number, code))

    def _fail(self, stream: ServerStream, code: int) -> None:
        """Ends a stream on which the peer did what it may not."""
        self._flood_limit.spend(COST_OF_CONTROL)
        self.sending.reset(stream, code)
        if stream.receiver is not None:
            stream.receiver.on_reset()

    def _end_by_peer(self, stream: ServerStream) -> None:
        self.sending.forget(stream)
        if stream.receiver is not None:
            stream.receiver.on_reset()

    def _refill(self) -> None:
        self.sending.push(window_frame(0, _CONNECTION_WINDOW - self._window))
        self._window = _CONNECTION_WINDOW
