"""Reception of feature maps: frames are checked and become complete batches."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from catenary_agent.engine.batch import Batch, Payload, PayloadSlice
from catenary_agent.engine.inbound import intake
from catenary_agent.engine.inbound.assembly import Assembler
from catenary_agent.engine.inbound.memory import HeldBatches
from catenary_agent.engine.partitions import LoadedPartition, PartitionTable, key_of_hop
from catenary_protos.catenary.v1 import frame_pb2
from catenary_services.domain.tensors import BYTES
from catenary_services.errors import CatenaryError, DeadlineExceeded
from catenary_services.log import get_logger
from catenary_services.transport.bytes_tensors import EncodedBytes
from catenary_services.transport.frames import read_header, tensor_views

if TYPE_CHECKING:
    from catenary_agent.engine.batch import Array, ReceivedTensor
    from catenary_protos.catenary.v1 import common_pb2
    from catenary_services.transport.interface import ReceivedFrame

_log = get_logger("catenary_agent.engine")
_NS = 1_000_000_000


class ArrivedFrame(NamedTuple):
    """A frame with its decoded header and the time of its arrival."""

    header: frame_pb2.FrameHeader
    received_ns: int
    transfer_ns: int
    """Nanoseconds since the sender's push; 0 if the clocks differ."""
    deadline_ns: int
    """The moment the budget is used up, on this process's monotonic clock."""


class BatchReceiver:
    """Receives frames, refuses wrong ones, and passes on batches whose rows have all arrived.

    Invariant: the memory of a frame is released exactly once, here or by the batch that it became
    part of, and never while an array refers to it.
    """

    def __init__(
        self,
        agent_id: str,
        partitions: PartitionTable,
        held: HeldBatches,
        assembler: Assembler,
        handlers: tuple[
            Callable[[Batch], None], Callable[[Batch | ArrivedFrame, CatenaryError], None]
        ],
    ) -> None:
        """Calls the first of `handlers` with complete batches, the second with failed ones."""
        self.epoch = 0
        """The highest epoch seen; first hops of an older one are refused."""
        self.ignored = 0
        """Number of frames that were malformed, late duplicates, or of cancelled batches."""
        self.refused = 0
        """Number of frames from peers that their route does not name as the sender."""
        self.on_refused: Callable[[], None] = _nothing
        """Called for each refused frame."""
        self.others: dict[int, Callable[[frame_pb2.FrameHeader, ReceivedFrame], None]] = {}
        """Handlers of frames that are no feature maps, by kind; all other kinds are ignored."""
        self._agent_id = agent_id
        self._partitions = partitions
        self._held = held
        self._assembler = assembler
        self._ready, self._failed = handlers
        self._alarm: asyncio.TimerHandle | None = None

    def close(self) -> None:
        """Ends the timer of unfinished batches."""
        if self._alarm is not None:
            self._alarm.cancel()

    def on_frame(self, frame: ReceivedFrame) -> None:
        """Handles a frame from a transport."""
        received_ns = time.monotonic_ns()
        try:
            header = read_header(frame)
        except CatenaryError as error:
            self._ignore(frame, error.message)
            return
        if header.kind != frame_pb2.FRAME_KIND_FEATURE_MAP:
            handler = self.others.get(header.kind)
            if handler is None:
                self._ignore(frame, f"frames of kind {header.kind} are not for an agent")
            else:
                handler(header, frame)
            return
        if not intake.is_planned(header, frame.sender):
            self.refused += 1
            self.on_refused()
            _log.warning("frame_refused", sender=frame.sender.name, batch=header.batch_id)
            frame.release()
            return
        transfer_ns = 0
        if frame.capabilities.same_host and 0 < header.sent_monotonic_ns <= received_ns:
            transfer_ns = received_ns - header.sent_monotonic_ns
        deadline_ns = received_ns - transfer_ns + header.budget_ns
        arrival = ArrivedFrame(header, received_ns, transfer_ns, deadline_ns)
        try:
            tensors = _received(header, frame.payload)
        except CatenaryError as error:
            error.__traceback__ = None  # its frames hold views of the payload
            frame.release()
            self._refuse(arrival, error)
            return
        self.take(arrival, Payload(tensors, len(frame.payload), frame.release))

    def _ignore(self, frame: ReceivedFrame, why: str) -> None:
        _log.warning("frame_ignored", reason=why)
        self.ignored += 1
        frame.release()

    def on_outputs(self, header: frame_pb2.FrameHeader, outputs: Sequence[Array]) -> None:
        """Handles the outputs of the previous hop if this same agent computed it."""
        hop = header.route[header.position]
        loaded = self._partitions.get(key_of_hop(hop))
        names = [spec.name for spec in loaded.executor.inputs] if loaded is not None else []
        # Boundary tensors have the same order on both sides; the receiving partition names them.
        tensors = dict(zip(names, outputs, strict=False))
        nbytes = sum(output.nbytes for output in outputs)
        now_ns = time.monotonic_ns()
        arrival = ArrivedFrame(header, now_ns, 0, now_ns + header.budget_ns)
        self.take(arrival, Payload(tensors, nbytes, _nothing))

    def take(self, arrival: ArrivedFrame, payload: Payload) -> None:
        """Checks an arrival and makes it a batch, or part of one, or refuses it."""
        header = arrival.header
        if self._is_useless(header):
            self.ignored += 1
            payload.release()
            return
        try:
            batch = self._admit(arrival, payload)
        except CatenaryError as error:
            error.__traceback__ = None
            payload.release()
            self._refuse(arrival, error)
            return
        if batch is not None:
            self._ready(batch)

    def cancel(self, batch_id: int) -> Batch | None:
        """Removes an unfinished batch and returns it; None if there is none."""
        return self._assembler.discard(batch_id)

    def _is_useless(self, header: frame_pb2.FrameHeader) -> bool:
        """Returns True for rows that nobody needs any more, and for whole batches sent twice."""
        if self._held.is_over(header.batch_id, header.position):
            return True
        if (header.batch_id, header.position) not in self._held:
            return False
        return header.position > 0 or self._assembler.get(header.batch_id) is None

    def _admit(self, arrival: ArrivedFrame, payload: Payload) -> Batch | None:
        """Returns the batch of an arrival if it is complete now.

        Raises:
            CatenaryError: The arrival is wrong, late, or too large for the memory that is left.
        """
        header = arrival.header
        hop = intake.check_route(header, self._agent_id, self.epoch)
        loaded = self._partitions.get(key_of_hop(hop))
        if loaded is None:
            raise intake.not_loaded(hop, self._agent_id)
        intake.check_rows(header, loaded)
        rows = header.rows if loaded.batched else None
        intake.check_tensors(payload.tensors, loaded.executor.inputs, rows)
        intake.check_texts(payload.tensors, loaded, header.rows)
        if arrival.deadline_ns <= arrival.received_ns:
            raise DeadlineExceeded(
                "the deadline passed on the way to this agent", details={"stage": "transfer"}
            )
        self._held.claim(payload.nbytes)
        try:
            is_begun = (header.batch_id, header.position) in self._held
            if header.rows == header.batch_rows and not is_begun:
                return self._whole(arrival, hop, loaded, payload)
            return self._assemble(arrival, hop, loaded, payload)
        except CatenaryError:
            self._held.give_back(payload.nbytes)
            raise

    def _whole(
        self, arrival: ArrivedFrame, hop: common_pb2.Hop, loaded: LoadedPartition, payload: Payload
    ) -> Batch:
        batch = self._new(arrival, hop, loaded)
        batch.slices.extend(arrival.header.slices)
        batch.payloads.append(payload)
        batch.pieces.append(PayloadSlice(payload, 0, batch.rows, 0))
        batch.nbytes = payload.nbytes
        return batch

    def _assemble(
        self, arrival: ArrivedFrame, hop: common_pb2.Hop, loaded: LoadedPartition, payload: Payload
    ) -> Batch | None:
        """Adds rows to a batch that begins here; returns it if it is complete now."""
        header = arrival.header
        batch = self._assembler.get(header.batch_id)
        if batch is None:
            batch = self._new(arrival, hop, loaded, self._assembler.begin)
        elif batch.header.batch_rows != header.batch_rows or batch.partition is not loaded:
            raise intake.contradiction(batch.header.batch_rows, header.batch_rows)
        if not self._assembler.add(batch, payload, header.first_row, header.slices):
            self.ignored += 1
            self._held.give_back(payload.nbytes)
            payload.release()
            return None
        batch.deadline_ns = min(batch.deadline_ns, arrival.deadline_ns)
        batch.received_ns, batch.transfer_ns = arrival.received_ns, arrival.transfer_ns
        if self._assembler.take_if_complete(batch):
            return batch
        self._set_alarm()
        return None

    def _new(
        self,
        arrival: ArrivedFrame,
        hop: common_pb2.Hop,
        loaded: LoadedPartition,
        register: Callable[[Batch], None] | None = None,
    ) -> Batch:
        """Returns an empty batch that is held from now on."""
        batch = Batch(
            header=arrival.header,
            hop=hop,
            partition=loaded,
            slices=[],
            payloads=[],
            pieces=[],
            nbytes=0,
            deadline_ns=arrival.deadline_ns,
            received_ns=arrival.received_ns,
            transfer_ns=arrival.transfer_ns,
        )
        if register is not None:
            register(batch)
        self._partitions.hold(loaded)
        self._held.add(batch)
        return batch

    def _refuse(self, arrival: ArrivedFrame, error: CatenaryError) -> None:
        """Fails the batch of a wrong frame, including rows of it that arrived before."""
        batch = None
        if arrival.header.position == 0:
            batch = self._assembler.discard(arrival.header.batch_id)
        self._failed(batch if batch is not None else arrival, error)

    def _set_alarm(self) -> None:
        """Starts the timer that ends when the first unfinished batch runs out of budget."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        deadline_ns = self._assembler.next_deadline_ns()
        if deadline_ns is not None:
            delay_s = max(0, deadline_ns - time.monotonic_ns()) / _NS
            self._alarm = asyncio.get_running_loop().call_later(delay_s, self._expire)

    def _expire(self) -> None:
        for batch in self._assembler.expired(time.monotonic_ns()):
            missing = batch.rows - sum(piece.rows for piece in batch.pieces)
            self._failed(
                batch,
                DeadlineExceeded(
                    f"{missing} of {batch.rows} rows did not arrive before the deadline",
                    details={"stage": "assembly"},
                ),
            )
        self._set_alarm()


def _received(header: frame_pb2.FrameHeader, payload: memoryview) -> Mapping[str, ReceivedTensor]:
    """Returns the tensors of a frame; those of BYTES are not decoded yet.

    Raises:
        InvalidInput: A header of a tensor is wrong.
    """
    views = tensor_views(header.tensors, payload)
    texts = [tensor for tensor in header.tensors if tensor.datatype == BYTES]
    if not texts:
        return views
    encoded = {text.name: EncodedBytes.of(views[text.name], text.shape) for text in texts}
    return {**views, **encoded}


def _nothing() -> None:
    """Default for callbacks that have nothing to do."""
