"""Reports to the scheduler of how fast caches leave for each peer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from catenary_agent.engine.reporting import FixedMessage
from catenary_protos.catenary.v1 import scheduler_pb2

_REPORT_S = 0.25
"""Seconds after the first frame at which everything sent is reported in one message. A move of
caches takes about as long, or less."""


class SentCacheReporter:
    """Adds up bytes and sending time by peer, and reports them a while after the first frame.

    Frames of one peer leave one after the other, so the time in which at least one was being sent
    is the sum of their times.
    """

    def __init__(self, tell: Callable[[FixedMessage], None], report_s: float = _REPORT_S) -> None:
        """Waits for the first frame.

        Args:
            tell: Accepts a message for the scheduler.
            report_s: Seconds from the first frame to the message.
        """
        self._tell = tell
        self._report_s = report_s
        self._links: dict[str, scheduler_pb2.CachesSent.Link] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, peer: str, nbytes: int, sending_ns: int) -> None:
        """Counts a frame of caches that left for a peer in `sending_ns` nanoseconds."""
        link = self._links.get(peer)
        if link is None:
            link = self._links[peer] = scheduler_pb2.CachesSent.Link(peer_id=peer)
        link.bytes += nbytes
        link.sending_ns += sending_ns
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._report_s, self._report)

    def close(self) -> None:
        """Drops what was not reported."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._links.clear()

    def _report(self) -> None:
        self._timer = None
        sent = scheduler_pb2.CachesSent(links=self._links.values())
        self._links.clear()
        self._tell(FixedMessage(scheduler_pb2.AgentMessage(caches_sent=sent), droppable=True))
