"""Limits on connections to the HTTP endpoint: their number, and the time without a request.

A connection waits long for its next request, and would do so for the first one, too (the "slow
loris" attack).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

from catenary_services.log import get_logger

MOST_CONNECTIONS = 8192
MOST_OF_ONE_SOURCE = 2048
"""Most connections from one address; if there are more, those without a request are closed."""
FIRST_REQUEST_S = 15.0
"""Seconds within which a new connection must have sent the headers of a request."""
_LOOK_S = 0.5

_log = get_logger("catenary_gateway.http")


class WatchedConnection(Protocol):
    """A connection that can be closed from outside."""

    @property
    def transport(self) -> asyncio.Transport | None:
        """The transport; None once the connection is closed."""
        ...

    def force_close(self) -> None:
        """Closes it, whatever it does."""
        ...


class ConnectionWatcher:
    """A watcher that closes surplus and silent connections of a server, from `start` to `stop`."""

    def __init__(
        self,
        first_request_s: float = FIRST_REQUEST_S,
        most: int = MOST_CONNECTIONS,
        most_of_one_source: int = MOST_OF_ONE_SOURCE,
    ) -> None:
        self._most_of_one_source = most_of_one_source
        self._first_request_s = first_request_s
        self._most = most
        self._served: set[WatchedConnection] = set()
        """The connections that have sent a request."""
        self._since: dict[WatchedConnection, float] = {}
        """Time at which each connection without a request was first seen, in seconds."""
        self._task: asyncio.Task[None] | None = None

    def start(self, connections: Callable[[], Sequence[WatchedConnection]]) -> None:
        """Starts to watch; `connections` returns those that are open."""
        self._task = asyncio.create_task(self._watch(connections))

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def look(self, connections: Sequence[WatchedConnection], now_s: float) -> int:
        """Closes the connections that waited too long for their first request, or are too many.

        Returns:
            The number of closed connections.
        """
        open_now = set(connections)
        self._served &= open_now
        silent = [each for each in connections if each not in self._served]
        self._since = {each: self._since.get(each, now_s) for each in silent}
        late = [each for each in silent if now_s - self._since[each] > self._first_request_s]
        late += self._too_many_of_one(connections, silent, set(late))
        left = len(connections) - len(late)
        if left > self._most:
            # Connections without a request are closed, the latest first.
            young = [each for each in silent if each not in late]
            young.sort(key=lambda each: self._since[each], reverse=True)
            late += young[: left - self._most]
        for connection in late:
            connection.force_close()
        if late:
            _log.warning("http_connections_closed", count=len(late), left=left)
        return len(late)

    def _too_many_of_one(
        self,
        connections: Sequence[WatchedConnection],
        silent: list[WatchedConnection],
        late: set[WatchedConnection],
    ) -> list[WatchedConnection]:
        """Returns the surplus of sources with too many connections: their youngest silent ones."""
        if len(connections) <= self._most_of_one_source:
            return []
        of_source = Counter(map(_source_of, connections))
        excess: list[WatchedConnection] = []
        for each in sorted(silent, key=lambda each: self._since[each], reverse=True):
            source = _source_of(each)
            if each not in late and of_source[source] > self._most_of_one_source:
                of_source[source] -= 1
                excess.append(each)
        return excess

    def note_request(self, connection: WatchedConnection) -> None:
        """Notes that a request came on a connection."""
        self._served.add(connection)

    async def _watch(self, connections: Callable[[], Sequence[WatchedConnection]]) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                self.look(connections(), time.monotonic())
            except Exception as error:  # nobody waits for this task
                _log.error("http_connections_watch_failed", exc_info=error)


def _source_of(connection: WatchedConnection) -> str:
    transport = connection.transport
    name = None if transport is None else transport.get_extra_info("peername")
    return str(name[0]) if isinstance(name, tuple) else ""
