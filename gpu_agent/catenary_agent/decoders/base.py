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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from catenary_agent.kv.arrays import CacheArray
from catenary_agent.kv.span import CacheSpan
from catenary_services.domain.decoder import DecoderTable, HeldSizes
from catenary_services.domain.ids import Nanoseconds, PartitionKey
from catenary_services.errors import InvalidInput

if TYPE_CHECKING:
    from catenary_agent.decoders.sampling.sampling import Sampler

Want = Literal["hidden", "token", "logits", "nothing"]


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """How an executor keeps its key-value caches; `catenary.v1.CacheLayout` as values."""

    block_slots: int
    """Caches at a time, of one session in one block each."""
    session_tokens: int
    """Most tokens of one session."""
    entry_blocks: tuple[int, ...]
    """Blocks at which sessions may enter, ascending; the partition's first block is one of them."""
    cache_tokens: int = 0
    """What may be cached in all, tokens counted once per block; 0: slots are the only limit."""

    def memory_tokens(self, *, commits_on_use: bool) -> int:
        """Returns for how many tokens, counted once per block, there must be memory."""
        if self.cache_tokens and commits_on_use:
            return self.cache_tokens
        return self.block_slots * self.session_tokens

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
class StepItem:
    """What one session does in one step: a decode row (n = 1) or a prefill chunk (n > 1)."""

    session: int
    position: int
    """Tokens of the session that are cached already; the first of these gets this index."""
    inputs: np.ndarray
    """int64 [n] token ids if the session enters at block 0 of the model, else float32 [n, hidden]:
    the hidden states in front of the block it enters at."""
    want: Want
    """"hidden": float32 [n, hidden] behind the partition's last block. "token": int64 [1], what
    `sampler` chooses behind the last row, or a negative number of `sampling.NO_TOKEN`. "logits":
    float32 [vocabulary] of the last row. Both only where the model's last block is. "nothing": fill
    the cache only."""
    sampler: Sampler | None = None
    """Of the session, for "token": at the position behind these inputs. Nothing is accepted."""


@dataclass(frozen=True, slots=True)
class DecoderCost:
    """Linear model of a partition's time, over all its blocks; `GenerationCost` as values.

    A chunk of n prompt tokens takes `prefill_ns + n * prefill_token_ns`, a step of b > 1 sessions
    with c tokens cached in all `decode_ns + b * decode_session_ns + c * decode_context_token_ns`.
    """

    prefill_ns: Nanoseconds
    prefill_token_ns: Nanoseconds
    decode_ns: Nanoseconds
    decode_session_ns: Nanoseconds
    decode_context_token_ns: float = 0.0
    decode_lone_ns: Nanoseconds = 0
    """A step of one session; 0: as the line says."""
    prefill_floor_ns: Nanoseconds = 0
    """A chunk takes at least this, however short."""
    prefill_chunk_tokens: int = 0
    """Most tokens of one chunk; 0: prompts run whole."""

    def decode(self, sessions: int, context_tokens: int) -> float:
        """Returns the nanoseconds of a step of so many sessions with so much context in all."""
        if sessions == 1 and self.decode_lone_ns:
            return self.decode_lone_ns
        return (
            self.decode_ns
            + sessions * self.decode_session_ns
            + context_tokens * self.decode_context_token_ns
        )


class DecoderExecutor(Protocol):
    """Runs blocks `[first, last)` of one model for many sessions.

    Not thread-safe: one compute thread calls everything but `prepare_layout`.
    """

    key: PartitionKey
    table: DecoderTable
    sizes: HeldSizes
    """Of the model in the form that this executor holds it in."""
    commits_on_use: bool
    """Memory of a cache is taken as it is written, and given back when its session is closed."""

    @property
    def memory_bytes(self) -> int:
        """Weights held, and what else stays: `sizes.weight_bytes(..)`.

        Caches may take `sizes.slot_bytes(layout.memory_tokens(..))` beside them, and steps
        `sizes.step_bytes(..)`.
        """
        ...

    @property
    def layout(self) -> CacheLayout:
        """The cache layout in force."""
        ...

    @property
    def free_block_slots(self) -> int:
        """Block slots no session holds. Negative while a smaller layout waits for sessions."""
        ...

    @property
    def sessions(self) -> int:
        """Sessions that are open."""
        ...

    @property
    def cached_block_tokens(self) -> int:
        """What is cached in all, in whole cache blocks: tokens, each counted once per block."""
        ...

    def block_tokens(self, session: int, tokens: int = 0) -> int:
        """Returns what a session's caches count for once it has `tokens` cached; 0 if not open."""
        ...

    def open_session(self, session: int, entry_block: int, tokens: int = 0) -> None:
        """Takes `last - entry_block` block slots for a new session.

        Args:
            session: A number no open session has.
            entry_block: Where it enters; one of the layout's entry blocks.
            tokens: Most tokens it will have; 0: as many as the layout allows.

        Raises:
            InvalidInput: If the session is open, the block no entry or `tokens` too many.
            Overloaded: If too few block slots are free.
        """
        ...

    def close_session(self, session: int) -> None:
        """Frees a session's slots at once. Does nothing for a session that is not open."""
        ...

    def step(self, items: Sequence[StepItem]) -> list[np.ndarray | None]:
        """Runs one iteration; returns what each item wanted, in order (None for "nothing").

        The arrays are the caller's: a later step does not change them.

        Raises:
            InvalidInput: If a session is not open or occurs twice, a position is not the number of
                tokens it has cached, its tokens would be too many, or an array does not fit.
                Nothing has been computed then.
        """
        ...

    def export_cache(self, session: int, span: CacheSpan) -> CacheArray:
        """Returns a copy of cached keys and values, between two steps.

        Args:
            session: An open session.
            span: Blocks it runs through here, tokens it has cached.

        Returns:
            `[blocks, 2 (keys, values), tokens, key-value heads, head size]`: float32, float16, or
            uint16 with the bits of bfloat16, as the executor keeps them.

        Raises:
            InvalidInput: If the session is not open or has no such rows.
        """
        ...

    def import_cache(self, session: int, span: CacheSpan, rows: CacheArray) -> None:
        """Writes keys and values another executor exported into the session's slots.

        The session then has `span.last_token` tokens cached, or more if it had more. Whoever
        imports sees to it that no row in front of them is missing before the session's next step.

        Args:
            session: An open session.
            span: Blocks it runs through here, tokens there is room for.
            rows: As `export_cache` returns them, in either type; may be read-only.

        Raises:
            InvalidInput: If the session is not open, has no such room, or the array does not fit.
        """
        ...

    def prepare_layout(self, layout: CacheLayout) -> Any:
        """Does what is slow about a change of layout; callable from any thread while steps run.

        Raises:
            InvalidInput: If the layout is not possible for the partition.
        """
        ...

    def apply_layout(self, prepared: Any) -> None:
        """Brings a prepared layout into force between two steps. Running sessions go on unharmed.

        A session longer than the new `session_tokens` allows keeps its room until it ends.
        """
        ...

    def close(self) -> None:
        """Frees weights and caches. The executor cannot run afterwards."""
        ...


def set_layout(executor: DecoderExecutor, layout: CacheLayout) -> None:
    """Changes the layout at once: prepares and applies on this thread."""
    executor.apply_layout(executor.prepare_layout(layout))
