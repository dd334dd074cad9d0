"""Loading of decoder partitions, and changes of their cache layouts, by order of the scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from catenary_agent.content import check_content, is_content_as_ordered
from catenary_agent.decoders.base import CacheLayout, DecoderCost, DecoderExecutor
from catenary_agent.generation.cache.cache_budget import room_for_kept
from catenary_agent.generation.loop.measuring import measure_between_steps
from catenary_agent.generation.loop.table import LoadedDecoder, cache_bytes, step_bytes
from catenary_agent.generation.state.partition_batcher import PartitionBatcher
from catenary_services.domain.decoder import LargestStep
from catenary_services.errors import InvalidInput

if TYPE_CHECKING:
    from catenary_agent.generation.loop.engine import GenerationEngine
    from catenary_protos.catenary.v1 import scheduler_pb2
    from catenary_services.domain.ids import PartitionKey

_MAX_ENTRIES = 4_096

Open = Callable[
    ["PartitionKey", CacheLayout, "scheduler_pb2.LoadPartition"], tuple[DecoderExecutor, str]
]
"""Loads an executor, if the model is the ordered one, and returns it with its content digest.
Called off the event loop."""
CheckMemory = Callable[["PartitionKey", int], None]
"""Raises PlanInfeasible unless a partition with that many more bytes fits into memory."""

BatcherFor = Callable[[DecoderExecutor], PartitionBatcher]
"""Makes the queues in front of an executor, with what keeps answers to their grammars."""

CheckAnswer = Callable[[DecoderExecutor, str], Awaitable[None]]
"""Raises CanaryFailed unless an executor with that content digest computes what others compute."""


class DecoderLoader:
    """Carries out those LoadPartition orders that have a cache layout."""

    def __init__(
        self,
        generation: GenerationEngine,
        load: Open,
        check: CheckMemory,
        answers: CheckAnswer,
        batcher_for: BatcherFor,
    ) -> None:
        """Loads with `load` onto `generation` after `check` of memory and `answers` of a canary."""
        self._check_answer = answers
        self._batcher_for = batcher_for
        self._generation = generation
        self._load = load
        self._check = check

    @staticmethod
    def is_as_ordered(loaded: LoadedDecoder, order: scheduler_pb2.LoadPartition) -> bool:
        """Returns True if a loaded partition has the ordered content and layout already."""
        is_same = is_content_as_ordered(loaded.content, order)
        return is_same and loaded.layout == _layout_of(loaded.key, order.cache)

    async def bring_in(
        self, key: PartitionKey, order: scheduler_pb2.LoadPartition
    ) -> LoadedDecoder:
        """Loads a partition, or changes the layout of one that is loaded.

        Raises:
            InvalidInput: The layout is impossible.
            PlanInfeasible: The partition does not fit into memory.
            CatenaryError: The executor cannot be loaded or gives wrong results.
        """
        layout = _layout_of(key, order.cache)
        layout.check(key)
        present = self._generation.decoders.get(key)
        if present is not None:
            check_content(f"what is loaded of {key.model}", present.content, order)
            return await self._relay(present, layout, self._step(layout, order))
        # A thread cannot be cancelled: `shield` lets it finish, and its executor is closed then.
        opening = asyncio.ensure_future(asyncio.to_thread(self._load, key, layout, order))
        try:
            executor, content = await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_close_late)
            raise
        batcher = self._batcher_for(executor)
        step = self._step(layout, order)
        try:
            size = executor.memory_bytes + cache_bytes(batcher, layout) + step_bytes(batcher, step)
            self._check(key, size)
            if batcher.cost is None:
                batcher.cost = await self._measure(executor)
            await self._check_answer(executor, content)
        except BaseException:
            # A measurement may still run; the executor is closed behind it on the same thread.
            self._generation.add_call(executor.close)
            raise
        loaded = LoadedDecoder(batcher, layout, batcher.cost, content, step)
        self._generation.add_decoder(loaded)
        return loaded

    async def _measure(self, executor: DecoderExecutor) -> DecoderCost:
        most = self._generation.chunk_tokens
        cost = await measure_between_steps(executor, self._generation.on_thread, most)
        # A stream waits for a chunk on every agent of its ring.
        blocks = executor.key.last_block - executor.key.first_block
        pause_ns = self._generation.prompt_pause_ns * blocks // executor.table.blocks
        cost = replace(cost, prefill_chunk_tokens=cost.chunk_within(pause_ns, most))
        learn = getattr(executor, "learn_cost", None)
        if learn is not None:
            await self._generation.on_thread(lambda: learn(cost))
        return cost

    def _step(self, layout: CacheLayout, order: scheduler_pb2.LoadPartition) -> LargestStep:
        """Returns the largest step: one row of each ordered session, and one chunk."""
        return LargestStep(
            order.max_batch,
            self._generation.chunk_tokens,
            layout.session_tokens,
            len(layout.entry_blocks),
        )

    async def _relay(
        self, present: LoadedDecoder, layout: CacheLayout, step: LargestStep
    ) -> LoadedDecoder:
        """Changes the layout of a partition between two steps; running sessions continue."""
        if layout == present.layout:
            return present
        batcher, executor = present.batcher, present.batcher.executor
        more = cache_bytes(batcher, layout) - cache_bytes(batcher, present.layout)
        more += step_bytes(batcher, step) - step_bytes(batcher, present.step)
        entries = len(layout.entry_blocks) - len(present.layout.entry_blocks)
        more += entries * executor.sizes.entry_bytes
        self._check(present.key, max(0, more))
        prepared = await asyncio.to_thread(executor.prepare_layout, layout)
        await self._generation.on_thread(lambda: _put_into_force(batcher, prepared))
        present.layout, present.step = layout, step
        return present


def _put_into_force(batcher: PartitionBatcher, prepared: Any) -> None:
    """Changes a batcher's layout; what it keeps of sessions that are over gives way."""
    batcher.executor.apply_layout(prepared)
    batcher.kept.shrink(room_for_kept(batcher, {}))


def _layout_of(key: PartitionKey, cache: scheduler_pb2.CacheLayout) -> CacheLayout:
    if len(cache.entry_blocks) > _MAX_ENTRIES:
        raise InvalidInput("cache.entry_blocks", f"{len(cache.entry_blocks)} of them")
    entries = tuple(sorted({key.first_block, *cache.entry_blocks}))
    return CacheLayout(cache.block_slots, cache.session_tokens, entries, cache.cache_tokens)


def _close_late(opening: asyncio.Future[tuple[DecoderExecutor, str]]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result()[0].close()
