"""The decoder partitions of an agent, as the event loop sees them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from catenary_agent.generation.state.reporting import key_message
from catenary_protos.catenary.v1 import scheduler_pb2
from catenary_services.domain.decoder import LargestStep

if TYPE_CHECKING:
    from catenary_agent.decoders.base import CacheLayout, DecoderCost
    from catenary_agent.generation.state.partition_batcher import PartitionBatcher
    from catenary_services.domain.ids import PartitionKey


@dataclass(slots=True, eq=False)
class LoadedDecoder:
    """A loaded decoder partition on which sessions may begin."""

    batcher: PartitionBatcher
    layout: CacheLayout
    """The cache layout that was ordered last."""
    cost: DecoderCost
    content: str = ""
    """Digest of the model version's content; empty if it is unknown."""
    step: LargestStep = field(default_factory=LargestStep)
    """The largest step the partition is to run."""

    @property
    def key(self) -> PartitionKey:
        return self.batcher.key

    @property
    def memory_bytes(self) -> int:
        """The bytes of the weights, and the most that caches and steps may take."""
        beside = cache_bytes(self.batcher, self.layout) + step_bytes(self.batcher, self.step)
        return self.batcher.executor.memory_bytes + beside

    def described(self) -> scheduler_pb2.PartitionLoaded:
        """Returns the message that describes the partition to the scheduler."""
        return scheduler_pb2.PartitionLoaded(
            key=key_message(self.key),
            memory_bytes=self.memory_bytes,
            content_digest=self.content,
            generation=scheduler_pb2.GenerationCost(
                block_slots=self.layout.block_slots,
                session_tokens=self.layout.session_tokens,
                prefill_ns=self.cost.prefill_ns,
                prefill_token_ns=self.cost.prefill_token_ns,
                decode_ns=self.cost.decode_ns,
                decode_session_ns=self.cost.decode_session_ns,
                decode_context_token_ns=self.cost.decode_context_token_ns,
                decode_lone_ns=self.cost.decode_lone_ns,
                prefill_floor_ns=self.cost.prefill_floor_ns,
                prefill_chunk_tokens=self.cost.prefill_chunk_tokens,
                cache_tokens=self.layout.cache_tokens,
            ),
        )


def cache_bytes(batcher: PartitionBatcher, layout: CacheLayout) -> int:
    """Returns the most bytes that the caches of a layout may take."""
    return batcher.executor.sizes.slot_bytes(layout.memory_tokens)


def step_bytes(batcher: PartitionBatcher, step: LargestStep) -> int:
    """Returns the most bytes that a step of a batcher takes."""
    executor = batcher.executor
    has_head = executor.key.last_block == executor.table.blocks
    return executor.sizes.step_bytes(step, has_head=has_head)


class LoadedDecoders:
    """Loaded partitions by key, and retired ones that are closed with their last session."""

    def __init__(self) -> None:
        self._loaded: dict[PartitionKey, LoadedDecoder] = {}
        self._leaving: list[LoadedDecoder] = []

    def __iter__(self) -> Iterator[LoadedDecoder]:
        return iter(list(self._loaded.values()))

    def get(self, key: PartitionKey) -> LoadedDecoder | None:
        """Returns a partition by its key, None if it is not loaded."""
        return self._loaded.get(key)

    @property
    def memory_bytes(self) -> int:
        """Memory of all partitions that are not closed yet, in bytes."""
        return sum(each.memory_bytes for each in (*self._loaded.values(), *self._leaving))

    def add(self, loaded: LoadedDecoder) -> None:
        """Adds a partition on which sessions may begin."""
        assert loaded.key not in self._loaded
        self._loaded[loaded.key] = loaded

    def leave(self, key: PartitionKey) -> LoadedDecoder | None:
        """Retires a partition, so that no session begins on it; returns it if it was loaded."""
        loaded = self._loaded.pop(key, None)
        if loaded is not None:
            self._leaving.append(loaded)
        return loaded

    def gone(self, batcher: PartitionBatcher) -> None:
        """Forgets a retired partition whose executor was closed."""
        self._leaving = [each for each in self._leaving if each.batcher is not batcher]
