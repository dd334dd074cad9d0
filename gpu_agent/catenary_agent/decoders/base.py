"""The decoder executor interface: any contiguous range of decoder blocks, with its caches.

An executor holds the weights of blocks `[first, last)` of one model and the key-value caches of
the sessions that generate through them. A cache is accounted in *block slots*: one slot is the
cache of one session in one block, so a session that enters at block `e` takes `last - e` of them.
The scheduler books the slots before a session starts; the executor counts them again, exactly, and
refuses what would not fit.

One *step* is one iteration of continuous batching (Orca, OSDI 2022): decode rows of many sessions
and prefill chunks of some, whatever block each enters at. Sessions join and leave between steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from catenary_agent.kv.arrays import CacheArray
from catenary_agent.kv.span import CacheSpan
from catenary_services.domain.decoder import AllocatedSizes, DecoderTable
from catenary_services.domain.ids import Nanoseconds, PartitionKey
from catenary_services.errors import InvalidInput

if TYPE_CHECKING:
    from catenary_agent.decoders.sampling.sampling import SessionSampler
    from catenary_agent.kv.lending import CacheLending
    from catenary_services.domain.logprobs import TokenLogprobs

Want = Literal["hidden", "token", "logits", "nothing"]


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The limits of an executor's key-value caches; `catenary.v1.CacheLayout` as values."""

    block_slots: int
    """Number of block slots; one is the cache of one session in one block."""
    session_tokens: int
    """The most tokens of one session."""
    entry_blocks: tuple[int, ...]
    """Blocks at which sessions may enter, ascending; the partition's first block is one of them."""
    cache_tokens: int = 0
    """The most tokens cached in all, counted once per block; 0 if slots are the only limit."""

    @property
    def memory_tokens(self) -> int:
        """The number of tokens, counted once per block, for which memory is needed."""
        return self.cache_tokens or self.block_slots * self.session_tokens

    def check(self, key: PartitionKey) -> None:
        """Raises InvalidInput unless the layout is possible for partition `key`."""
        if self.block_slots < 0:
            raise InvalidInput("cache.block_slots", f"{self.block_slots} is negative")
        if self.session_tokens < 1:
            raise InvalidInput("cache.session_tokens", f"{self.session_tokens} is not positive")
        if self.cache_tokens < 0:
            raise InvalidInput("cache.cache_tokens", f"{self.cache_tokens} is negative")
        entries = self.entry_blocks
        if list(entries) != sorted(set(entries)):
            raise InvalidInput("cache.entry_blocks", f"{list(entries)} are not ascending")
        if not entries or entries[0] != key.first_block or entries[-1] >= key.last_block:
            raise InvalidInput(
                "cache.entry_blocks", f"{list(entries)} do not begin at the first block of {key}"
            )


@dataclass(slots=True)
class StepScores:
    """The log probabilities that a step computes for one session, if the session asks for them."""

    following: Sequence[int] = ()
    """The prompt's tokens behind the first inputs, one each; they are scored."""
    prompt_top: int = 0
    """Number of the likeliest tokens named with each of them."""
    token_top: int | None = None
    """The same for the token that the step chooses; None if it is not scored."""
    prompt: list[TokenLogprobs] = field(default_factory=list)
    """The result for `following`."""
    token: TokenLogprobs | None = None
    """The result for the token that was chosen."""


@dataclass(slots=True)
class StepItem:
    """The work of one session in one step: a decode row (n = 1) or a prefill chunk (n > 1)."""

    session: int
    position: int
    """Number of tokens of the session that are cached already, hence the index of the first
    input."""
    inputs: np.ndarray
    """The token ids, int64 [n], if the session enters at block 0 of the model; else the hidden
    states before the block it enters at, float32 [n, hidden]."""
    want: Want
    """The requested result. "hidden": float32 [n, hidden] after the partition's last block.
    "token": int64 [1], the choice of `sampler` after the last row, or a negative number of
    `sampling.NO_TOKEN`. "logits": float32 [vocabulary] of the last row. The last two are available
    only where the model's last block is. "nothing": only fill the cache."""
    sampler: SessionSampler | None = None
    """The sampler of the session, for "token", at the position after these inputs. The step does
    not accept the token it chooses."""
    scores: StepScores | None = None
    """Filled in by the step, only where the model's last block is; None if nothing is asked for."""
    drafts: Sequence[int] = ()
    """The guessed token ids that the last inputs belong to, after a first one that is known. With
    them "token" is int64 [1 to n]: the choice after the known input, and after each guess that
    equals the choice before it."""


FEWEST_CHUNK_TOKENS = 8
"""The least that a chunk is shortened to. On CPUs and GPUs alike, fewer tokens take hardly less
time, so prompts would take much longer for little."""


@dataclass(frozen=True, slots=True)
class DecoderCost:
    """A linear model of a partition's time over all its blocks; `GenerationCost` as values.

    A chunk of n prompt tokens takes `prefill_ns + n * prefill_token_ns`. A step of b > 1 sessions
    with c cached tokens in total takes `decode_ns + b * decode_session_ns + c *
    decode_context_token_ns`.
    """

    prefill_ns: Nanoseconds
    prefill_token_ns: Nanoseconds
    decode_ns: Nanoseconds
    decode_session_ns: Nanoseconds
    decode_context_token_ns: float = 0.0
    decode_lone_ns: Nanoseconds = 0
    """The time of a step of one session; 0 if the line holds for one session, too."""
    prefill_floor_ns: Nanoseconds = 0
    """The least time of a chunk, however short."""
    prefill_chunk_tokens: int = 0
    """The most tokens of one chunk beside decode rows; 0 if prompts run whole."""

    def decode(self, sessions: int, context_tokens: int) -> float:
        """Returns the nanoseconds of a step of sessions with `context_tokens` cached in total."""
        if sessions == 1 and self.decode_lone_ns:
            return self.decode_lone_ns
        return (
            self.decode_ns
            + sessions * self.decode_session_ns
            + context_tokens * self.decode_context_token_ns
        )

    def chunk_within(self, pause_ns: Nanoseconds, most: int) -> int:
        """Returns how many prompt tokens, of `most`, are computed in a time: at least a few."""
        if pause_ns <= 0 or self.prefill_token_ns <= 0:
            return most
        fitting = int((pause_ns - self.prefill_ns) / self.prefill_token_ns)
        return min(most, max(FEWEST_CHUNK_TOKENS, fitting))


class DecoderExecutor(Protocol):
    """An executor of blocks `[first, last)` of one model for many sessions.

    It is not thread-safe: one compute thread calls everything except `prepare_layout`.
    """

    key: PartitionKey
    table: DecoderTable
    sizes: AllocatedSizes
    """The sizes of the model in the form in which this executor holds it."""
    caches_on_host: bool
    """True if caches are in the memory of the host, so that what they leave over is the host's."""
    takes_drafts: bool
    """True if the last inputs of a session in a step may be guessed tokens."""
    exports_caches: bool
    """True if caches can be copied out and in; False for engines, whose sessions move by tokens."""
    adapters: frozenset[str]
    """The LoRA adapters with which sessions may generate."""

    @property
    def lending(self) -> CacheLending | None:
        """The ability to pass caches in memory shared with other processes; None without it."""
        ...

    @property
    def memory_bytes(self) -> int:
        """The bytes that are held permanently, mainly weights: `sizes.weight_bytes(..)`.

        Beside them caches may take `sizes.slot_bytes(layout.memory_tokens(..))`, and steps
        `sizes.step_bytes(..)`.
        """
        ...

    @property
    def layout(self) -> CacheLayout:
        """The cache layout in force."""
        ...

    @property
    def free_block_slots(self) -> int:
        """Block slots no session holds; negative while sessions exceed a smaller layout."""
        ...

    @property
    def sessions(self) -> int:
        """Number of open sessions."""
        ...

    @property
    def cached_block_tokens(self) -> int:
        """The sum of `block_tokens` over all open sessions."""
        ...

    def block_tokens(self, session: int, tokens: int = 0) -> int:
        """Returns the cache of a session in block tokens, rounded up to whole cache blocks.

        Args:
            session: The session; if it is not open the result is 0.
            tokens: Number of tokens it is about to have cached, if that is more than now.
        """
        ...

    def open_session(self, session: int, entry_block: int, tokens: int = 0) -> None:
        """Takes `last - entry_block` block slots for a new session.

        Args:
            session: A number that no open session has.
            entry_block: The block at which it enters; one of the layout's entry blocks.
            tokens: The most tokens it will have; 0 if as many as the layout allows.

        Raises:
            InvalidInput: The session is open, the block is no entry, or `tokens` is too large.
            Overloaded: Too few block slots are free.
        """
        ...

    def close_session(self, session: int) -> None:
        """Frees the slots of a session at once; does nothing if it is not open."""
        ...

    def step(self, items: Sequence[StepItem]) -> list[np.ndarray | None]:
        """Runs one iteration; returns each item's result, in order (None for "nothing").

        The arrays belong to the caller: a later step does not change them.

        Raises:
            InvalidInput: A session is not open or occurs twice, a position is not its number of
                cached tokens, its tokens would be too many, or an array does not fit. Nothing has
                been computed then.
        """
        ...

    def truncate(self, session: int, tokens: int) -> None:
        """Forgets the cached tokens of a session behind the first `tokens`.

        Raises:
            InvalidInput: The session is not open, or has fewer tokens cached.
        """
        ...

    def export_cache(self, session: int, span: CacheSpan) -> CacheArray:
        """Returns a copy of cached keys and values; to be called between two steps.

        Args:
            session: An open session.
            span: Blocks that it runs through here, and tokens that it has cached.

        Returns:
            `[blocks, 2 (keys, values), tokens, key-value heads, head size]`: float32, float16, or
                uint16 with the bits of bfloat16, as the executor keeps them.

        Raises:
            InvalidInput: The session is not open or has no such rows.
        """
        ...

    def import_cache(self, session: int, span: CacheSpan, rows: CacheArray) -> None:
        """Writes keys and values that another executor exported into the session's slots.

        The session then has `span.last_token` tokens cached, or more if it had more. The caller
        ensures that no earlier rows are missing before the session's next step.

        Args:
            session: An open session.
            span: Blocks that it runs through here, and tokens that there is room for.
            rows: An array in the format of `export_cache`; it may be read-only.

        Raises:
            InvalidInput: The session is not open, has no such room, or the array does not fit.
        """
        ...

    def prepare_layout(self, layout: CacheLayout) -> Any:
        """Does the slow part of a change of layout; any thread may call it while steps run.

        Raises:
            InvalidInput: The layout is impossible for the partition.
        """
        ...

    def apply_layout(self, prepared: Any) -> None:
        """Puts a prepared layout into force between two steps; running sessions continue.

        A session longer than the new `session_tokens` keeps its room until it ends.
        """
        ...

    def close(self) -> None:
        """Frees weights and caches; the executor is unusable afterwards."""
        ...


def set_layout(executor: DecoderExecutor, layout: CacheLayout) -> None:
    """Changes the layout at once, by preparing and applying it on the calling thread."""
    executor.apply_layout(executor.prepare_layout(layout))
