"""The baseline BPRR: waiting-penalised shortest-path request routing (WS-RR).

Sun, He, Ji, Parag (Performance Evaluation 170, 2025): a server costs its communication time, its
computation and the time until it has slots. The original reads this time off the expected ends of
the sessions there (`expected_occupancy`). A router that follows what servers really hold does not
know the ends; it takes the time of a whole session on that server over the number of sessions that
run there, as the program of the server-chain paper's authors does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from catenary_lab.chains.paths import Occupancy
from catenary_services.domain.ids import Nanoseconds


@dataclass(frozen=True, slots=True)
class BprrMetric:
    """The costs of servers, and of waiting for them."""

    communication_ns: Sequence[Nanoseconds]
    """Communication time tau_c of each server."""
    block_ns: Sequence[Nanoseconds]
    """Computation time per block, tau_p, of each server."""
    hosted: Sequence[int]
    """Number of blocks that each server hosts."""
    expected_wait_ns: Callable[[int, int], Nanoseconds] | None = None
    """Returns the time until a server has so many slots by the expected ends of its sessions; None:
    it is estimated from those that run there."""

    def link_ns(self, before: int, server: int, blocks: int) -> Nanoseconds:
        """Returns tau_c + tau_p per block; the server before does not matter."""
        return self.communication_ns[server] + self.block_ns[server] * blocks

    def back_ns(self, server: int) -> Nanoseconds:
        """Returns 0: tau_c covers both ways."""
        return 0

    def extra_ns(self, server: int, blocks: int, occupancy: Occupancy) -> int:
        """Returns how long a session is expected to wait for its slots on a server."""
        if self.expected_wait_ns is not None:
            return self.expected_wait_ns(server, blocks)
        if blocks <= occupancy.slots - occupancy.held:
            return 0
        whole = self.communication_ns[server] + self.block_ns[server] * self.hosted[server]
        return whole // max(1, occupancy.running)
