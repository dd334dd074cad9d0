"""A batch at one hop, from its first frame until its outputs have left."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from catenary_services.domain.ids import NANOSECONDS_PER_MILLISECOND
from catenary_services.errors import CatenaryError
from catenary_services.transport.bytes_tensors import EncodedBytes

if TYPE_CHECKING:
    from catenary_agent.engine.partitions import LoadedPartition
    from catenary_protos.catenary.v1 import common_pb2, frame_pb2
    from catenary_services.transport.interface import Link, Slot

_HEARTBEATS = 8
"""Number of heartbeats of which the fastest counts: clocks drift apart by microseconds a second."""
_LONGEST_WAIT_NS = 20 * NANOSECONDS_PER_MILLISECOND
"""The longest time for which a batch or its outputs wait for another booking."""

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


class SchedulerClock:
    """The clock on which times are booked, as this process knows it from the leader's heartbeats.

    A heartbeat tells what that clock showed when it was sent. The one that came fastest tells it
    best, so the most advanced of the last few counts; what is left of the error is the time of that
    heartbeat on its way, by which booked moments seem to be later than they are.
    """

    def __init__(self) -> None:
        self._epoch = 0
        self._offsets: deque[int] = deque(maxlen=_HEARTBEATS)

    def heard(self, epoch: int, clock_ns: int, now_ns: int) -> None:
        """Takes in a heartbeat of the leader of an epoch; `clock_ns` is 0 if it tells no time."""
        if epoch != self._epoch:
            self._epoch = epoch
            self._offsets.clear()
        if clock_ns:
            self._offsets.append(clock_ns - now_ns)

    def here_ns(self, epoch: int, moment_ns: int) -> int:
        """Returns a moment of that epoch's clock on this process's clock; 0 if it is not known."""
        if not moment_ns or epoch != self._epoch or not self._offsets:
            return 0
        return moment_ns - max(self._offsets)


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
    booked_ns: int = 0
    """Booked start of the computation, on this process's clock; 0 if that is not known."""
    earliest_ns: int = 0
    """Moment from which the device may compute it; 0: at once."""
    send_earliest_ns: int = 0
    """Moment from which the outputs may leave for the next agent; 0: at once."""
    send_booked_ns: int = 0
    """Booked start of their transfer; 0 if that is not known."""

    batch_id: int = field(init=False)
    """The scheduler's number of the batch."""
    position: int = field(init=False)
    """Index of this hop in the route."""
    identity: tuple[int, int] = field(init=False)
    """Batch and position, since one agent may run several hops of one batch."""
    rows: int = field(init=False)
    """Number of rows of the whole batch."""
    reserved_start_ns: int = field(init=False)
    """Start of the device reservation on the scheduler's clock, by which batches are ordered."""

    def __post_init__(self) -> None:
        header = self.header
        self.batch_id, self.position, self.rows = (
            header.batch_id,
            header.position,
            header.batch_rows,
        )
        self.identity = self.batch_id, self.position
        self.reserved_start_ns = self.hop.reserved_start_ns

    def take_windows(self, clock: SchedulerClock) -> None:
        """Sets from when on the batch may be computed and its outputs may be sent.

        It never waits longer than `_LONGEST_WAIT_NS`, whatever the clocks say: booked times may be
        stale by then, and a device is not to idle because of them.
        """
        epoch, hop = self.header.epoch, self.hop
        latest = self.received_ns + _LONGEST_WAIT_NS
        self.booked_ns = clock.here_ns(epoch, hop.reserved_start_ns)
        self.earliest_ns = min(latest, clock.here_ns(epoch, hop.earliest_start_ns))
        following = self.position + 1
        if following < len(self.header.route):
            after = self.header.route[following]
            self.send_booked_ns = clock.here_ns(epoch, after.transfer_start_ns)
            self.send_earliest_ns = clock.here_ns(epoch, after.transfer_earliest_ns)

    def send_after_ns(self) -> int:
        """Returns the moment from which the outputs of a computed batch may be sent."""
        return min(self.send_earliest_ns, self.ended_ns + _LONGEST_WAIT_NS)

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
