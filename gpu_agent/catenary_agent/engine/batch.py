"""A batch inside an agent, from its first frame until its outputs are gone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from catenary_services.errors import CatenaryError

if TYPE_CHECKING:
    from catenary_agent.engine.partitions import LoadedPartition
    from catenary_protos.catenary.v1 import common_pb2, frame_pb2
    from catenary_services.transport.interface import Link, Slot

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(slots=True, eq=False)
class Payload:
    """Received tensors and the duty to give their memory back.

    Invariant: arrays are dropped before `release` is called, so that nothing looks at memory that
    belongs to somebody else again.
    """

    tensors: Mapping[str, Array]
    nbytes: int
    _release: Callable[[], None]

    def release(self) -> None:
        """Forgets the tensors and gives their memory back."""
        self.tensors = {}
        self._release()


@dataclass(slots=True)
class PayloadSlice:
    """Rows `[start, start + rows)` of a payload are rows `[batch_row, ...)` of the batch."""

    payload: Payload
    start: int
    rows: int
    batch_row: int


@dataclass(frozen=True, slots=True)
class Destination:
    """Who gets which rows. `slices` None: the whole batch goes on to the next agent."""

    peer_id: str
    slices: list[common_pb2.Slice] | None


@dataclass(slots=True, eq=False)
class StagedOutput:
    """Memory of a link, laid out for the outputs of one batch."""

    link: Link
    slot: Slot
    tensors: list[frame_pb2.TensorHeader]
    arrays: list[Array]

    def release(self) -> None:
        """Gives the memory back unless it was pushed. Idempotent."""
        self.arrays = []
        self.slot.release()


@dataclass(slots=True, eq=False)
class Batch:
    """One hop of one batch."""

    header: frame_pb2.FrameHeader
    """Of the first frame; carries the route, the plan and the timings so far."""
    hop: common_pb2.Hop
    partition: LoadedPartition
    slices: list[common_pb2.Slice]
    """In batch row order, covering every row that has arrived."""
    payloads: list[Payload]
    pieces: list[PayloadSlice]
    nbytes: int
    deadline_ns: int
    """On this process's monotonic clock: the earliest deadline of the slices."""
    received_ns: int
    """When the last frame was complete."""
    transfer_ns: int
    receivers: Sequence[Destination] = ()
    """Of the outputs; empty until they are asked for, see `outbound.destinations`."""
    staged: StagedOutput | None = None
    outputs: Sequence[Array] = ()
    error: CatenaryError | None = None
    started_ns: int = 0
    ended_ns: int = 0
    cancelled: bool = False
    computing: bool = False

    @property
    def batch_id(self) -> int:
        """The scheduler's number of the batch."""
        return self.header.batch_id

    @property
    def position(self) -> int:
        """Which hop of the route this is."""
        return self.header.position

    @property
    def identity(self) -> tuple[int, int]:
        """Batch and position: the same agent may run several hops of one batch."""
        return self.header.batch_id, self.header.position

    @property
    def rows(self) -> int:
        """Rows of the whole batch."""
        return self.header.batch_rows

    @property
    def reserved_start_ns(self) -> int:
        """Start of the device reservation, on the scheduler's clock. Only for ordering."""
        return self.hop.reserved_start_ns

    def input_shapes(self) -> list[tuple[int, ...]]:
        """Returns the shape of each input of the whole batch, in the executor's order."""
        first = self.pieces[0].payload.tensors
        shapes = []
        for spec in self.partition.executor.inputs:
            shape = first[spec.name].shape
            shapes.append((self.rows, *shape[1:]) if self.partition.batched else shape)
        return shapes

    def gather(self) -> list[Array]:
        """Returns the inputs of the executor; copies only if several frames make up the batch."""
        specs = self.partition.executor.inputs
        pieces = sorted(self.pieces, key=lambda piece: piece.batch_row)
        if len(pieces) == 1 and pieces[0].start == 0:
            return [pieces[0].payload.tensors[spec.name] for spec in specs]
        return [
            np.concatenate(
                [p.payload.tensors[spec.name][p.start : p.start + p.rows] for p in pieces]
            )
            for spec in specs
        ]

    def release_inputs(self) -> int:
        """Gives the memory of the inputs back and returns how many bytes that was."""
        freed = self.nbytes
        self.pieces = []
        for payload in self.payloads:
            payload.release()
        self.payloads = []
        self.nbytes = 0
        return freed
