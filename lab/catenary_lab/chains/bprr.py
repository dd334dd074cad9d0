"""The baseline BPRR: waiting-penalised shortest-path request routing (WS-RR).

Sun, He, Ji, Parag (Performance Evaluation 170, 2025): a server costs its communication time, its
computation and the time until it has slots. How long that is, the original reads off the expected
ends of the sessions there; as ends are not known, the server-chain paper's authors take the time of
a whole session on that server over the number of sessions it has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from catenary_lab.chains.path_dispatcher import PathDispatcher
from catenary_lab.chains.paths import (
    Occupancy,
    Path,
    PathFinder,
    PathServer,
    links_between,
)
from catenary_services.domain.ids import ModelKey, Nanoseconds


@dataclass(frozen=True, slots=True)
class BprrMetric:
    """Costs of servers, and of waiting for them."""

    communication_ns: Sequence[Nanoseconds]
    """tau_c, by server."""
    block_ns: Sequence[Nanoseconds]
    """tau_p, by server."""
    hosted: Sequence[int]
    """Blocks, by server."""
    by_ends: bool = False
    """Wait by expected ends instead of by the number of sessions."""

    def link_ns(self, before: int, server: int, blocks: int) -> Nanoseconds:
        """Returns tau_c + tau_p per block; who came before plays no part."""
        return self.communication_ns[server] + self.block_ns[server] * blocks

    def back_ns(self, server: int) -> Nanoseconds:
        """Returns 0: tau_c is there and back."""
        return 0

    def extra_ns(self, server: int, blocks: int, occupancy: Occupancy, now: Nanoseconds) -> int:
        """Returns how long a session is expected to wait for its slots there."""
        missing = blocks - (occupancy.slots - occupancy.held)
        if missing <= 0:
            return 0
        if self.by_ends:
            return _until_free(occupancy, missing, now)
        whole = self.communication_ns[server] + self.block_ns[server] * self.hosted[server]
        return whole // max(1, occupancy.running)

    def path_ns(self, path: Path) -> Nanoseconds:
        """Returns the expected time of a session on a path."""
        return sum(
            self.link_ns(-1, server, hop.blocks)
            for server, hop in zip(path.servers, path.hops, strict=True)
        )


def _until_free(occupancy: Occupancy, missing: int, now: Nanoseconds) -> Nanoseconds:
    """Returns the time until so many more slots will have been given back."""
    wait = 0
    for end, blocks in sorted(occupancy.ends.values()):
        wait = max(0, end - now)
        missing -= blocks
        if missing <= 0:
            break
    return wait


def bprr_dispatcher(
    model: ModelKey, servers: Sequence[PathServer], blocks: int, metric: BprrMetric
) -> PathDispatcher:
    """Returns a dispatcher that routes as BPRR does.

    Args:
        model: What is served.
        servers: All that host something, numbered as in `metric`.
        blocks: Of the model.
        metric: Costs.
    """
    finder = PathFinder(servers, blocks, links_between(servers, blocks, metric))
    expected: Callable[[Path], Nanoseconds] | None = metric.path_ns if metric.by_ends else None
    return PathDispatcher(model, servers, finder, metric, expected)
