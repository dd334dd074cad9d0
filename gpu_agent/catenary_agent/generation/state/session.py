"""The state of a session at one agent: its opening, its cached tokens and its pending input."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from catenary_agent.decoders.sampling.sampling import SessionSampler
    from catenary_agent.generation.state.partition_batcher import PartitionBatcher
    from catenary_agent.kv import CacheReceiveProgress, CacheSendProgress
    from catenary_protos.catenary.v1 import common_pb2, frame_pb2

Hidden = NDArray[np.float32]
Side = Literal["mixed", "prefill", "decode"]
"""The work of a ring for a session: everything, only its prompt, or only the tokens after it."""


@dataclass(frozen=True, slots=True)
class ArrivalTime:
    """The arrival of work on this process's monotonic clock, in nanoseconds."""

    received_ns: int
    transfer_ns: int = 0
    """Nanoseconds since the sender's push; 0 if the clocks differ, or if nothing was sent."""
    timings: Sequence[common_pb2.HopTiming] = ()
    """Timings of the previous hops of this step, if the session is timed."""


@dataclass(frozen=True, slots=True)
class SessionSpec:
    """The properties of a session that are constant while it is here."""

    session_id: int
    opening: frame_pb2.SessionOpening
    hop: int
    """Index of this agent's hop in its ring."""
    deadline_ns: int
    """The deadline on this process's monotonic clock."""
    side: Side = "mixed"

    @property
    def ring(self) -> Sequence[common_pb2.Hop]:
        """The ring of this agent; in the split phase a session has two."""
        return self.opening.decode_route if self.side == "decode" else self.opening.route

    @property
    def history(self) -> int:
        """Number of tokens in the opening: the prompt, and what was generated elsewhere."""
        return len(self.opening.token_ids)

    @property
    def own_hop(self) -> common_pb2.Hop:
        """The blocks that this agent computes for the session."""
        return self.ring[self.hop]

    @property
    def is_first(self) -> bool:
        """True if this agent embeds the session's tokens."""
        return self.hop == 0

    @property
    def is_last(self) -> bool:
        """True if this agent samples the session's tokens."""
        return self.hop == len(self.ring) - 1

    @property
    def first_agent(self) -> str:
        """The agent that takes the sampled tokens for the next step."""
        return self.ring[0].agent_id

    @property
    def next_agent(self) -> str:
        """The agent that takes the hidden states; undefined for the last hop."""
        return self.ring[self.hop + 1].agent_id


@dataclass(slots=True)
class HiddenChunk:
    """Hidden states of consecutive tokens that arrived from the previous hop."""

    rows: Hidden
    """Hidden states, float32 `[tokens, hidden]`."""
    sample: bool
    arrived: ArrivalTime


@dataclass(slots=True)
class PendingCache:
    """The parts still missing from a session whose caches come from elsewhere."""

    caches: CacheReceiveProgress
    word: bool
    """True while a message is awaited beside the caches. Split phase: the first token, on hops that
    embed or sample tokens. Live migration: the hand-over."""
    leader: str = ""
    """The first agent of the old ring in a live migration; empty in the split phase."""

    @property
    def is_over(self) -> bool:
        """True once everything is here."""
        return not self.word and self.caches.is_complete


@dataclass(slots=True)
class IncomingMigration:
    """The origin of a session that moves here and was not handed over yet."""

    leader: str
    """The first agent of the old ring."""
    moved: int
    """The id of the session on the old ring."""
    by_tokens: bool
    known: int
    """Number of tokens received so far."""
    asked: int | None = 0
    """Number of cached tokens the leader waits for; None if it waits for nothing."""
    begun: bool = False
    """True in a move by tokens once they may be computed."""


@dataclass(slots=True, eq=False)
class Session:
    """A session that holds block slots here.

    Invariants: tokens `[0, cached)` are in the cache. The pending ones behind them are
    `tokens[cached:]` on the first hop and the rows of `chunks` on any other. While `pending_cache`
    is set nothing is pending. A session is in a queue of its batcher exactly if it has pending
    tokens.
    """

    spec: SessionSpec
    batcher: PartitionBatcher
    limit: int
    """The most tokens it may have, prompt included."""
    arrived: ArrivalTime
    """Arrival of the opening, on the first hop later of the newest token."""
    tokens: list[int] = field(default_factory=list)
    """First hop only: the whole sequence as far as it is known."""
    chunks: deque[HiddenChunk] = field(default_factory=deque)
    """Other hops only: rows that arrived and were not computed yet."""
    expected: int = 0
    """Other hops only: position of the next rows."""
    sampler: SessionSampler | None = None
    """Last hop only; None on others."""
    cached: int = 0
    pending_cache: PendingCache | None = None
    """Set until the caches are here, if they come from elsewhere."""
    incoming: IncomingMigration | None = None
    """Set until the session is handed over, if it moves here."""
    cache_sends: tuple[CacheSendProgress, ...] = ()
    """The receivers of the caches and their blocks, if the session is handed over or moves."""
    leaves: bool = False
    """True if nothing more is computed here: the session ends once its caches have left."""
    introduced: bool = False
    """True once the next agent was sent the opening."""
    closed: bool = False
    opened_ns: int = 0
    first_step_ns: int = 0
    prefilled_ns: int = 0
    """End of the step that made the first sample possible; 0 until then."""
    compute_ns: int = 0
    """Sum of the durations of its steps, which other sessions shared."""
    steps: int = 0

    @property
    def pending(self) -> int:
        """Number of tokens that can be computed now in one piece."""
        if self.pending_cache is not None or self.leaves:
            return 0
        incoming = self.incoming
        if self.spec.hop == 0:
            is_held = incoming is not None and not incoming.begun
            return 0 if is_held else len(self.tokens) - self.cached
        if not self.chunks or (incoming is not None and self.chunks[0].sample):
            return 0  # the hand-over of these rows has not reached this agent yet
        return len(self.chunks[0].rows)

    def learn(self, token_ids: Sequence[int]) -> None:
        """Adds tokens that another ring has sampled."""
        if self.spec.is_first:
            self.tokens += token_ids
        if self.sampler is not None:
            for token_id in token_ids:
                self.sampler.accept(token_id)

    def take(self, most: int) -> SessionWork:
        """Removes up to `most` pending tokens from the session, to be computed."""
        if self.spec.hop == 0:
            end = min(len(self.tokens), self.cached + most)
            inputs = np.array(self.tokens[self.cached : end], np.int64)
            is_last = end == len(self.tokens) and self.incoming is None
            return SessionWork(self, inputs, is_last, self.arrived)
        chunk = self.chunks[0]
        if len(chunk.rows) <= most:
            self.chunks.popleft()
            return SessionWork(self, chunk.rows, chunk.sample, chunk.arrived)
        rows, chunk.rows = chunk.rows[:most], chunk.rows[most:]
        return SessionWork(self, rows, False, chunk.arrived)


@dataclass(slots=True, eq=False)
class SessionWork:
    """The part of one session in one step."""

    session: Session
    inputs: NDArray[np.int64] | Hidden
    sample: bool
    """True if the token after these inputs is to be sampled."""
    arrived: ArrivalTime
