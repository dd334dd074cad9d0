"""The state of a session at one agent: its opening, its cached tokens and its pending input."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from catenary_agent.decoders.base import StepItem, StepScores
from catenary_agent.generation.state.partition_batcher import (
    LONGEST_PRECEDENCE_NS,
    PromptTurn,
)
from catenary_agent.generation.state.states import (
    AWAITING_TOKEN,
    CLOSED,
    LEAVING,
    MIGRATING_IN,
    QUEUED,
    RECEIVING,
    WAITING,
    History,
    SessionState,
)

if TYPE_CHECKING:
    from catenary_agent.decoders.base import Want
    from catenary_agent.decoders.sampling.sampling import SessionSampler
    from catenary_agent.generation.drafts.drafter import Drafter
    from catenary_agent.generation.state.partition_batcher import PartitionBatcher
    from catenary_agent.kv import CacheReceiveProgress, CacheSendProgress
    from catenary_protos.catenary.v1 import common_pb2, frame_pb2
    from catenary_services.domain.ids import Nanoseconds
    from catenary_services.domain.sampling import SamplingParameters

_MOST_UNSENT = 2
"""The frames of one session that may wait for a link: one that leaves, and one for when it has
left. Further rows are computed only then."""
_SHORT_CHUNK_TOKENS = 64
"""Rows that arrived behind fewer rows of the same prompt are computed together with them."""
Hidden = NDArray[np.float32]
Times = tuple[int, int]
"""The start and the end of a step in monotonic nanoseconds."""
Side = Literal["mixed", "prefill", "decode"]
"""The work of a ring for a session: everything, only its prompt, or only the tokens after it."""


class Drafts(NamedTuple):
    """The guessed tokens that the last rows of a step belong to."""

    tokens: tuple[int, ...] = ()
    are_taken: bool = False
    """True if all agents that the rows have passed can take some."""


NO_DRAFTS = Drafts()


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
    is_first: bool = field(init=False)
    """True if this agent embeds the session's tokens."""
    is_last: bool = field(init=False)
    """True if this agent samples the session's tokens."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_first", self.hop == 0)
        object.__setattr__(self, "is_last", self.hop == len(self.ring) - 1)

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
    drafts: Drafts = NO_DRAFTS


@dataclass(frozen=True, slots=True)
class PendingCache:
    """The caches that a session is missing, which come from elsewhere."""

    progress: CacheReceiveProgress
    leader: str = ""
    """The first agent of the old ring in a live migration; empty if there is none."""
    shared: int = 0
    """The session of this agent whose prompt is shared; 0 if the caches come from elsewhere."""


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


@dataclass(slots=True, eq=False)
class Session:
    """A session that holds block slots here. `validate` checks what holds between two events."""

    spec: SessionSpec
    batcher: PartitionBatcher
    limit: int
    """The most tokens it may have, prompt included."""
    arrived: ArrivalTime
    """Arrival of the opening, on the first hop later of the newest token."""
    state: SessionState
    """Changed by `SessionTable.go` only."""
    tokens: list[int] = field(default_factory=list)
    """The sequence as far as it is known: on the first hop all of it; on others what the opening
    said, and the tokens of rows that came since."""
    chunks: deque[HiddenChunk] = field(default_factory=deque)
    """Other hops only: rows that arrived and were not computed yet."""
    expected: int = 0
    """Other hops only: position of the next rows."""
    sampler: SessionSampler | None = None
    """Last hop only; None on others."""
    is_held: bool = False
    """True until the grammar of the answer is compiled; nothing is computed before."""
    awaits_prefix: bool = False
    """First hop only: True until it is known how many of the tokens it has from sessions before all
    agents of the ring have; nothing is computed before."""
    may_rewind: bool = False
    """Other hops only: True until the first rows come, if it has tokens from sessions before. The
    rows may begin in front of the last of these."""
    reused: int = 0
    """Number of tokens that were not computed here, but cached by sessions before."""
    digests: list[bytes] = field(default_factory=list)
    """Digests of its first blocks, as far as they were needed (`domain.prefixes`)."""
    kept_blocks: int = 0
    """Number of its first blocks that were kept for others, or were kept before."""
    cached: int = 0
    """Number of tokens in the cache. The pending ones are those behind them."""
    drafted: tuple[int, ...] = ()
    """The guessed tokens that are cached behind these, until it is known how many are right."""
    drafter: Drafter | None = None
    """First hop only: guesses the next tokens; None if none are guessed for this session."""
    ring_takes_drafts: bool = False
    """First hop only: whether all agents of the ring are known to take guesses."""
    is_unequal: bool = False
    """First hop only: True after a step with guesses. The others do not know yet how many of them
    were right, and count fewer tokens as cached."""
    stepped_ns: int = 0
    """The end of its latest step."""
    pending_cache: PendingCache | None = None
    """Set until the caches are here, if they come from elsewhere."""
    incoming: IncomingMigration | None = None
    """Set until the session is handed over, if it moves here."""
    cache_sends: tuple[CacheSendProgress, ...] = ()
    """The receivers of the caches and their blocks, if the session is handed over or moves."""
    introduced: bool = False
    """True once the next agent was sent the opening."""
    unsent: int = 0
    """Number of frames with rows of it that wait for the link to the next agent, and which others
    may overtake."""
    opened_ns: int = 0
    first_step_ns: int = 0
    prefilled_ns: int = 0
    """End of the step that made the first sample possible; 0 until then."""
    compute_ns: int = 0
    """Sum of the durations of its steps, which other sessions shared."""
    steps: int = 0
    history: History = field(default_factory=History)

    @property
    def pending(self) -> int:
        """Number of known tokens that can be computed in one piece; guesses do not count."""
        if self.is_held or self.awaits_prefix or self.unsent >= _MOST_UNSENT:
            return 0
        if self.spec.is_first:
            return len(self.tokens) - self.cached
        if not self.chunks or (self.incoming is not None and self.chunks[0].sample):
            return 0  # the hand-over of these rows has not reached this agent yet
        return len(self.chunks[0].rows) - len(self.chunks[0].drafts.tokens)

    @property
    def turn(self) -> PromptTurn:
        """The place of its prompt in the order in which prompts are read."""
        opened_ns, spec = self.opened_ns, self.spec
        due_ns = min(spec.deadline_ns, opened_ns + LONGEST_PRECEDENCE_NS)
        rest_tokens = max(self.pending, spec.history - self.cached)
        return PromptTurn(due_ns, opened_ns, rest_tokens, spec.session_id)

    def validate(self) -> None:
        """Raises AssertionError unless the fields agree with the state, as between two events."""
        state, incoming = self.state, self.incoming
        if state is not LEAVING:
            misses = state in (AWAITING_TOKEN, RECEIVING)
            misses |= state is MIGRATING_IN and incoming is not None and not incoming.by_tokens
            assert misses == (self.pending_cache is not None)
            assert incoming is None or state not in (AWAITING_TOKEN, RECEIVING)
            assert incoming is not None or state is not MIGRATING_IN
        assert state is not CLOSED
        assert state is not WAITING or not self.pending
        assert state is not QUEUED or self.pending
        assert state is not LEAVING or not all(each.is_empty for each in self.cache_sends)
        assert (self.sampler is not None) == self.spec.is_last
        assert not self.is_held or (self.sampler is not None and self.sampler.mask is not None)
        if self.spec.is_first:
            assert not self.chunks
            assert self.cached <= len(self.tokens) <= self.limit
        elif self.pending_cache is None:
            coming = sum(len(chunk.rows) - len(chunk.drafts.tokens) for chunk in self.chunks)
            assert self.expected == self.cached + coming
        assert not self.drafted or not self.chunks
        assert self.drafter is None or self.spec.is_first
        assert not self.awaits_prefix or (self.spec.is_first and not self.spec.is_last)
        assert not self.may_rewind or (not self.spec.is_first and not self.chunks)

    def learn(self, token_ids: Sequence[int]) -> None:
        """Adds tokens that another ring has sampled."""
        self.tokens += token_ids
        if self.sampler is not None:
            for token_id in token_ids:
                self.sampler.accept(token_id)

    def hear(self, token_ids: Sequence[int], end: int) -> None:
        """Takes in on other hops than the first what tokens rows belong to, up to position `end`.

        An agent of an older release does not say it; then the later ones are not known either.
        """
        start = end - len(token_ids)
        if start <= len(self.tokens):
            self.tokens[start:] = token_ids

    def rewind(self, tokens: int) -> None:
        """Forgets what is cached behind the first `tokens`, of a session that has not begun."""
        if tokens < self.cached:
            self.batcher.executor.truncate(self.spec.session_id, tokens)
            self.cached = tokens
        self.reused = self.cached

    def take(self, token_id: int) -> None:
        """Adds the newest token on the first hop. `check_token` says whether it may come next."""
        if self.cached < len(self.tokens):  # the guess before it was right, and is cached
            self.cached += 1
            self.drafted = self.drafted[1:]
        self.tokens.append(token_id)

    def hold(self, chunk: HiddenChunk) -> None:
        """Takes in rows on other hops than the first, which follow those that are here.

        A slow link brings a prompt in small pieces. If they come faster than they are computed,
        they are put together, so that no step reads all weights for a few rows.
        """
        last = self.chunks[-1] if self.chunks else None
        is_open = last is not None and not last.sample and len(last.rows) < _SHORT_CHUNK_TOKENS
        if last is None or not is_open or chunk.drafts.tokens or self.incoming is not None:
            self.chunks.append(chunk)
        else:
            rows = np.concatenate((last.rows, chunk.rows))
            self.chunks[-1] = HiddenChunk(rows, chunk.sample, chunk.arrived)

    def settle(self, now: Nanoseconds) -> None:
        """Forgets the guesses of a step on the first hop, when all its tokens are known."""
        self.keep(0)
        if self.drafter is not None:
            if not self.is_unequal:
                self.drafter.note_trip(max(0, now - self.stepped_ns))
            self.drafter.follow(self.tokens)

    def keep(self, tokens: int) -> None:
        """Counts the first of the guessed tokens as cached, and forgets the others."""
        self.cached += tokens
        if len(self.drafted) > tokens:
            self.batcher.executor.truncate(self.spec.session_id, self.cached)
        self.drafted = ()

    def work(self, most: int, drafts: Sequence[int] = ()) -> SessionWork:
        """Returns the computation of up to `most` pending tokens; changes nothing.

        Args:
            most: The most known tokens.
            drafts: On the first hop, guesses of the tokens behind all that are known.
        """
        if self.spec.is_first:
            end = min(len(self.tokens), self.cached + most)
            inputs = np.array([*self.tokens[self.cached : end], *drafts], np.int64)
            sample = end == len(self.tokens) and self.incoming is None
            guesses = Drafts(tuple(drafts), are_taken=True)
            return SessionWork(self, self.cached, inputs, sample, self.arrived, guesses)
        chunk = self.chunks[0]
        if len(chunk.rows) - len(chunk.drafts.tokens) <= most:
            return SessionWork(
                self, self.cached, chunk.rows, chunk.sample, chunk.arrived, chunk.drafts
            )
        return SessionWork(self, self.cached, chunk.rows[:most], False, chunk.arrived)

    def advance(self, work: SessionWork, times: Times) -> None:
        """Counts pending tokens that a step has computed as cached."""
        tokens = len(work.inputs)
        self.drafted = work.drafts.tokens
        self.cached += tokens - len(self.drafted)
        self.is_unequal = bool(self.drafted)
        self.stepped_ns = times[1]
        self.steps += 1
        self.compute_ns += times[1] - times[0]
        self.first_step_ns = self.first_step_ns or times[0]
        if work.sample and not self.prefilled_ns:
            self.prefilled_ns = times[1]
        if self.spec.is_first:
            return
        chunk = self.chunks[0]
        if len(chunk.rows) == tokens:
            self.chunks.popleft()
        else:
            chunk.rows = chunk.rows[tokens:]


@dataclass(slots=True, eq=False)
class SessionWork:
    """The part of one session in one step."""

    session: Session
    position: int
    """The position of the first input."""
    inputs: NDArray[np.int64] | Hidden
    sample: bool
    """True if the token after these inputs is to be sampled."""
    arrived: ArrivalTime
    drafts: Drafts = NO_DRAFTS
    scores: StepScores | None = None
    """The log probabilities that the step computes; None if the session asks for none."""

    @property
    def end(self) -> int:
        """Number of tokens that the session has cached afterwards, guesses included."""
        return self.position + len(self.inputs)

    def item(self) -> StepItem:
        """Returns the input of the executor."""
        session = self.session
        want: Want = "hidden"
        if session.spec.is_last:
            want = "token" if self.sample else "nothing"
        sampler = session.sampler
        if sampler is not None and sampler.parameters.scored:
            self.scores = self._scores(sampler.parameters)
        session_id = session.spec.session_id
        return StepItem(
            session_id, self.position, self.inputs, want, sampler, self.scores, self.drafts.tokens
        )

    def _scores(self, parameters: SamplingParameters) -> StepScores:
        token_top = parameters.logprobs if self.sample else None
        if parameters.prompt_logprobs is None:
            return StepScores(token_top=token_top)
        opening = self.session.spec.opening
        end = min(self.position + len(self.inputs) + 1, opening.prompt_tokens)
        following = opening.token_ids[self.position + 1 : end]
        return StepScores(following, parameters.prompt_logprobs, token_top)
