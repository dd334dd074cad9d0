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
from typing import Any, Literal, Protocol

import numpy as np

from services.domain.decoder import DecoderTable
from services.domain.ids import Nanoseconds, PartitionKey
from services.errors import InvalidInput, Overloaded

Want = Literal["hidden", "logits", "nothing"]


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """How an executor keeps its key-value caches; `catenary.v1.CacheLayout` as values."""

    block_slots: int
    """Caches at a time, of one session in one block each."""
    session_tokens: int
    """Most tokens of one session."""
    entry_blocks: tuple[int, ...]
    """Blocks at which sessions may enter, ascending; the partition's first block is one of them."""

    def check(self, key: PartitionKey) -> None:
        """Raises InvalidInput unless the layout is possible for partition `key`."""
        if self.block_slots < 0:
            raise InvalidInput("cache.block_slots", f"{self.block_slots} is negative")
        if self.session_tokens < 1:
            raise InvalidInput("cache.session_tokens", f"{self.session_tokens} is not positive")
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
    """"hidden": float32 [n, hidden] behind the partition's last block. "logits": float32
    [vocabulary] of the last row; only where the model's last block is. "nothing": fill the cache
    only."""


@dataclass(frozen=True, slots=True)
class DecoderCost:
    """Linear model of a partition's time, over all its blocks; `GenerationCost` as values.

    A prompt of n tokens takes `prefill_ns + n * prefill_token_ns`, a step of b sessions
    `decode_ns + b * decode_session_ns`.
    """

    prefill_ns: Nanoseconds
    prefill_token_ns: Nanoseconds
    decode_ns: Nanoseconds
    decode_session_ns: Nanoseconds


class DecoderExecutor(Protocol):
    """Runs blocks `[first, last)` of one model for many sessions.

    Not thread-safe: one compute thread calls everything but `prepare_layout`.
    """

    key: PartitionKey
    table: DecoderTable
    memory_bytes: int
    """Weights held. The caches may take `layout.block_slots * table.slot_bytes(session_tokens)`
    beside them; memory of free slots is not committed where the device allows that."""

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


class SlotBook:
    """Which sessions are open, where they enter and how many tokens each has cached.

    Shared by the executors so that all of them count, and refuse, alike.
    """

    def __init__(self, key: PartitionKey, table: DecoderTable, layout: CacheLayout) -> None:
        """Begins without sessions."""
        layout.check(key)
        self.key = key
        self.table = table
        self.layout = layout
        self.entries: dict[int, int] = {}
        """Session -> the block it enters at."""
        self.cached: dict[int, int] = {}
        """Session -> tokens in its cache."""
        self.limits: dict[int, int] = {}
        """Session -> most tokens it may have."""
        self.used = 0
        """Block slots held."""

    @property
    def free(self) -> int:
        """Block slots no session holds."""
        return self.layout.block_slots - self.used

    def open(self, session: int, entry_block: int, tokens: int) -> None:
        """See `DecoderExecutor.open_session`."""
        if session in self.entries:
            raise InvalidInput("session", f"{session} is open already")
        if entry_block not in self.layout.entry_blocks:
            raise InvalidInput("entry_block", f"sessions do not enter {self.key} at {entry_block}")
        if not 0 <= tokens <= self.layout.session_tokens:
            most = self.layout.session_tokens
            raise InvalidInput("tokens", f"{tokens} is more than the {most} a session may have")
        wanted = self.key.last_block - entry_block
        if wanted > self.free:
            raise Overloaded(f"{self.key} has {self.free} block slots left, {wanted} are needed")
        self.entries[session] = entry_block
        self.cached[session] = 0
        self.limits[session] = tokens or self.layout.session_tokens
        self.used += wanted

    def close(self, session: int) -> bool:
        """Forgets a session; False if it is not open."""
        entry = self.entries.pop(session, None)
        if entry is None:
            return False
        del self.cached[session], self.limits[session]
        self.used -= self.key.last_block - entry
        return True

    def check(self, items: Sequence[StepItem]) -> None:
        """Raises InvalidInput for the first item that cannot be run; see `DecoderExecutor.step`."""
        seen: set[int] = set()
        for item in items:
            if item.session not in self.entries:
                raise InvalidInput("session", f"{item.session} is not open")
            if item.session in seen:
                raise InvalidInput("session", f"{item.session} occurs twice in one step")
            seen.add(item.session)
            self._check_item(item)

    def _check_item(self, item: StepItem) -> None:
        cached, limit = self.cached[item.session], self.limits[item.session]
        if item.position != cached:
            raise InvalidInput("position", f"is {item.position}, {cached} tokens are cached")
        at_start = self.entries[item.session] == 0
        dtype, ranks = (np.int64, 1) if at_start else (np.float32, 2)
        array = item.inputs
        if array.dtype != dtype or array.ndim != ranks or array.shape[0] < 1:
            raise InvalidInput("inputs", f"{array.dtype} {list(array.shape)} is not what enters")
        if ranks == 2 and array.shape[1] != self.table.hidden_size:
            raise InvalidInput("inputs", f"{array.shape[1]} is not the hidden size")
        if at_start and not (array.min() >= 0 and array.max() < self.table.vocabulary_size):
            raise InvalidInput("inputs", "a token id is outside the vocabulary")
        if cached + len(array) > limit:
            raise InvalidInput("position", f"{cached + len(array)} tokens, at most {limit}")
        at_end = self.key.last_block == self.table.blocks
        if item.want not in ("hidden", "logits", "nothing") or (
            item.want == "logits" and not at_end
        ):
            raise InvalidInput("want", f"{item.want!r} does not come out of {self.key}")
