"""Delivery of a batch's outputs: to the next agent, or row by row to the gateways.

Before a batch is computed, `stage` reserves memory of the link to the next hop, so that the
executor writes its outputs where they will be sent from. Where that is impossible (shapes unknown,
the link not open yet or without free memory, several receivers), `deliver` copies afterwards.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Protocol

import numpy as np

from catenary_agent.engine.batch import Array, Batch, Destination, StagedOutput
from catenary_protos.catenary.v1 import frame_pb2
from catenary_services.domain.ids import NANOSECONDS_PER_SECOND
from catenary_services.domain.tensors import BYTES, DATATYPE_OF, DTYPE_OF, TensorSpec
from catenary_services.errors import (
    CatenaryError,
    DeadlineExceeded,
    InternalError,
    InvalidInput,
    PartitionLost,
    Unavailable,
)
from catenary_services.log import get_logger
from catenary_services.transport.bytes_tensors import encode_bytes
from catenary_services.transport.frames import layout

if TYPE_CHECKING:
    from catenary_agent.engine.emulated_link import EmulatedLink
    from catenary_protos.catenary.v1 import common_pb2
    from catenary_services.transport.interface import Link, Slot

_log = get_logger("catenary_agent.engine")

Copied = tuple[Array, list[tuple[int, int]] | None]
"""An output, and the runs (first row, rows) of it that a receiver gets; None: all of it."""

_BYTE = np.dtype(np.uint8)
_COPY_ON_LOOP_BYTES = 128 * 1024
"""Larger copies (this size takes about 30 microseconds) are left to a thread."""


class LinkHub(Protocol):
    """The part of `catenary_services.transport.hub.TransportHub` that is used here."""

    async def link_to(self, peer_id: str, timeout_s: float) -> Link:
        """Returns an open link to a peer.

        Raises:
            PartitionLost: The peer is unknown, or cannot be reached within `timeout_s` seconds.
        """
        ...


class DeliveryError(Exception):
    """Some receivers did not get their rows; `failures` lists each with its error."""

    def __init__(self, failures: list[tuple[str, CatenaryError]]) -> None:
        super().__init__(", ".join(f"{peer}: {error.reason}" for peer, error in failures))
        self.failures = failures


def destinations(batch: Batch) -> Sequence[Destination]:
    """Returns the receivers of a complete batch; gateways are ordered by their first rows."""
    if not batch.receivers:
        batch.receivers = _receivers(batch)
    return batch.receivers


def _receivers(batch: Batch) -> list[Destination]:
    following = batch.position + 1
    if following < len(batch.header.route):
        return [Destination(batch.header.route[following].agent_id, None)]
    by_gateway: dict[str, list[common_pb2.Slice]] = {}
    for piece in batch.slices:
        by_gateway.setdefault(piece.gateway_id, []).append(piece)
    return [Destination(gateway, slices) for gateway, slices in by_gateway.items()]


class OutputSender:
    """Delivers outputs over the links of a transport hub."""

    def __init__(
        self, hub: LinkHub, agent_id: str, push_timeout_s: float, uplink: EmulatedLink | None = None
    ) -> None:
        """Waits at most `push_timeout_s` seconds for a peer to connect, have memory, or accept.

        Feature maps leave one after the other at the speed of `uplink`, if there is one.
        """
        self._hub = hub
        self._agent_id = agent_id
        self._timeout_s = push_timeout_s
        self._uplink = uplink
        self.begins: Callable[[Batch], None] = _nothing
        """Called when outputs begin to leave over links whose time is booked."""
        self._links: dict[str, Link] = {}
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="copy")

    def close(self) -> None:
        """Ends the copy thread."""
        self._copier.shutdown(wait=False)

    def stage(self, batch: Batch) -> StagedOutput | None:
        """Returns memory the executor can write into, or None if a copy is needed later.

        Nobody waits for memory here: that would cost the device more than the copy does.
        """
        receivers = destinations(batch)
        if len(receivers) != 1 or receivers[0].peer_id == self._agent_id:
            return None
        link = self._links.get(receivers[0].peer_id)
        if link is None or link.closed:
            return None
        executor = batch.partition.executor
        try:
            shapes = executor.output_shapes(batch.input_shapes())
            # How long texts are is known when they are computed.
            if shapes is None or any(spec.datatype == BYTES for spec in executor.outputs):
                return None
            places = _layout_of(executor.outputs, shapes)
            slot = link.try_export(places.nbytes)
            return None if slot is None else places.staged(link, slot)
        except CatenaryError:
            # The error occurs again when the outputs are delivered, and is reported then.
            return None
        except Exception:
            _log.exception("stage_failed", partition=str(executor.key))
            return None

    def try_deliver(self, batch: Batch) -> bool:
        """Sends staged outputs; returns False if `deliver` would wait or fail.

        In that case nothing was sent.

        Raises:
            PartitionLost: The receiver went away just now.
        """
        staged, receiver = batch.staged, destinations(batch)[0]
        if staged is None or staged.link.closed:
            return False
        if receiver.slices is None and self._is_booked(staged.link):
            if self._uplink is not None or _left_ns(batch) > 0:
                return False
            self.begins(batch)
        header = _header(batch, receiver, staged.tensors, self._agent_id)
        # The outputs are views of the memory that is about to be sent.
        arrays, outputs = staged.arrays, batch.outputs
        staged.arrays, batch.outputs = [], ()
        if staged.link.try_push(staged.slot, header):
            return True
        staged.arrays, batch.outputs = arrays, outputs
        return False

    async def deliver(self, batch: Batch) -> None:
        """Sends the outputs to every receiver of rows in the batch.

        Raises:
            DeliveryError: Some receivers did not get theirs.
        """
        receivers = destinations(batch)
        if len(receivers) == 1:
            results = [await self._attempt(batch, receivers[0])]
        else:
            results = await asyncio.gather(*(self._attempt(batch, each) for each in receivers))
        failures = [
            (receiver.peer_id, error)
            for receiver, error in zip(receivers, results, strict=True)
            if error is not None
        ]
        if failures:
            raise DeliveryError(failures)

    async def _attempt(self, batch: Batch, receiver: Destination) -> CatenaryError | None:
        """Sends to one receiver and returns its error, so that the others still get their rows."""
        try:
            await self._send(batch, receiver)
        except DeadlineExceeded:
            return PartitionLost(f"{receiver.peer_id} took no frame for {self._timeout_s:g} s")
        except Unavailable as error:
            return PartitionLost(error.message)
        except InvalidInput as error:
            # The request has passed every check, so outputs that do not fit a frame are a bug.
            return InternalError(error.message)
        except CatenaryError as error:
            return error
        return None

    async def _send(self, batch: Batch, receiver: Destination) -> None:
        staged = batch.staged
        if staged is None:
            staged = await self._copy(batch, receiver)
        else:
            batch.outputs = ()  # the outputs are views of the memory that is about to be sent
        try:
            if receiver.slices is None and self._is_booked(staged.link):
                await self._turn(batch, len(staged.slot.view))
            header = _header(batch, receiver, staged.tensors, self._agent_id)
            staged.arrays = []
            await staged.link.push(staged.slot, header, self._timeout_s)
        finally:
            staged.release()

    def _is_booked(self, link: Link) -> bool:
        """Returns whether frames of this link cross network cards, whose time is booked."""
        return self._uplink is not None or not link.capabilities.same_host

    async def _turn(self, batch: Batch, nbytes: int) -> None:
        """Returns when the links are free for the outputs of a batch, as far as that is known."""
        left_ns = _left_ns(batch)
        if left_ns > 0:
            await asyncio.sleep(left_ns / NANOSECONDS_PER_SECOND)
        if self._uplink is not None:
            await self._uplink.turn(nbytes)
        self.begins(batch)

    async def _copy(self, batch: Batch, receiver: Destination) -> StagedOutput:
        """Reserves link memory and copies the receiver's rows into it."""
        link = self._links.get(receiver.peer_id)
        if link is None or link.closed:
            link = await self._hub.link_to(receiver.peer_id, self._timeout_s)
            self._links = {peer: known for peer, known in self._links.items() if not known.closed}
            self._links[receiver.peer_id] = link
        whole = receiver.slices is None or not batch.partition.batched
        runs = None if whole else _runs(receiver.slices or [])
        rows = sum(count for _, count in runs or ())
        shapes = [
            output.shape if runs is None else (rows, *output.shape[1:]) for output in batch.outputs
        ]
        specs = [
            TensorSpec(spec.name, DATATYPE_OF[output.dtype], spec.shape)
            for spec, output in zip(batch.partition.executor.outputs, batch.outputs, strict=True)
        ]
        on_copier = partial(asyncio.get_running_loop().run_in_executor, self._copier)
        copies: list[Copied] = [(output, runs) for output in batch.outputs]
        if any(spec.datatype == BYTES for spec in specs):
            copies = await on_copier(_encoded, copies)
        places = _layout_of(specs, shapes, copies)
        staged = places.staged(link, await link.export(places.nbytes, self._timeout_s))
        try:
            if len(staged.slot.view) <= _COPY_ON_LOOP_BYTES:
                _fill(staged.arrays, copies)
            else:
                await on_copier(_fill, staged.arrays, copies)
        except BaseException:
            staged.release()
            raise
        return staged


def _left_ns(batch: Batch) -> int:
    """Returns the time until the outputs of a batch may be sent; 0 or less: they may now."""
    return batch.send_after_ns() - time.monotonic_ns() if batch.send_earliest_ns else 0


def _nothing(_: Batch) -> None:
    """Default for callbacks that have nothing to do."""


class _OutputLayout:
    """The places of outputs in the memory of a slot, which are computed once for equal shapes."""

    def __init__(
        self,
        tensors: tuple[tuple[str, str, tuple[int, ...]], ...],
        encoded: Mapping[str, int] | None = None,
    ) -> None:
        self._headers, self.nbytes = layout(tensors, encoded)
        self._places = [
            (DTYPE_OF[header.datatype], shape, header.offset)
            if header.datatype != BYTES
            else (_BYTE, (header.nbytes,), header.offset)
            for header, (_, _, shape) in zip(self._headers, tensors, strict=True)
        ]

    def staged(self, link: Link, slot: Slot) -> StagedOutput:
        view = slot.view
        arrays = [np.ndarray(shape, dtype, view, offset) for dtype, shape, offset in self._places]
        return StagedOutput(link, slot, self._headers, arrays)


_layout = lru_cache(maxsize=1024)(_OutputLayout)


def _layout_of(
    specs: Sequence[TensorSpec], shapes: Sequence[tuple[int, ...]], copies: Sequence[Copied] = ()
) -> _OutputLayout:
    """Returns the layout of outputs; `copies` has the encodings of those of BYTES."""
    tensors = tuple([(s.name, s.datatype, shape) for s, shape in zip(specs, shapes, strict=True)])
    encoded = {
        spec.name: array.nbytes
        for spec, (array, _) in zip(specs, copies, strict=False)
        if spec.datatype == BYTES
    }
    return _OutputLayout(tensors, encoded) if encoded else _layout(tensors)


def next_header(
    batch: Batch, agent_id: str, slices: Sequence[common_pb2.Slice] | None = None
) -> frame_pb2.FrameHeader:
    """Returns the header of the batch for the next hop, with the timing of this hop appended.

    Args:
        batch: A computed batch.
        agent_id: The id of this agent.
        slices: The rows of the one gateway that is the receiver; None if the next agent is.
    """
    header = frame_pb2.FrameHeader()
    header.CopyFrom(batch.header)
    header.position += 1
    del header.slices[:]
    if slices is None:
        header.first_row, header.rows = 0, batch.rows
        header.slices.extend(batch.slices)
    else:
        header.kind = frame_pb2.FRAME_KIND_RESULT
        header.first_row, header.rows = slices[0].batch_row, sum(piece.rows for piece in slices)
        header.slices.extend(slices)
    del header.tensors[:]
    now = time.monotonic_ns()
    header.timings.add(
        agent_id=agent_id,
        first_block=batch.hop.first_block,
        last_block=batch.hop.last_block,
        transfer_ns=batch.transfer_ns,
        wait_ns=batch.started_ns - batch.received_ns,
        compute_ns=batch.ended_ns - batch.started_ns,
        send_ns=now - batch.ended_ns,
    )
    header.budget_ns = batch.deadline_ns - now
    header.sent_monotonic_ns = now
    return header


def _header(
    batch: Batch,
    receiver: Destination,
    tensors: list[frame_pb2.TensorHeader],
    agent_id: str,
) -> bytes:
    header = next_header(batch, agent_id, receiver.slices)
    header.tensors.extend(tensors)
    return header.SerializeToString()


def _runs(slices: Sequence[common_pb2.Slice]) -> list[tuple[int, int]]:
    """Returns the contiguous ranges (first batch row, rows) of slices; adjacent ones are joined."""
    runs: list[tuple[int, int]] = []
    for piece in slices:
        if runs and runs[-1][0] + runs[-1][1] == piece.batch_row:
            runs[-1] = (runs[-1][0], runs[-1][1] + piece.rows)
        else:
            runs.append((piece.batch_row, piece.rows))
    return runs


def _encoded(copies: Sequence[Copied]) -> list[Copied]:
    """Returns what to copy, with the encodings of their rows in place of outputs of BYTES."""
    return [
        (output, runs) if output.dtype != np.object_ else (_encoding(output, runs), None)
        for output, runs in copies
    ]


def _encoding(output: Array, runs: list[tuple[int, int]] | None) -> Array:
    if runs is not None:
        output = np.concatenate([output[start : start + count] for start, count in runs])
    return np.frombuffer(encode_bytes(output), np.uint8)


def _fill(targets: Sequence[Array], copies: Sequence[Copied]) -> None:
    """Copies outputs into `targets`, those with runs of rows one range after the other."""
    for target, (output, runs) in zip(targets, copies, strict=True):
        if runs is None:
            np.copyto(target, output, casting="no")
            continue
        row = 0
        for start, count in runs:
            np.copyto(target[row : row + count], output[start : start + count], casting="no")
            row += count
