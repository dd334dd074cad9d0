"""A session inside an agent: what was said of it, what is cached, what waits to be computed."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from catenary_protos.catenary.v1 import common_pb2, frame_pb2
    from gpu_agent.decoders.sampling import Sampler
    from gpu_agent.generation.lane import Lane
    from gpu_agent.kv import CacheIntake, CacheOutlet

Hidden = NDArray[np.float32]
Side = Literal["mixed", "prefill", "decode"]
"""What our ring does for a session: all of it, only its prompt, or only what follows."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """When work came here. On this process's monotonic clock."""

    received_ns: int
    transfer_ns: int = 0
    """From the sender's push; 0 if its clock is not ours, or if there was none."""
    timings: Sequence[common_pb2.HopTiming] = ()
    """The hops this step has behind it, if the session is timed."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What does not change about a session while it is here."""

    session_id: int
    opening: frame_pb2.SessionOpening
    hop: int
    """Which hop of its ring we are."""
    deadline_ns: int
    """On this process's monotonic clock."""
    side: Side = "mixed"

    @property
    def ring(self) -> Sequence[common_pb2.Hop]:
        """The ring we are on; a session that is handed over has two."""
        return self.opening.decode_route if self.side == "decode" else self.opening.route

    @property
    def history(self) -> int:
        """Tokens there were when it was opened: the prompt, and what was generated elsewhere."""
        return len(self.opening.token_ids)

    @property
    def own_hop(self) -> common_pb2.Hop:
        """The blocks that are really processed here."""
        return self.ring[self.hop]

    @property
    def is_first(self) -> bool:
        """True if its tokens are embedded here."""
        return self.hop == 0

    @property
    def is_last(self) -> bool:
        """True if its tokens are sampled here."""
        return self.hop == len(self.ring) - 1

    @property
    def first_agent(self) -> str:
        """Who takes its sampled tokens for the next step."""
        return self.ring[0].agent_id

    @property
    def next_agent(self) -> str:
        """Who takes its hidden states. Not for the last hop."""
        return self.ring[self.hop + 1].agent_id


@dataclass(slots=True)
class Chunk:
    """Hidden states of consecutive tokens that came from the hop before."""

    rows: Hidden
    """float32 `[tokens, hidden]`."""
    sample: bool
    arrived: Arrived


@dataclass(slots=True)
class Awaited:
    """What a session that was prefilled elsewhere lacks before it may go on here."""

    caches: CacheIntake
    token: bool
    """The first token has not come; only where tokens are embedded or sampled it must."""

    @property
    def is_over(self) -> bool:
        """True once everything is here."""
        return not self.token and self.caches.is_complete


@dataclass(slots=True, eq=False)
class Session:
    """A session that holds block slots here.

    Invariants: tokens `[0, cached)` are in the cache; those behind them that may be computed are
    `tokens[cached:]` on the first hop and the rows of `chunks` on any other. While something is
    awaited nothing is cached for good, and the session is in no queue.
    """

    facts: Facts
    lane: Lane
    limit: int
    """Most tokens it may have."""
    arrived: Arrived
    """The opening, later the newest token (first hop only)."""
    tokens: list[int] = field(default_factory=list)
    """First hop: the whole sequence as far as it is known."""
    chunks: deque[Chunk] = field(default_factory=deque)
    """Other hops: what came and was not computed yet."""
    expected: int = 0
    """Other hops: position of the rows that come next."""
    sampler: Sampler | None = None
    """Last hop."""
    cached: int = 0
    awaited: Awaited | None = None
    """Side "decode", until its caches are here."""
    outlets: tuple[CacheOutlet, ...] = ()
    """Side "prefill": who is to get which blocks."""
    introduced: bool = False
    """True once the next agent was sent the opening."""
    closed: bool = False
    opened_ns: int = 0
    first_step_ns: int = 0
    prefilled_ns: int = 0
    """End of the step that made the first sample possible; 0 until then."""
    compute_ns: int = 0
    """Sum over its steps, of which other sessions are part, too."""
    steps: int = 0

    @property
    def pending(self) -> int:
        """Tokens that can be computed now, in one piece."""
        if self.facts.hop == 0:
            return len(self.tokens) - self.cached
        return len(self.chunks[0].rows) if self.chunks else 0

    def take(self, most: int) -> Work:
        """Takes up to `most` of the pending tokens out, to compute them."""
        if self.facts.hop == 0:
            end = min(len(self.tokens), self.cached + most)
            inputs = np.array(self.tokens[self.cached : end], np.int64)
            return Work(self, inputs, end == len(self.tokens), self.arrived)
        chunk = self.chunks[0]
        if len(chunk.rows) <= most:
            self.chunks.popleft()
            return Work(self, chunk.rows, chunk.sample, chunk.arrived)
        rows, chunk.rows = chunk.rows[:most], chunk.rows[most:]
        return Work(self, rows, False, chunk.arrived)


@dataclass(slots=True, eq=False)
class Work:
    """A session's part of one step."""

    session: Session
    inputs: NDArray[np.int64] | Hidden
    sample: bool
    """The token behind these is to be sampled."""
    arrived: Arrived
