"""The decoder executor on PyTorch: decoder layers of `transformers` over a pool of cache rows.

It is the executor for CUDA devices: float16, one attention call per layer for the mixed batch,
steps replayed as CUDA graphs. On a CPU it computes in float32 and serves as the reference
for other executors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np
import torch

from catenary_agent.decoders.base import CacheLayout, StepItem
from catenary_agent.decoders.cache.slot_book import BookedDecoder
from catenary_agent.decoders.row_results import row_results, score_prompt
from catenary_agent.decoders.sampling.kernel_sampler import torch_chooser
from catenary_agent.decoders.torch.fused.fused_layers import fuse
from catenary_agent.decoders.torch.kernel_checks.attention_choice import (
    is_split_faster,
    is_split_right,
)
from catenary_agent.decoders.torch.kernel_checks.torch_flash import why_not_flash
from catenary_agent.decoders.torch.torch_attention import (
    AttentionKernel,
    AttentionMetadata,
    StepTensors,
)
from catenary_agent.decoders.torch.torch_cache import CachePool, SessionCache, TokenCacheShape
from catenary_agent.decoders.torch.torch_graphs import GraphLimits, StepGraphs, StepOutput
from catenary_agent.decoders.torch.torch_model import BlockModel
from catenary_agent.decoders.torch.torch_weights import (
    WeightFormat,
    cache_dtype,
    compute_dtype,
    load_blocks,
    runtime_of,
    torch_device,
)
from catenary_agent.decoders.transfers.lent_memory import memory_of
from catenary_agent.devices.device_errors import let_go
from catenary_agent.executors.device import Device
from catenary_agent.kv.arrays import CacheArray, bytes_of
from catenary_agent.kv.lending import CacheLending, LentMemory, MemorySource
from catenary_agent.kv.span import CacheSpan
from catenary_services.domain.decoder import GPU_CHUNK_TOKENS, form_of
from catenary_services.domain.ids import PartitionKey
from catenary_services.errors import InternalError
from catenary_services.log import get_logger
from catenary_services.models.model_repository import ModelRepository

_log = get_logger("catenary_agent.decoders")


class TorchDecoder(BookedDecoder):
    """Runs blocks `[first, last)` of a model of a known family; see `DecoderExecutor`."""

    def __init__(  # noqa: PLR0913, PLR0917  (two of them are settings of the agent)
        self,
        repository: ModelRepository,
        key: PartitionKey,
        device: Device,
        layout: CacheLayout,
        threads: int,
        dtype: str = "auto",
        chunk_tokens: int = GPU_CHUNK_TOKENS,
    ) -> None:
        """Loads the weights and allocates the caches.

        Args:
            repository: The repository with the model's `config.json`, weights and `decoder.json`.
            key: The partition.
            device: A CPU or a CUDA device.
            layout: The layout of the caches.
            threads: Number of compute threads on a CPU. PyTorch has one thread pool per process, so
                the last number given holds for all its executors.
            dtype: See `compute_dtype`.
            chunk_tokens: The most tokens of prompts in one step, as long as steps are to be
                captured as CUDA graphs.

        Raises:
            NotSupported: PyTorch does not see the device or does not know the model's family.
            InvalidInput: Partition, layout and weights contradict each other.
            Overloaded: The caches do not fit into the device's memory.
        """
        super().__init__(key, repository.decoder_table(key.model), layout)
        self._check_layout(layout)
        self._device = torch_device(device)
        self.caches_on_host = self._device.type == "cpu"
        self._memory = memory_of(self._device)
        self._layers = key.last_block - key.first_block
        self._caches: dict[int, SessionCache] = {}
        self._chunk_tokens = chunk_tokens
        self._graphs: StepGraphs | None = None
        torch.set_num_threads(threads)
        self._stream: torch.cuda.Stream | None = None
        if self._device.type == "cuda":
            # Not the default stream, so that other users of the device can run beside it.
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            if device.virtual_level > 1:
                share = 1.0 / device.virtual_level
                torch.cuda.set_per_process_memory_fraction(share, self._device)
        numbers = compute_dtype(self._device, dtype)
        precision = repository.manifest(key.model).precision
        self.sizes = self.table.held(form_of(runtime_of(numbers), precision))
        self._chooser = torch_chooser(self._device, self.table.vocabulary_size)
        with self._on_stream():
            with repository.reading(key.model) as reading:
                blocks = load_blocks(
                    reading, key, self.table.blocks, WeightFormat(self._device, numbers, precision)
                )
            self._model = BlockModel(blocks)
            heads, size = self.table.key_value_heads, self.table.head_size
            self._shape = TokenCacheShape(heads, size, cache_dtype(numbers), self._device)
            self._kernel = self._choose_kernel()
            if self._device.type == "cuda":
                fuse(blocks, self._shape, self._kernel)
            self._pool = self._new_pool(layout.memory_tokens, layout.session_tokens)
            self.memory_bytes = blocks.memory_bytes + self._pool.spare_bytes
            self._renew_graphs(capture=True)

    def open_session(self, session: int, entry_block: int, tokens: int = 0) -> None:
        self._book.open(session, entry_block, tokens)
        first_layer, most = entry_block - self.key.first_block, self._book.limits[session]
        self._caches[session] = self._pool.open(first_layer, most)

    def close_session(self, session: int) -> None:
        if self._book.close(session):
            self._pool.close(self._caches.pop(session))
            self._chooser.forget(session)
            self._fit_pool(capture=False)

    def truncate(self, session: int, tokens: int) -> None:
        super().truncate(session, tokens)
        self._pool.truncate(self._caches[session], tokens)

    def step(self, items: Sequence[StepItem]) -> list[np.ndarray | None]:
        """Runs one iteration; see `DecoderExecutor.step`."""
        self._book.check(items)
        if not items:
            return []
        # Sorted by entry block, so that the sessions in a layer are always the first ones; among
        # them those with one new token come first, as captured steps have them.
        entries = self._book.entries
        keys = [(entries[item.session], len(item.inputs) > 1) for item in items]
        order = sorted(range(len(items)), key=keys.__getitem__)
        ordered = [items[i] for i in order]
        try:
            with self._on_stream(), torch.inference_mode():
                for item in ordered:
                    tokens = item.position + len(item.inputs)
                    self._pool.grow(self._caches[item.session], tokens)
                results = self._run(ordered)
        except (RuntimeError, torch.OutOfMemoryError) as error:
            let_go(error)
            text = (str(error).splitlines() or [""])[0][:300]
            raise InternalError(f"{self.key} failed: {text}") from error
        for item in items:
            self._book.cached[item.session] += len(item.inputs)
        wanted: list[np.ndarray | None] = [None] * len(items)
        for place, result in zip(order, results, strict=True):
            wanted[place] = result
        return wanted

    def export_cache(self, session: int, span: CacheSpan) -> CacheArray:
        self._book.check_export(session, span)
        with self._on_stream():
            return self._pool.read(self._caches[session], span, self.key.first_block)

    def import_cache(self, session: int, span: CacheSpan, rows: CacheArray) -> None:
        self._book.check_import(session, span, rows)
        with self._on_stream():
            cache = self._caches[session]
            self._pool.grow(cache, span.last_token)
            self._pool.write_part(cache, span, self.key.first_block, rows)
        self._book.imported(session, span)

    @property
    def lending(self) -> CacheLending:
        return self

    @property
    def memory(self) -> MemorySource:
        """The memory of the device that has the caches; see `CacheLending`."""
        return self._memory

    def lend_cache(self, session: int, span: CacheSpan, target: LentMemory) -> str:
        """Writes a part of a cache to lent memory; see `CacheLending.lend_cache`."""
        self._book.check_export(session, span)
        with self._on_stream():
            first_block = self.key.first_block
            return self._pool.lend(self._caches[session], span, first_block, target.tensor)

    def borrow_cache(
        self, session: int, span: CacheSpan, datatype: str, source: LentMemory
    ) -> None:
        """Reads a part of a cache from lent memory; see `CacheLending.borrow_cache`."""
        self._book.check_room(session, span)
        bytes_of(datatype, span, (self.table.key_value_heads, self.table.head_size))
        with self._on_stream():
            cache, first_block = self._caches[session], self.key.first_block
            self._pool.grow(cache, span.last_token)
            self._pool.borrow(cache, span, first_block, source.tensor, datatype)
        self._book.imported(session, span)

    def prepare_layout(self, layout: CacheLayout) -> CacheLayout:
        self._check_layout(layout)
        return layout

    def apply_layout(self, prepared: CacheLayout) -> None:
        """Puts a layout into force between two steps; running sessions continue.

        Raises:
            Overloaded: The new caches do not fit into memory; the old layout stays in force.
        """
        before = self._book.layout
        self._book.layout = prepared
        try:
            self._fit_pool(capture=True)
        except BaseException:
            self._book.layout = before
            raise

    def close(self) -> None:
        self._graphs = None
        self._caches.clear()
        del self._model, self._pool
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _run(self, items: Sequence[StepItem]) -> list[np.ndarray | None]:
        caches = [self._caches[item.session] for item in items]
        counts = [len(item.inputs) for item in items]
        plan = AttentionMetadata(caches, counts, [item.position for item in items])
        ends = [i for i, item in enumerate(items) if item.want in ("token", "logits")]
        rows = [
            row
            for i in ends
            for row in range(plan.bounds[i + 1] - 1 - len(items[i].drafts), plan.bounds[i + 1])
        ]
        output = self._states(plan, items, rows)
        hidden = output.hidden
        results: list[np.ndarray | None] = [None] * len(items)
        if output.last is not None:
            logits = self._model.logits(output.last)
            made = row_results(self._chooser, logits, [items[i] for i in ends])
            for i, result in zip(ends, made, strict=True):
                results[i] = result
        for i, item in enumerate(items):
            if item.scores is not None and item.scores.following:
                states = hidden[plan.bounds[i] : plan.bounds[i + 1]]
                score_prompt(self._chooser, self._model.logits, states, item)
        if any(item.want == "hidden" for item in items):
            # On a CPU these tensors belong to this step, and those of a device are copied.
            all_states = hidden.cpu().numpy()
            for i, item in enumerate(items):
                if item.want == "hidden":
                    results[i] = all_states[plan.bounds[i] : plan.bounds[i + 1]]
        return results

    def _states(
        self, plan: AttentionMetadata, items: Sequence[StepItem], ends: list[int]
    ) -> StepOutput:
        """Returns the states of all rows and of those named by `ends`, replayed if possible."""
        if self._graphs is not None:
            output = self._graphs.run(plan, [item.inputs for item in items], ends)
            if output is not None:
                return output
        hidden = self._run_eagerly(plan, self._joining(items))
        return StepOutput(hidden, hidden[ends] if ends else None)

    def _run_eagerly(
        self, plan: AttentionMetadata, joining: dict[int, torch.Tensor]
    ) -> torch.Tensor:
        step = StepTensors.of(plan, self._pool, self._kernel)
        positions = torch.from_numpy(plan.positions).to(self._device)
        sessions = [plan.active(layer) for layer in range(self._layers)]
        return self._model.forward(step, positions, joining, sessions)

    def _joining(self, items: Sequence[StepItem]) -> dict[int, torch.Tensor]:
        """Returns the inputs that enter at each layer, on the device."""
        arrays: dict[int, list[np.ndarray]] = {}
        for item in items:
            layer = self._book.entries[item.session] - self.key.first_block
            arrays.setdefault(layer, []).append(item.inputs)
        return {
            layer: torch.from_numpy(np.concatenate(parts)).to(self._device)
            for layer, parts in arrays.items()
        }

    def _fit_pool(self, *, capture: bool) -> None:
        """Resizes the pool to the layout, or to what longer or more running sessions still need."""
        rows, tokens, old = self._rows(), self._longest(), self._pool
        if (rows, tokens) == (old.rows, old.tokens):
            return
        self._graphs = None
        cached = self._book.cached
        with self._on_stream():
            if self._device.type == "cuda":
                # Old and new pool may not fit side by side: a third has only the rows in use.
                used = self._new_pool(
                    sum(each.extent.room(cached[s]) for s, each in self._caches.items()), tokens
                )
                used.adopt(old, self._caches, cached)
                before = (old.rows, old.tokens)
                del old, self._pool
                torch.cuda.empty_cache()
                try:
                    self._pool = self._new_pool(rows, tokens)
                except BaseException:
                    self._pool = self._new_pool(*before)
                    raise
                finally:
                    self._pool.adopt(used, self._caches, cached)
            else:
                self._pool = self._new_pool(rows, tokens)
                self._pool.adopt(old, self._caches, cached)
            self._renew_graphs(capture=capture)

    def _rows(self) -> int:
        """Returns how many rows layout and running sessions need.

        Where slots are the only limit, each of them can be filled; else running sessions have at
        least what they have cached.
        """
        layout, book = self._book.layout, self._book
        if not layout.cache_tokens:
            return max(layout.block_slots, book.used) * self._longest()
        held = (each.extent.room(book.cached[s]) for s, each in self._caches.items())
        return max(layout.cache_tokens, sum(held))

    def _longest(self) -> int:
        """Returns the most tokens of any session."""
        return max([self._book.layout.session_tokens, *self._book.limits.values()])

    def _new_pool(self, rows: int, tokens: int) -> CachePool:
        return CachePool(rows, tokens, self._layers, self._shape)

    def _renew_graphs(self, *, capture: bool) -> None:
        # Which experts work is known when a step runs, so steps of theirs cannot be captured.
        mixed = self._model.blocks.description.experts is not None
        kernel = self._kernel
        if mixed or not (kernel.has_flash or kernel.has_split):
            return
        layout = self.layout
        chunk_tokens = min(self._chunk_tokens, layout.session_tokens) if kernel.has_flash else 0
        limits = GraphLimits(layout.block_slots // self._layers, chunk_tokens)
        self._graphs = StepGraphs(self._model, self._pool, self.table.hidden_size, limits, kernel)
        # With sessions waiting, steps are captured one by one, when they are met often.
        if capture and not self._caches:
            with torch.inference_mode():
                self._graphs.capture()

    def _choose_kernel(self) -> AttentionKernel:
        if self._device.type == "cpu":
            return AttentionKernel.EACH
        heads, has_split = self.table.attention_heads, False
        if not self._model.blocks.description.has_plain_scores:
            reason: str | None = "scores of this model are capped, or its heads have sinks"
        else:
            reason = why_not_flash(self._shape, heads)
            has_split = is_split_right(self._shape, heads)
        if reason is None:
            if has_split and is_split_faster(self._shape, heads):
                return AttentionKernel.FLASH_AND_SPLIT
            return AttentionKernel.FLASH
        _log.warning("flash_attention_unavailable", partition=str(self.key), reason=reason)
        return AttentionKernel.SPLIT if has_split else AttentionKernel.PADDED

    def _on_stream(self) -> contextlib.AbstractContextManager[object]:
        return torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext()
