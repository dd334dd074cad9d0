"""One start of a session on a chain: where it runs, and what came of it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from catenary_gateway.results.hop_times import HopTimes
from catenary_protos.catenary.v1 import common_pb2, frame_pb2, scheduler_pb2

MOST_EARLY = 64
"""Tokens of the ring that generates that may overtake those of the ring before it."""
BY_KV, BY_TOKENS = "kv", "tokens"
"""What travels when a session moves: its caches, or its tokens to compute them again."""


@dataclass(slots=True, eq=False)
class Start:
    """One start of a session on a chain. Times are of the monotonic clock; 0: not yet."""

    session_id: int
    order: scheduler_pb2.StartSession
    started_ns: int
    history_tokens: int
    """Generated before its first token, as far as was known; so part of what it began with."""
    moves: Start | None = None
    """Live migration: the start that it takes over from while that one goes on."""
    push_ns: int = 0
    sent_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    failed: str = ""
    """Reason it brings no more, as far as this gateway knows."""
    failed_ns: int = 0
    early: list[frame_pb2.SessionToken] = field(default_factory=list)
    """Tokens in a row that came before those of another ring that precede them."""
    patience: asyncio.TimerHandle | None = None
    """Ends the wait for those."""
    first_hops: tuple[HopTimes, ...] = ()
    later_hops: dict[tuple[str, int, int], HopTimes] = field(default_factory=dict)
    """Sums over the tokens behind the first, by agent and blocks."""

    agents: frozenset[str] = frozenset()
    """Whom its tokens may come from."""

    def __post_init__(self) -> None:
        """Notes who is on its rings."""
        hops = (*self.order.route, *self.order.decode_route)
        self.agents = frozenset(hop.agent_id for hop in hops)

    @property
    def ring(self) -> Sequence[common_pb2.Hop]:
        """Where its tokens are generated, in the order of blocks."""
        return self.order.decode_route or self.order.route

    @property
    def mode(self) -> str:
        """What travels, if it takes over from another."""
        by_tokens = self.order.move_mode == scheduler_pb2.MOVE_MODE_TOKENS
        return BY_TOKENS if by_tokens else BY_KV

    def keep_early(self, token: frame_pb2.SessionToken, earliest: int) -> bool:
        """Keeps a token that overtook others; False if it cannot have done so.

        Args:
            token: Of this start.
            earliest: Position the first token kept must have at least.
        """
        early = self.early
        if len(early) >= MOST_EARLY or (early and token.position != early[-1].position + 1):
            return False
        if not early and not earliest <= token.position < earliest + MOST_EARLY:
            return False
        early.append(token)
        return True

    def stop_waiting(self) -> None:
        """Nothing that it overtook is waited for any more."""
        if self.patience is not None:
            self.patience.cancel()
            self.patience = None

    def add_hops(self, timings: Sequence[common_pb2.HopTiming]) -> None:
        """Takes the hops of one more token into account."""
        if not self.first_hops:
            self.first_hops = tuple(map(HopTimes.of, timings))
            return
        for hop in map(HopTimes.of, timings):
            before = self.later_hops.get(hop.blocks)
            self.later_hops[hop.blocks] = hop if before is None else before.plus(hop)
