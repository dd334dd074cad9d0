"""Bytes that peers make a server hold, and the connections that end for them. Pure.

A peer that opens no window for its answers costs the memory of these, and that of their streams. A
peer that begins headers or frames and never ends them costs what is there of them, and one that has
headers noted in the table of its connection costs the table. A connection bounds each for itself; a
source with many connections may still hold much, which is added up here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from catenary_services.http2.connection import ServerConnection

MOST_OF_ONE_SOURCE: Final = 16 * 1024 * 1024
"""Bytes that the connections of one source may hold together."""
LOOKED_FOR_AFTER: Final = MOST_OF_ONE_SOURCE // 4
"""Bytes by which unfinished frames and headers may grow until those who hold most are looked for
before it is time."""
UNTAKEN_S: Final = 2.0
"""Seconds for which an answer must have waited to be counted."""
_STREAM_BYTES: Final = 2_048
"""Bytes of a stream that waits, beside those of its answer."""


def held_bytes(connection: ServerConnection[Any], now_s: float) -> int:
    """Returns what a connection holds of its peer: what does not go on, and its table of headers.

    One answer may wait whatever its size is, and what waits for the network is not counted. Tables
    of honest callers are so small that those of as many connections as there may be are no surplus.
    """
    sending, held = connection.sending, connection.unfinished_bytes + connection.table_bytes
    if sending.waiting_streams > 1 and not sending.is_held:
        for stream in sending.stalled(now_s - UNTAKEN_S):
            held += stream.waiting_bytes + _STREAM_BYTES
    return held


def surplus(held: Sequence[tuple[str, int]], most_bytes: int = MOST_OF_ONE_SOURCE) -> list[int]:
    """Returns the indices of the connections to end: of each source the largest, until all fits.

    Args:
        held: Source and bytes of each connection.
        most_bytes: The most bytes of one source.
    """
    sums: dict[str, int] = {}
    for source, nbytes in held:
        sums[source] = sums.get(source, 0) + nbytes
    if all(nbytes <= most_bytes for nbytes in sums.values()):
        return []
    found = []
    for at in sorted(range(len(held)), key=lambda at: held[at][1], reverse=True):
        source, nbytes = held[at]
        if sums[source] > most_bytes:
            sums[source] -= nbytes
            found.append(at)
    return found
