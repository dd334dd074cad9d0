"""The frames of a connection that concern no stream in particular."""

from __future__ import annotations

from collections.abc import Callable

from catenary_services.http2 import frames
from catenary_services.http2.flood_limit import FloodLimit
from catenary_services.http2.frames import (
    ACK,
    FLOW_CONTROL_ERROR,
    FRAME_BYTES,
    FRAME_SIZE_ERROR,
    LARGEST_WINDOW,
    PROTOCOL_ERROR,
    WORD,
    ConnectionViolation,
    frame,
)
from catenary_services.http2.limits import COST_OF_CONTROL, COST_OF_FRAME
from catenary_services.http2.sending import FrameSender

_word_at = WORD.unpack_from


class ControlFrames:
    """Settings, pings, priorities and farewells of one peer.

    Attributes:
        has_settings: Whether the peer has said what it takes.
        pings: The number of pings that the peer answered.
        on_ping: Called for each ping of the peer.
    """

    __slots__ = ("_flood_limit", "_sending", "has_settings", "on_ping", "pings")

    def __init__(self, sending: FrameSender, flood_limit: FloodLimit) -> None:
        self._sending = sending
        self._flood_limit = flood_limit
        self.has_settings = False
        self.pings = 0
        self.on_ping: Callable[[], None] = _nothing

    def on_extension(self, flags: int, number: int, payload: bytes) -> None:
        """Ignores a frame of a kind that is not known."""
        self._flood_limit.spend(COST_OF_FRAME)

    def on_push(self, flags: int, number: int, payload: bytes) -> None:
        """Refuses a push.

        Raises:
            ConnectionViolation: Clients cannot push.
        """
        raise ConnectionViolation(PROTOCOL_ERROR, "a client cannot push")

    def on_priority(self, flags: int, number: int, payload: bytes) -> None:
        """Checks a priority, which changes nothing here."""
        if number == 0:
            raise ConnectionViolation(PROTOCOL_ERROR, "a priority of no stream")
        if len(payload) != 5:
            raise ConnectionViolation(FRAME_SIZE_ERROR, "a priority has another length")
        if _word_at(payload)[0] & LARGEST_WINDOW == number:
            raise ConnectionViolation(PROTOCOL_ERROR, "a stream depends on itself")
        self._flood_limit.spend(COST_OF_FRAME)

    def on_settings(self, flags: int, number: int, payload: bytes) -> None:
        """Takes what the peer accepts, or that it has read what is accepted here."""
        if number != 0:
            raise ConnectionViolation(PROTOCOL_ERROR, "settings of a stream")
        if len(payload) % 6 or (flags & ACK and payload):
            raise ConnectionViolation(FRAME_SIZE_ERROR, "settings have another length")
        self._flood_limit.spend(COST_OF_CONTROL + len(payload) // 6)
        if flags & ACK:
            return
        self.has_settings = True
        for name, value in frames.settings_in(payload):
            if name == frames.INITIAL_WINDOW_SIZE:
                if value > LARGEST_WINDOW:
                    raise ConnectionViolation(FLOW_CONTROL_ERROR, "the window is too large")
                self._sending.resize(value)
            elif name == frames.MAX_FRAME_SIZE:
                if not FRAME_BYTES <= value < 1 << 24:
                    raise ConnectionViolation(PROTOCOL_ERROR, "frames cannot be so long")
                # Longer ones would only keep other streams waiting.
                self._sending.frame_bytes = min(value, 4 * FRAME_BYTES)
            elif name == frames.ENABLE_PUSH and value > 1:
                raise ConnectionViolation(PROTOCOL_ERROR, "a setting is neither 0 nor 1")
        self._sending.push(frame(frames.SETTINGS, ACK, 0))

    def on_ping_frame(self, flags: int, number: int, payload: bytes) -> None:
        """Answers a ping, or notes an answer."""
        if number != 0:
            raise ConnectionViolation(PROTOCOL_ERROR, "a ping of a stream")
        if len(payload) != 8:
            raise ConnectionViolation(FRAME_SIZE_ERROR, "a ping has another length")
        self._flood_limit.spend(COST_OF_CONTROL)
        if flags & ACK:
            self.pings += 1
            return
        self.on_ping()
        self._sending.push(frame(frames.PING, ACK, 0, payload))

    def on_goaway(self, flags: int, number: int, payload: bytes) -> None:
        """Notes that the peer opens no further streams, which it shows by closing."""
        if number != 0 or len(payload) < 8:
            raise ConnectionViolation(PROTOCOL_ERROR, "a farewell of another form")
        self._flood_limit.spend(COST_OF_CONTROL)


def _nothing() -> None:
    """Does nothing about a ping."""
