"""Times of one hop of a chain, independent of the message that reported them.

A field of a message keeps the whole message in memory. Records of requests outlive the requests by
far, so they hold plain numbers instead.
"""

from __future__ import annotations

from typing import NamedTuple

from catenary_protos.catenary.v1 import common_pb2


class HopTimes(NamedTuple):
    """Times of one hop in nanoseconds, as its agent measured them."""

    agent_id: str
    first_block: int
    last_block: int
    transfer_ns: int
    wait_ns: int
    compute_ns: int
    send_ns: int

    @classmethod
    def of(cls, timing: common_pb2.HopTiming) -> HopTimes:
        """Returns the times that a message reports."""
        return cls(
            timing.agent_id,
            timing.first_block,
            timing.last_block,
            timing.transfer_ns,
            timing.wait_ns,
            timing.compute_ns,
            timing.send_ns,
        )

    @property
    def blocks(self) -> tuple[str, int, int]:
        """Identity of the hop: agent, first block and last block."""
        return self.agent_id, self.first_block, self.last_block

    @property
    def phases(self) -> tuple[tuple[str, int], ...]:
        """The phases of the hop in order, each as a name and a duration in nanoseconds."""
        return (
            ("agent.transfer", self.transfer_ns),
            ("agent.wait", self.wait_ns),
            ("agent.compute", self.compute_ns),
            ("agent.send", self.send_ns),
        )

    def plus(self, other: HopTimes) -> HopTimes:
        """Returns the sums of these times and those of another token on the same hop."""
        return HopTimes(
            *self.blocks,
            self.transfer_ns + other.transfer_ns,
            self.wait_ns + other.wait_ns,
            self.compute_ns + other.compute_ns,
            self.send_ns + other.send_ns,
        )
