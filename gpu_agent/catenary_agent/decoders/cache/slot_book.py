"""The account of sessions and block slots that all executors share, so that they count alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from catenary_agent.decoders.base import CacheLayout, StepItem
from catenary_agent.kv.arrays import CACHE_DTYPES, CacheArray
from catenary_agent.kv.lending import CacheLending
from catenary_agent.kv.span import CacheSpan
from catenary_services.domain.decoder import CACHE_BLOCK_TOKENS, DecoderTable
from catenary_services.domain.ids import PartitionKey
from catenary_services.errors import InvalidInput, Overloaded


class SlotBook:
    """The open sessions, their entry blocks, and the number of tokens each has cached."""

    def __init__(self, key: PartitionKey, table: DecoderTable, layout: CacheLayout) -> None:
        layout.check(key)
        self.key = key
        self.table = table
        self.layout = layout
        self.entries: dict[int, int] = {}
        """The entry block of each session."""
        self.cached: dict[int, int] = {}
        """Number of cached tokens of each session."""
        self.limits: dict[int, int] = {}
        """The most tokens of each session."""
        self.used = 0
        """Number of block slots that sessions hold."""

    @property
    def free(self) -> int:
        """Number of block slots that no session holds."""
        return self.layout.block_slots - self.used

    @property
    def cached_block_tokens(self) -> int:
        return sum([self.block_tokens(session) for session in self.entries])

    def block_tokens(self, session: int, tokens: int = 0) -> int:
        entry = self.entries.get(session)
        if entry is None:
            return 0
        cache_blocks = -(-max(tokens, self.cached[session]) // CACHE_BLOCK_TOKENS)
        return cache_blocks * CACHE_BLOCK_TOKENS * (self.key.last_block - entry)

    def open(self, session: int, entry_block: int, tokens: int) -> None:
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
        """Removes a session; returns False if it is not open."""
        entry = self.entries.pop(session, None)
        if entry is None:
            return False
        del self.cached[session], self.limits[session]
        self.used -= self.key.last_block - entry
        return True

    def truncate(self, session: int, tokens: int) -> None:
        """Counts only the first `tokens` cached tokens; see `DecoderExecutor.truncate`."""
        cached = self.cached.get(session)
        if cached is None:
            raise InvalidInput("session", f"{session} is not open")
        if not 0 <= tokens <= cached:
            raise InvalidInput("tokens", f"{tokens} of {cached} cannot be kept")
        self.cached[session] = tokens

    def check_export(self, session: int, span: CacheSpan) -> None:
        """Raises InvalidInput unless the rows are cached; see `DecoderExecutor.export_cache`."""
        self._check_span(session, span)
        if span.last_token > self.cached[session]:
            raise InvalidInput("span", f"{span}; {self.cached[session]} are cached")

    def check_import(self, session: int, span: CacheSpan, rows: CacheArray) -> None:
        """Raises InvalidInput unless the rows fit; see `DecoderExecutor.import_cache`."""
        self.check_room(session, span)
        shape = (span.blocks, 2, span.tokens, self.table.key_value_heads, self.table.head_size)
        if rows.shape != shape or rows.dtype not in CACHE_DTYPES:
            found = f"{rows.dtype} {list(rows.shape)}"
            raise InvalidInput("rows", f"{found}; {span} have the shape {list(shape)}")

    def check_room(self, session: int, span: CacheSpan) -> None:
        """Raises InvalidInput unless there is room for the rows of a span."""
        self._check_span(session, span)
        if span.last_token > self.limits[session]:
            raise InvalidInput("span", f"{span}; at most {self.limits[session]} are kept")

    def imported(self, session: int, span: CacheSpan) -> None:
        """Counts rows that were imported as cached."""
        self.cached[session] = max(self.cached[session], span.last_token)

    def _check_span(self, session: int, span: CacheSpan) -> None:
        entry = self.entries.get(session)
        if entry is None:
            raise InvalidInput("session", f"{session} is not open")
        if not entry <= span.first_block < span.last_block <= self.key.last_block:
            raise InvalidInput("span", f"{span}; it runs through [{entry}, {self.key.last_block})")
        if not 0 <= span.first_token < span.last_token:
            raise InvalidInput("span", f"{span} has no tokens")

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
        # All at once, because a step may have hundreds of rows of one token.
        read = [item.inputs for item in items if self.entries[item.session] == 0]
        if read:
            ids = np.concatenate(read)
            if not (ids.min() >= 0 and ids.max() < self.table.vocabulary_size):
                raise InvalidInput("inputs", "a token id is outside the vocabulary")

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
        if cached + len(array) > limit:
            raise InvalidInput("position", f"{cached + len(array)} tokens, at most {limit}")
        at_end = self.key.last_block == self.table.blocks
        is_known = item.want in ("hidden", "token", "logits", "nothing")
        if not is_known or (item.want in ("token", "logits") and not at_end):
            raise InvalidInput("want", f"{item.want!r} does not come out of {self.key}")
        if item.want == "token" and item.sampler is None:
            raise InvalidInput("sampler", "says how to choose a token, and is not there")
        if len(item.drafts) >= len(array):
            raise InvalidInput("drafts", f"{len(item.drafts)} of {len(array)} inputs are guesses")


class BookedDecoder:
    """The accounts of a decoder executor, which all kinds of executors keep in the same way."""

    exports_caches = True
    takes_drafts = True
    adapters: frozenset[str] = frozenset()

    def __init__(self, key: PartitionKey, table: DecoderTable, layout: CacheLayout) -> None:
        if not 0 <= key.first_block < key.last_block <= table.blocks:
            raise InvalidInput("partition", f"{key} is not within {table.blocks} blocks")
        self.key = key
        self.table = table
        self._book = SlotBook(key, table, layout)

    @property
    def layout(self) -> CacheLayout:
        return self._book.layout

    @property
    def free_block_slots(self) -> int:
        return self._book.free

    @property
    def lending(self) -> CacheLending | None:
        return None

    @property
    def sessions(self) -> int:
        return len(self._book.entries)

    @property
    def cached_block_tokens(self) -> int:
        return self._book.cached_block_tokens

    def block_tokens(self, session: int, tokens: int = 0) -> int:
        return self._book.block_tokens(session, tokens)

    def truncate(self, session: int, tokens: int) -> None:
        """Forgets cached tokens; their rows are written again before they are read."""
        self._book.truncate(session, tokens)

    def prepare_layout(self, layout: CacheLayout) -> Any:
        """Checks a layout and returns it, where nothing has to be prepared."""
        layout.check(self.key)
        return layout

    def _check_layout(self, layout: CacheLayout) -> None:
        """Raises InvalidInput unless a layout is possible for this partition of this model."""
        layout.check(self.key)
        if layout.session_tokens > self.table.context_tokens:
            most = self.table.context_tokens
            text = f"{layout.session_tokens} is more than the model's {most}"
            raise InvalidInput("cache.session_tokens", text)
