"""Beliefs of a router that is not told when sessions end.

The routers of the papers know which path they gave to which request, and how long a session of mean
size takes there. They take every session for over at its expected end: one that is longer still
holds its slots then, and one that was shorter is still counted. Servers grant slots by what is true
all the same, so a request may wait for a session that its router takes for gone.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable, Sequence

from catenary_lab.chains.paths import Occupancy
from catenary_services.domain.ids import Nanoseconds
from catenary_services.domain.plan import ChainHop


class ExpectedOccupancy:
    """The servers as a router believes them to be.

    Args:
        slots: Number of block slots of every server.
        service_ns: Returns the time that a session of mean size spends on a server for a number of
            blocks, the way there included.
    """

    def __init__(self, slots: Sequence[int], service_ns: Callable[[int, int], Nanoseconds]) -> None:
        self._service_ns = service_ns
        self._occupancy = [Occupancy(each) for each in slots]
        self._ends: list[list[tuple[Nanoseconds, int]]] = [[] for _ in slots]
        """Expected end and blocks of the sessions that every server is believed to have, the
        earliest end first."""
        self._now: Nanoseconds = 0

    def at(self, now: Nanoseconds) -> Sequence[Occupancy]:
        """Returns the believed occupancy of every server at a moment, which never goes back."""
        self._now = now
        for state, ends in zip(self._occupancy, self._ends, strict=True):
            over = bisect_right(ends, (now, state.slots))
            for _, blocks in ends[:over]:
                state.held -= blocks
                state.assigned -= 1
                state.running -= 1
            del ends[:over]
        return self._occupancy

    def wait_ns(self, server: int, blocks: int) -> Nanoseconds:
        """Returns the time until a server has so many slots, by the expected ends of sessions."""
        state = self._occupancy[server]
        held = state.held
        if held + blocks <= state.slots:
            return 0
        for end, freed in self._ends[server]:
            held -= freed
            if held + blocks <= state.slots:
                return end - self._now
        return 0

    def routed(self, servers: Sequence[int], hops: Sequence[ChainHop]) -> None:
        """Believes that a request goes by a path, from the last moment that `at` was told."""
        path = list(zip(servers, (hop.blocks for hop in hops), strict=True))
        waits_ns = max(self.wait_ns(server, blocks) for server, blocks in path)
        takes_ns = sum(self._service_ns(server, blocks) for server, blocks in path)
        end = self._now + waits_ns + takes_ns
        for server, blocks in path:
            state = self._occupancy[server]
            state.held += blocks
            state.assigned += 1
            state.running += 1
            insort(self._ends[server], (end, blocks))
