"""The decoder executor for CPUs, on ONNX Runtime.

The blocks between two entry blocks form one ONNX Runtime session ("segment"), so sessions that
enter in the middle of the partition share the later segments with the others. The embedding is a
look-up in the memory-mapped weights, and the head runs only on the sampled rows. The decode rows of
all sessions are one call per segment, since a call costs one reading of the weights (the memory
floor) however many rows it has. Prefill chunks, which are bound by arithmetic, are separate calls.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from catenary_agent.decoders.base import CacheLayout, DecoderCost, StepItem
from catenary_agent.decoders.cache.cache_rows import CacheRows, cover
from catenary_agent.decoders.cache.cache_store import CacheShape, CacheStore
from catenary_agent.decoders.cache.slot_book import BookedDecoder
from catenary_agent.decoders.model_files.checkpoint import places_in
from catenary_agent.decoders.model_files.description import (
    DecoderDescription,
    describe,
    read_object,
    why_not_on_cpu,
)
from catenary_agent.decoders.model_files.embedding import EMBEDDING, Embedding
from catenary_agent.decoders.model_files.sizes import graph_bytes
from catenary_agent.decoders.onnx.building import ensure_graph
from catenary_agent.decoders.onnx.onnx_segment import BlockSegment, DecodeBuffers, LanguageModelHead
from catenary_agent.decoders.row_results import row_results, score_prompt
from catenary_agent.decoders.sampling.numpy_arrays import numpy_chooser
from catenary_agent.kv.arrays import CacheArray, to_float32
from catenary_agent.kv.span import CacheSpan
from catenary_services.content.reading import VerifiedReading
from catenary_services.domain.decoder import DecoderRuntime, form_of
from catenary_services.domain.ids import PartitionKey
from catenary_services.errors import NotSupported
from catenary_services.models.model_repository import ModelRepository

_BRIDGED_ROWS = {"fp32": 8.0, "int8": 4.0, "int4": 1.0}
"""The cost of one reading of the weights in rows, until `learn_cost` is called. Measured for
SmolLM2-135M: 22 ms against 2 ms a row, 8 against 3.7, 3.5 against 4.2."""


@dataclass(frozen=True, slots=True)
class PreparedLayout:
    """A layout together with the segments it needs."""

    layout: CacheLayout
    segments: tuple[BlockSegment, ...]


class OnnxDecoder(BookedDecoder):
    """Runs blocks `[first, last)` of a model on the CPU; see `DecoderExecutor`."""

    caches_on_host = True

    def __init__(
        self,
        repository: ModelRepository,
        key: PartitionKey,
        layout: CacheLayout,
        threads: int = 1,
    ) -> None:
        """Loads the blocks in the precision of the model's manifest.

        Raises:
            ModelNotFound: The model is absent.
            InvalidInput: There are no such blocks, or the layout is impossible.
            NotSupported: The graph of this model is not right, or cannot be made.
        """
        self._repository = repository
        manifest = repository.manifest(key.model)
        self._folder = ensure_graph(repository, key.model, manifest.precision)
        super().__init__(key, repository.decoder_table(key.model), layout)
        self.sizes = self.table.held(form_of(DecoderRuntime.ONNX, manifest.precision))
        self._threads = threads
        self._chooser = numpy_chooser(self.table.vocabulary_size)
        self._rows = CacheRows()
        self._segments: tuple[BlockSegment, ...] = ()
        with repository.reading(key.model) as reading:
            described = self._described(reading)
            self._segments = self._prepare(layout, reading).segments
            self._install(CacheStore(CacheShape.of(key, self.table, layout)))
            stored = graph_bytes(self._folder)
            self._block_bytes = sum(stored.blocks[key.first_block : key.last_block])
            self._angle_bytes = stored.angles
            self._embedding: Embedding | None = None
            if key.first_block == 0:
                file, _ = places_in(reading)[EMBEDDING]
                self._embedding = Embedding(file, reading, described.embedding_scale)
            self._head: LanguageModelHead | None = None
            if key.last_block == self.table.blocks:
                self._head = LanguageModelHead(self._folder, threads, reading)
                self._block_bytes += stored.head
        self.bridged_rows = _BRIDGED_ROWS[manifest.precision]
        """Holes of up to this many rows are computed, because reading the weights again costs
        more."""

    @property
    def memory_bytes(self) -> int:
        """The bytes of the weights and of each segment's angles; the embedding stays on disk."""
        return self._block_bytes + len(self._segments) * self._angle_bytes

    def open_session(self, session: int, entry_block: int, tokens: int = 0) -> None:
        self._book.open(session, entry_block, tokens)
        lengths = self._buffers.lengths
        for move in self._rows.add(session, entry_block):
            self._store.move(move, int(lengths[move.source]))
            lengths[move.target] = lengths[move.source]
        row = self._rows.row_of[session]
        lengths[row] = 0
        if row + 1 < self.sessions:  # others were moved, and left their rows behind
            for block in range(entry_block, self.key.last_block):
                self._store.release(block, row)

    def close_session(self, session: int) -> None:
        entry = self._book.entries.get(session)
        if entry is None:
            return
        self._book.close(session)
        lengths = self._buffers.lengths
        for move in self._rows.remove(session):
            self._store.move(move, int(lengths[move.source]))
            lengths[move.target] = lengths[move.source]
        for block in range(entry, self.key.last_block):
            self._store.release(block, self._rows.through(block))

    def step(self, items: Sequence[StepItem]) -> list[np.ndarray | None]:
        self._book.check(items)
        results: list[np.ndarray | None] = [None] * len(items)
        ends: dict[int, np.ndarray] = {}  # the rows of each item that tokens are chosen after
        # Rows in between are computed along with decode rows and write at their own next position.
        # Hence these run before the prefill chunks, which write there for good.
        hidden = self._decode([item for item in items if len(item.inputs) == 1])
        for index, item in enumerate(items):
            if len(item.inputs) > 1:
                made = self._prefill(item)
            else:
                made = hidden[self._rows.row_of[item.session]][None]
            if item.want == "hidden":
                results[index] = made.copy() if len(item.inputs) == 1 else made
            elif item.want != "nothing":
                ends[index] = made[-1 - len(item.drafts) :]
            if item.scores is not None and item.scores.following and self._head is not None:
                score_prompt(self._chooser, self._head.logits, made, item)
        if ends and self._head is not None:
            logits = self._head.logits(np.concatenate(list(ends.values())))
            wanting = [items[index] for index in ends]
            for index, made in zip(ends, row_results(self._chooser, logits, wanting), strict=True):
                results[index] = made
        for item in items:
            cached = item.position + len(item.inputs)
            self._book.cached[item.session] = cached
            self._buffers.lengths[self._rows.row_of[item.session]] = cached
        return results

    def truncate(self, session: int, tokens: int) -> None:
        super().truncate(session, tokens)
        self._buffers.lengths[self._rows.row_of[session]] = tokens

    def export_cache(self, session: int, span: CacheSpan) -> CacheArray:
        self._book.check_export(session, span)
        return self._store.read(self._rows.row_of[session], span)

    def import_cache(self, session: int, span: CacheSpan, rows: CacheArray) -> None:
        self._book.check_import(session, span, rows)
        row = self._rows.row_of[session]
        self._store.write(row, span, to_float32(rows))
        self._book.imported(session, span)
        # A row computed along with its neighbours writes at its length, after what was imported.
        self._buffers.lengths[row] = self._book.cached[session]

    def prepare_layout(self, layout: CacheLayout) -> PreparedLayout:
        """Loads the segments that a layout needs and that are not loaded yet.

        Until `apply_layout` the weights of changed segments are in memory twice.
        """
        with self._repository.reading(self.key.model) as reading:
            return self._prepare(layout, reading)

    def _described(self, reading: VerifiedReading) -> DecoderDescription:
        """Returns the description of the model, whose sessions are not longer than its graph's.

        Raises:
            NotSupported: A graph of this model, which an earlier release made, is not right.
        """
        file = reading.folder / "config.json"
        reading.begin(file, first=True)
        config = read_object(file)
        reason = why_not_on_cpu(config)
        if reason is not None:
            raise NotSupported(f"{self.key.model}: {reason}")
        described = describe(config)
        most = min(self.table.context_tokens, described.graph_context_tokens)
        self.table = replace(self.table, context_tokens=most)
        return described

    def _prepare(self, layout: CacheLayout, reading: VerifiedReading) -> PreparedLayout:
        self._check_layout(layout)
        # Running sessions keep their entries until the next change.
        entries = {*layout.entry_blocks, *self._entered()}
        return PreparedLayout(layout, self._segments_of(entries, reading))

    def apply_layout(self, prepared: PreparedLayout) -> None:
        """Puts a layout into force; copies the caches of running sessions if sizes change."""
        layout, segments = prepared.layout, prepared.segments
        missing = self._entered() - {segment.first for segment in segments}
        if missing:  # opened after the preparation, at a block that is no entry any more
            entries = {*missing, *(segment.first for segment in segments)}
            with self._repository.reading(self.key.model) as reading:
                segments = self._segments_of(entries, reading, segments)
        for segment in self._segments:
            segment.forget()
        self._segments = segments
        self._book.layout = layout
        needed = [self._rows.through(block) for block in range(*self.key[1:])]
        # Running sessions may be longer than the new layout allows, or have other entry blocks.
        room = CacheLayout(
            layout.block_slots,
            max([layout.session_tokens, *self._book.limits.values()]),
            tuple(sorted({*layout.entry_blocks, *self._entered()})),
        )
        shape = CacheShape.of(self.key, self.table, room, needed)
        old = self._store
        store = old if shape == old.shape else CacheStore(shape)
        if store is not old:
            for session, row in self._rows.row_of.items():
                entry = self._book.entries[session]
                store.copy_from(old, row, entry, self._book.cached[session])
                for block in range(entry, self.key.last_block):
                    old.release(block, row)
        self._install(store)

    def learn_cost(self, cost: DecoderCost) -> None:
        """Derives from a measured cost which holes in a batch are worth computing."""
        if cost.decode_session_ns > 0:
            self.bridged_rows = cost.decode_ns / cost.decode_session_ns

    def close(self) -> None:
        for segment in self._segments:
            segment.forget()
        self._segments = ()
        self._head = self._embedding = None
        del self._store, self._buffers

    def _entered(self) -> set[int]:
        return set(self._book.entries.copy().values())

    def _segments_of(
        self, entries: set[int], reading: VerifiedReading, also: Sequence[BlockSegment] = ()
    ) -> tuple[BlockSegment, ...]:
        """Returns the segments between entries; those in force, or in `also`, are reused."""
        present = {(each.first, each.last): each for each in (*self._segments, *also)}
        edges = [*sorted(entries), self.key.last_block]
        return tuple(
            present.get(edge) or BlockSegment(self._folder, *edge, self._threads, reading)
            for edge in pairwise(edges)
        )

    def _install(self, store: CacheStore) -> None:
        self._store = store
        self._buffers = DecodeBuffers(store, len(self._segments), self.table.hidden_size)
        for session, row in self._rows.row_of.items():
            self._buffers.lengths[row] = self._book.cached[session]
        self._segment_at = {segment.first: i for i, segment in enumerate(self._segments)}

    def _decode(self, items: Sequence[StepItem]) -> np.ndarray:
        """Runs one token of each; returns float32 [rows, hidden] after the last block, by row."""
        buffers = self._buffers
        rows = sorted(self._rows.row_of[item.session] for item in items)
        for item in items:
            row = self._rows.row_of[item.session]
            entered = self._segment_at[self._rows.entries[row]]
            buffers.hidden[entered][row] = self._entering(item)[0]
        full = np.flatnonzero(buffers.lengths[: self.sessions] >= self._store.shape.tokens)
        blocked = frozenset(full.tolist())
        for index, segment in enumerate(self._segments):
            through = rows[: bisect_left(rows, self._rows.through(segment.first))]
            for first, end in cover(through, self.bridged_rows, blocked):
                segment.decode(buffers, index, first, end)
        return buffers.hidden[-1]

    def _prefill(self, item: StepItem) -> np.ndarray:
        """Runs a chunk of one session; returns float32 [n, hidden] after the last block."""
        row = self._rows.row_of[item.session]
        hidden = np.ascontiguousarray(self._entering(item))
        for segment in self._segments[self._segment_at[self._rows.entries[row]] :]:
            hidden = segment.prefill(hidden, self._store, row, item.position)
        return hidden

    def _entering(self, item: StepItem) -> np.ndarray:
        """Returns float32 [n, hidden] before the block at which the session enters."""
        if self._book.entries[item.session] == 0 and self._embedding is not None:
            return self._embedding.look_up(item.inputs)
        return item.inputs
