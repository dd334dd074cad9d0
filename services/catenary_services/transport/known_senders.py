"""Lets through the frames of peers that the directory knows, where certificates say who sends.

A scheduler tells a new peer's counterparts of it over other streams than it tells the peer that it
may send: a frame may be here before the directory that names its sender. It waits for that, for a
moment and behind those before it, and is refused if the sender stays unknown: the connection is
closed then, so that the sender hears of it.
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
"""A directory that is under way is here by then."""
LINGER_S = 60.0
"""Who was listed so lately may still send: a new scheduler learns of its peers one by one."""
_MOST_WAITING = 256

_log = get_logger("catenary_services.transport")


class KnownSenders:
    """Stands between the transports and the handler of one process.

    Attributes:
        refused: Frames of senders that no directory named.
    """

    def __init__(self, handler: FrameHandler, on_refused: Callable[[str], None]) -> None:
        """Gives `handler` the frames of known senders, tells `on_refused` why one is not taken."""
        self._handler = handler
        self._on_refused = on_refused
        self._listed: dict[str, float] = {}
        """By name, until when a peer may send; infinity while it is listed."""
        self._waiting: deque[tuple[float, ReceivedFrame]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self.refused = 0

    def take(self, frame: ReceivedFrame) -> None:
        """Takes a frame from a transport."""
        if self._is_known(frame):
            self._handler(frame)
        elif len(self._waiting) < _MOST_WAITING:
            self._waiting.append((time.monotonic() + WAIT_S, frame))
            self._set_timer()
        else:
            self._refuse(frame)

    def listed(self, names: Iterable[str]) -> None:
        """Takes over who is in the directory now; frames that waited for it go on."""
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
        """Gives back what waits."""
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
