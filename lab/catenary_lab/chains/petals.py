"""The baseline PETALS: routing by latency, two full-length sessions per server.

Borzunov et al. (NeurIPS 2023) as the server-chain paper simulates it (section 4.1.3): the shortest
path over pairs of servers, where a hop costs half the round trip, 18 ms and the computation of one
token, and 10 s more if the server already runs as many sessions as its attention cache holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from catenary_lab.chains.paths import Occupancy
from catenary_services.domain.ids import (
    NANOSECONDS_PER_MILLISECOND,
    NANOSECONDS_PER_SECOND,
    Nanoseconds,
)

OVERHEAD_NS = 18 * NANOSECONDS_PER_MILLISECOND
"""Serialisation time of one hop, in nanoseconds."""
FULL_NS = 10 * NANOSECONDS_PER_SECOND
"""Cost, in nanoseconds, of a server without cache for one more session."""


@dataclass(frozen=True, slots=True)
class PetalsMetric:
    """The costs of links, and the penalty for servers that are full."""

    rtt_ns: Callable[[int, int], Nanoseconds]
    """Returns the round trip between two servers; -1 is the orchestrator."""
    block_token_ns: Sequence[float]
    """Computation time of one token in one block, by server."""
    sessions: int
    """Number of sessions that a server takes at a time."""

    def link_ns(self, before: int, server: int, blocks: int) -> Nanoseconds:
        """Returns the sum of half a round trip, the overhead and the computation."""
        computing = round(self.block_token_ns[server] * blocks)
        return self.rtt_ns(before, server) // 2 + OVERHEAD_NS + computing

    def back_ns(self, server: int) -> Nanoseconds:
        """Returns half a round trip, to the orchestrator."""
        return self.rtt_ns(server, -1) // 2

    def extra_ns(self, server: int, blocks: int, occupancy: Occupancy) -> int:
        """Returns 10 s if the server runs as many sessions as it can, and 0 otherwise."""
        return FULL_NS if occupancy.assigned >= self.sessions else 0
