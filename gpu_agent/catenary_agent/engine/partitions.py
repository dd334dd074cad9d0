"""The partitions an agent hosts. A retired partition is closed when its last use ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from catenary_services.domain.ids import ModelKey, PartitionKey

if TYPE_CHECKING:
    from catenary_agent.executors.base import Executor
    from catenary_protos.catenary.v1 import common_pb2
    from catenary_services.domain.model import TokenUnits

_SHORT_NS = 250_000
"""The hand-over of a batch to a thread, and of its outputs back, costs as much: two wake-ups."""


@dataclass(slots=True, eq=False)
class LoadedPartition:
    """A partition with the executor that runs it."""

    executor: Executor
    float16_boundaries: bool
    max_batch: int
    """The most rows one batch may have, or room for how many texts of full length."""
    compute_ns: tuple[int, ...] = ()
    """Measured compute time of batches of 1, 2, ... rows or units, in nanoseconds."""
    content: str = ""
    """Digest of the model version's content; empty if it is unknown."""
    pads: bool = False
    """True if rows of unlike sizes may share a batch: the model ignores the zeros behind them."""
    units: TokenUnits | None = None
    """The units of its batches, if the model is given texts; None: rows."""
    any_thread: bool = False
    """Whether short batches may be computed on the event loop."""
    uses: int = 0
    """Number of batches that still need the executor."""
    retired: bool = False

    @property
    def key(self) -> PartitionKey:
        return self.executor.key

    @property
    def most_units(self) -> int:
        """The largest batch in what its batches are counted in: units, or else rows."""
        return self.max_batch * (1 if self.units is None else self.units.per_text)

    @property
    def most_rows(self) -> int:
        """The most rows one batch may have, however short they are."""
        most = self.most_units
        return most if self.units is None else self.units.most_rows(most)

    def is_short(self, rows: int) -> bool:
        """Returns True for a batch that takes less time than handing it to a thread is worth."""
        if not self.any_thread or self.units is not None or rows > len(self.compute_ns):
            return False
        return self.compute_ns[rows - 1] <= _SHORT_NS

    @property
    def batched(self) -> bool:
        """True if dimension 0 of every input and output is the batch."""
        return self.executor.batched


class PartitionTable:
    """The loaded partitions by key.

    Invariant: an executor is closed exactly once, after it was retired and its last use ended.
    """

    def __init__(self, close: Callable[[LoadedPartition], None]) -> None:
        """Calls `close` on the event loop with each partition that nobody needs any more."""
        self._loaded: dict[PartitionKey, LoadedPartition] = {}
        self._close = close

    def __iter__(self) -> Iterator[LoadedPartition]:
        return iter(self._loaded.values())

    def get(self, key: PartitionKey) -> LoadedPartition | None:
        return self._loaded.get(key)

    @property
    def memory_bytes(self) -> int:
        return sum(partition.executor.memory_bytes for partition in self._loaded.values())

    def add(self, partition: LoadedPartition) -> None:
        """Serves `partition` from now on, in place of an older one of the same key."""
        self.retire(partition.key)
        self._loaded[partition.key] = partition

    def retire(self, key: PartitionKey) -> bool:
        """Accepts no more batches for `key`; returns False if it was not loaded."""
        partition = self._loaded.pop(key, None)
        if partition is None:
            return False
        partition.retired = True
        self._close_if_unused(partition)
        return True

    def hold(self, partition: LoadedPartition) -> None:
        """Keeps the executor alive for one batch."""
        partition.uses += 1

    def let_go(self, partition: LoadedPartition) -> None:
        """Ends one use of a partition, and closes it if it is retired and unused."""
        assert partition.uses > 0
        partition.uses -= 1
        self._close_if_unused(partition)

    def _close_if_unused(self, partition: LoadedPartition) -> None:
        if partition.retired and partition.uses == 0:
            self._close(partition)


def key_of_hop(hop: common_pb2.Hop) -> PartitionKey:
    return PartitionKey(ModelKey(hop.model, hop.model_version), hop.first_block, hop.last_block)
