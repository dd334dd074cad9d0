"""One start of a session on a chain: its order, its times and its outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from catenary_gateway.results.pending import HopTimes
from catenary_protos.catenary.v1 import common_pb2, frame_pb2, scheduler_pb2

MOST_EARLY = 64
"""Most tokens of the generating ring that may overtake the tokens of the ring before it."""
BY_KV, BY_TOKENS = "kv", "tokens"
"""The value of `SessionStart.mode` for a move that sends tokens, from which the new ring computes
the caches again; `BY_KV` is for a move that sends the caches."""


@dataclass(slots=True, eq=False)
class SessionStart:
    """One start of a session on a chain.

    Times are nanoseconds of the monotonic clock; 0 if it has not happened.
    """

    session_id: int
    order: scheduler_pb2.StartSession
    started_ns: int
    history_tokens: int
    """Tokens known to be generated before its first token; it began with these or fewer."""
    moves: SessionStart | None = None
    """The start from which this one takes over in a live migration; None if it starts afresh."""
    push_ns: int = 0
    sent_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    cached_tokens: int = 0
    """Tokens that were not computed for it, because sessions before had cached them."""
    failed: str = ""
    """Reason why it brings no more tokens, as far as this gateway knows; empty if it may."""
    failed_ns: int = 0
    early: list[frame_pb2.SessionToken] = field(default_factory=list)
    """Consecutive tokens that arrived before the tokens of another ring that precede them."""
    overtake_timer: asyncio.TimerHandle | None = None
    """The timer that ends the wait for the preceding tokens; None while nothing is waited for."""
    first_hops: tuple[HopTimes, ...] = ()
    later_hops: dict[tuple[str, int, int], HopTimes] = field(default_factory=dict)
    """Sums of hop times over all tokens after the first, by agent and blocks."""

    agents: frozenset[str] = frozenset()
    """Ids of the agents that its tokens may come from."""

    def __post_init__(self) -> None:
        """Collects the agents of its rings."""
        hops = (*self.order.route, *self.order.decode_route)
        self.agents = frozenset(hop.agent_id for hop in hops)

    @property
    def ring(self) -> Sequence[common_pb2.Hop]:
        """The hops that generate its tokens, in the order of their blocks."""
        return self.order.decode_route or self.order.route

    def has_ring_of(self, other: SessionStart) -> bool:
        """Returns True if all is computed where it is computed for another start."""
        mine, its = self.order, other.order
        if mine.epoch != its.epoch or mine.decode_route or its.decode_route:
            return False
        return [_place(hop) for hop in mine.route] == [_place(hop) for hop in its.route]

    @property
    def mode(self) -> str:
        """`BY_TOKENS` if a move sends tokens, else `BY_KV`."""
        by_tokens = self.order.move_mode == scheduler_pb2.MOVE_MODE_TOKENS
        return BY_TOKENS if by_tokens else BY_KV

    def keep_early(self, token: frame_pb2.SessionToken, earliest: int) -> bool:
        """Keeps a token that has overtaken others; returns False if it cannot have done so.

        Args:
            token: A token of this start.
            earliest: The least position of the first token that is kept.
        """
        early = self.early
        if len(early) >= MOST_EARLY or (early and token.position != early[-1].position + 1):
            return False
        if not early and not earliest <= token.position < earliest + MOST_EARLY:
            return False
        early.append(token)
        return True

    def stop_waiting(self) -> None:
        """Ends the wait for tokens that others have overtaken."""
        if self.overtake_timer is not None:
            self.overtake_timer.cancel()
            self.overtake_timer = None

    def add_hops(self, timings: Sequence[common_pb2.HopTiming]) -> None:
        """Adds the hop times of one more token."""
        if not self.first_hops:
            self.first_hops = tuple(map(HopTimes.of, timings))
            return
        for hop in map(HopTimes.of, timings):
            before = self.later_hops.get(hop.blocks)
            self.later_hops[hop.blocks] = hop if before is None else before.plus(hop)


def _place(hop: common_pb2.Hop) -> tuple[str, int, int]:
    return hop.agent_id, hop.first_block, hop.last_block
