"""Limits on what one peer does on one connection, and on how long it does nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from catenary_services.http2.frames import INITIAL_WINDOW

BLOCK_BYTES: Final = 32 * 1024
"""The longest block of headers, packed or unpacked. The server refuses shorter ones by itself."""
BLOCK_FRAMES: Final = 16
"""The most frames of one block of headers."""
QUEUED_BYTES: Final = 64 * 1024 * 1024
"""Bytes of answers that wait for a peer; with more, its new calls are refused."""
MOST_WAITING_STREAMS: Final = 256
"""The most streams whose answers wait for a peer; with more, its new calls are refused."""
FRAMES_AT_ONCE: Final = 128
"""The most frames of one connection that are handled before others have their turn."""
WORK_AT_ONCE: Final = 32
"""The work of reading, counted in short blocks of headers, after which all connections of a server
leave the rest to the next turn of the event loop. A short block takes a tenth of a millisecond at
the most, in plain Python."""
SHORT_BLOCK_BYTES: Final = 128
"""Blocks of headers that are shorter count once; the time to read one grows with it."""
PASSING_BLOCK_BYTES: Final = 2 * SHORT_BLOCK_BYTES
"""The longest block of headers that is read though that work is done: those of callers that let the
table do its work are shorter, and to read one costs no more than to answer its call."""
FRAMES_PER_WORK: Final = 16
"""The number of frames that cost as much as one short block of headers."""

FLOOD_BURST: Final = 10_000
"""The most that a peer may cost without letting anything get done."""
FLOOD_PER_S: Final = 2_000
DATA_GIVES_BACK: Final = 4
"""The amount that every frame of data in either direction gives back."""
COST_OF_CONTROL: Final = 10
"""The cost of a frame for which something has to be done: a reset, a setting, a ping."""
COST_OF_FRAME: Final = 1
"""The cost of a frame that moves nothing: a window, a priority, an empty piece of data."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """The limits of a server that may be chosen."""

    most_streams: int = 1_024
    """The most concurrent streams of one connection."""
    calls_at_once: int = 16
    """The most calls of one connection that begin before others have their turn."""
    header_bytes: int = 16 * 1024
    """The most bytes of the headers of a stream, as HTTP/2 counts them."""
    first_window: int = INITIAL_WINDOW
    """Bytes that a stream may carry before anybody asks for more."""
    idle_s: float = 600.0
    """Seconds without a stream after which a connection ends."""
    first_stream_s: float = 60.0
    """Seconds within which the first stream must begin."""
    ping_after_s: float = 30.0
    """Seconds of silence after which the peer is asked whether it is there."""
    ping_answer_s: float = 10.0
    """Seconds within which it must answer."""
    ping_every_s: float = 5.0
    """Seconds between two pings of a peer to which nothing is sent meanwhile."""
    stalled_s: float = 60.0
    """Seconds after which a peer that takes none of what waits for it is given up."""
