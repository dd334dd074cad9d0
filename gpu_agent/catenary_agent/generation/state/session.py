"""A session inside an agent: what was said of it, what is cached, what waits to be computed."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from catenary_agent.decoders.sampling.sampling import Sampler
    from catenary_agent.generation.state.lane import Lane
    from catenary_agent.kv import CacheIntake, CacheOutlet
    from catenary_protos.catenary.v1 import common_pb2, frame_pb2

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
    """What a session lacks whose caches come from elsewhere, before it may go on here."""

    caches: CacheIntake
    word: bool
    """Split phase: the first token has not come; only where tokens are embedded or sampled it must.
    Live migration: it was not handed over yet."""
    leader: str = ""
    """Live migration: the first agent of the ring it comes from."""

    @property
    def is_over(self) -> bool:
        """True once everything is here."""
        return not self.word and self.caches.is_complete


@dataclass(slots=True)
class Arriving:
    """Live migration: where a session comes from that was not handed over yet."""

    leader: str
    """The first agent of the ring it is on."""
    moved: int
    """What it is called there."""
    by_tokens: bool
    known: int
    """Tokens that were said so far."""
    asked: int | None = 0
    """The leader waits for so many cached tokens; None: for nothing."""
    begun: bool = False
    """By tokens: they may be read."""


@dataclass(slots=True, eq=False)
class Session:
    """A session that holds block slots here.

    Invariants: tokens `[0, cached)` are in the cache; those behind them that may be computed are
    `tokens[cached:]` on the first hop and the rows of `chunks` on any other. While something is
    awaited nothing is cached for good. Without pending tokens the session is in no queue, with them
    it is in one.
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
    """Until its caches are here, if they come from elsewhere."""
    arriving: Arriving | None = None
    """Until it was handed over, if it moves here."""
    outlets: tuple[CacheOutlet, ...] = ()
    """Who is to get which blocks, if it is handed over or moves."""
    leaves: bool = False
    """Nothing is computed here any more; it ends once its caches have left."""
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
        if self.awaited is not None or self.leaves:
            return 0
        arriving = self.arriving
        if self.facts.hop == 0:
            is_held = arriving is not None and not arriving.begun
            return 0 if is_held else len(self.tokens) - self.cached
        if not self.chunks or (arriving is not None and self.chunks[0].sample):
            return 0  # or handed over already, which this agent has not heard yet
        return len(self.chunks[0].rows)

    def learn(self, token_ids: Sequence[int]) -> None:
        """Takes tokens in that another ring has sampled."""
        if self.facts.is_first:
            self.tokens += token_ids
        if self.sampler is not None:
            for token_id in token_ids:
                self.sampler.accept(token_id)

    def take(self, most: int) -> Work:
        """Takes up to `most` of the pending tokens out, to compute them."""
        if self.facts.hop == 0:
            end = min(len(self.tokens), self.cached + most)
            inputs = np.array(self.tokens[self.cached : end], np.int64)
            is_last = end == len(self.tokens) and self.arriving is None
            return Work(self, inputs, is_last, self.arrived)
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
