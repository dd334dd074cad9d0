"""A batch at one hop, from its first frame until its outputs have left."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from catenary_services.errors import CatenaryError
from catenary_services.transport.bytes_tensors import EncodedBytes

if TYPE_CHECKING:
    from catenary_agent.engine.partitions import LoadedPartition
    from catenary_protos.catenary.v1 import common_pb2, frame_pb2
    from catenary_services.transport.interface import Link, Slot

Array = np.ndarray[Any, np.dtype[Any]]
ReceivedTensor = Array | EncodedBytes


@dataclass(slots=True, eq=False)
class Payload:
    """Received tensors, and the obligation to release their memory.

    Invariant: the arrays are dropped before `release` is called, so that no array refers to memory
    that is used for something else again.
    """

    tensors: Mapping[str, ReceivedTensor]
    nbytes: int
    _release: Callable[[], None]

    def release(self) -> None:
        """Drops the tensors and releases their memory."""
        self.tensors = {}
        self._release()


@dataclass(slots=True)
class PayloadSlice:
    """Rows `[start, start + rows)` of a payload, which are rows `[batch_row, ...)` of the batch."""

    payload: Payload
    start: int
    rows: int
    batch_row: int

    def rows_of(self, name: str) -> Array:
        """Returns these rows of a tensor."""
        return _elements(self.payload.tensors[name])[self.start : self.start + self.rows]


class Destination(NamedTuple):
    """A receiver and its rows; with `slices` None the whole batch goes to the next agent."""

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
        """Releases the memory unless it was pushed. Idempotent."""
        self.arrays = []
        self.slot.release()


@dataclass(slots=True, eq=False)
class Batch:
    """One hop of one batch, with its inputs, outputs and times."""

    header: frame_pb2.FrameHeader
    """The header of the first frame; it carries the route, the plan and the timings so far."""
    hop: common_pb2.Hop
    partition: LoadedPartition
    slices: list[common_pb2.Slice]
    """The requests that the rows belong to, in batch row order, for all rows that have arrived."""
    payloads: list[Payload]
    pieces: list[PayloadSlice]
    nbytes: int
    deadline_ns: int
    """The earliest deadline of the slices, on this process's monotonic clock."""
    received_ns: int
    """The moment the last frame was complete."""
    transfer_ns: int
    receivers: Sequence[Destination] = ()
    """The receivers of the outputs; empty until first asked for, see `outbound.destinations`."""
    staged: StagedOutput | None = None
    outputs: Sequence[Array] = ()
    error: CatenaryError | None = None
    started_ns: int = 0
    ended_ns: int = 0
    cancelled: bool = False
    computing: bool = False

    batch_id: int = field(init=False)
    """The scheduler's number of the batch."""
    position: int = field(init=False)
    """Index of this hop in the route."""
    identity: tuple[int, int] = field(init=False)
    """Batch and position, since one agent may run several hops of one batch."""
    rows: int = field(init=False)
    """Number of rows of the whole batch."""
    reserved_start_ns: int = field(init=False)
    """Start of the device reservation on the scheduler's clock; used only for ordering."""

    def __post_init__(self) -> None:
        header = self.header
        self.batch_id, self.position, self.rows = (
            header.batch_id,
            header.position,
            header.batch_rows,
        )
        self.identity = self.batch_id, self.position
        self.reserved_start_ns = self.hop.reserved_start_ns

    def input_shapes(self) -> list[tuple[int, ...]]:
        """Returns the shapes of the inputs of the whole batch, in the executor's order."""
        first = self.pieces[0].payload.tensors
        shapes = []
        for spec in self.partition.executor.inputs:
            shape = first[spec.name].shape
            if len(self.payloads) > 1 and self.partition.pads:
                rows = [payload.tensors[spec.name].shape for payload in self.payloads]
                shape = tuple(map(max, zip(*rows, strict=True)))
            shapes.append((self.rows, *shape[1:]) if self.partition.batched else shape)
        return shapes

    def gather(self) -> list[Array]:
        """Returns the executor's inputs.

        It copies only if several frames make up the batch. Tensors of BYTES are decoded here, on
        the thread that computes.

        Raises:
            InvalidInput: The encoding of such a tensor is wrong.
        """
        specs = self.partition.executor.inputs
        if len(self.pieces) == 1 and self.pieces[0].start == 0:
            tensors = self.pieces[0].payload.tensors
            return [_elements(tensors[spec.name]) for spec in specs]
        pieces = sorted(self.pieces, key=lambda piece: piece.batch_row)
        return [_joined([piece.rows_of(spec.name) for piece in pieces]) for spec in specs]

    def release_inputs(self) -> int:
        """Releases the memory of the inputs, and returns its size in bytes."""
        freed = self.nbytes
        self.pieces = []
        for payload in self.payloads:
            payload.release()
        self.payloads = []
        self.nbytes = 0
        return freed


def _elements(tensor: ReceivedTensor) -> Array:
    return tensor.decoded() if isinstance(tensor, EncodedBytes) else tensor


def _joined(parts: Sequence[Array]) -> Array:
    """Returns rows one after the other; zeros are behind those that are smaller than others."""
    if len({part.shape[1:] for part in parts}) == 1:
        return np.concatenate(parts)
    largest = tuple(map(max, zip(*(part.shape[1:] for part in parts), strict=True)))
    joined = np.zeros((sum(len(part) for part in parts), *largest), parts[0].dtype)
    row = 0
    for part in parts:
        joined[(slice(row, row + len(part)), *map(slice, part.shape[1:]))] = part
        row += len(part)
    return joined
