"""A filter that passes only frames of peers in the directory, where certificates name the senders.

A scheduler announces a new peer to its counterparts over other streams than it tells the peer that
it may send. So a frame may arrive before the directory that lists its sender. It waits for that
briefly, behind earlier frames, and is refused if the sender stays unknown. The connection is then
closed, so that the sender notices.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable

from catenary_services.log import get_logger
from catenary_services.transport.exchange import deliver
from catenary_services.transport.interface import NOBODY, FrameHandler, ReceivedFrame

WAIT_S = 0.5
"""Seconds within which a directory that is under way arrives."""
LINGER_S = 60.0
"""Seconds for which a peer may send after it was listed last, because a new scheduler learns of its
peers one by one."""
_MOST_WAITING = 256

_log = get_logger("catenary_services.transport")


class KnownSenders:
    """Stands between the transports and the frame handler of one process.

    Attributes:
        refused: Number of frames whose senders no directory listed.
    """

    def __init__(self, handler: FrameHandler, on_refused: Callable[[str], None]) -> None:
        """Passes frames of known senders to `handler`; tells `on_refused` why one is refused."""
        self._handler = handler
        self._on_refused = on_refused
        self._listed: dict[str, float] = {}
        """The time until which a peer may send, by its name; infinity while it is listed."""
        self._waiting: deque[tuple[float, ReceivedFrame]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self.refused = 0

    def take(self, frame: ReceivedFrame) -> None:
        """Passes a frame of a transport on, or keeps it until its sender is listed."""
        if self._is_known(frame):
            self._handler(frame)
        elif len(self._waiting) < _MOST_WAITING:
            self._waiting.append((time.monotonic() + WAIT_S, frame))
            self._set_timer()
        else:
            self._refuse(frame)

    def listed(self, names: Iterable[str]) -> None:
        """Takes over the names in the directory; frames that waited for one are passed on."""
        now = time.monotonic()
        listed = dict.fromkeys(names, _FOREVER)
        for name, until in self._listed.items():
            if name not in listed and (until == _FOREVER or until > now):
                listed[name] = min(until, now + LINGER_S)
        self._listed = listed
        waiting, self._waiting = self._waiting, deque()
        for until, frame in waiting:
            if self._is_known(frame):
                deliver(self._handler, frame)
            else:
                self._waiting.append((until, frame))

    def close(self) -> None:
        """Releases the frames that wait."""
        if self._timer is not None:
            self._timer.cancel()
        for _, frame in self._waiting:
            frame.release()
        self._waiting.clear()

    def _is_known(self, frame: ReceivedFrame) -> bool:
        return self._listed.get(frame.sender.name, 0.0) > time.monotonic()

    def _set_timer(self) -> None:
        if self._timer is None and self._waiting:
            left_s = max(0.0, self._waiting[0][0] - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(left_s, self._expire)

    def _expire(self) -> None:
        self._timer = None
        while self._waiting and self._waiting[0][0] <= time.monotonic():
            self._refuse(self._waiting.popleft()[1])
        self._set_timer()

    def _refuse(self, frame: ReceivedFrame) -> None:
        self.refused += 1
        if frame.sender is not NOBODY:
            frame.sender.is_refused = True
        self._on_refused("unknown_sender")
        _log.warning("frame_refused", sender=frame.sender.name, why="is in no directory")
        frame.release()


_FOREVER = float("inf")
