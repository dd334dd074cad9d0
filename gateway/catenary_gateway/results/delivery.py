"""The delivery of a batch: from a scheduler's order to frames for the route's first agent."""

from __future__ import annotations

import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import Protocol

import numpy as np

from catenary_gateway.catalog import Model
from catenary_gateway.inference import Tensor
from catenary_gateway.results.pending import BatchAttempt, PendingRequest, RequestSlice, left_s
from catenary_gateway.tensors.raw_tensors import to_raw
from catenary_protos.catenary.v1 import common_pb2, frame_pb2, scheduler_pb2
from catenary_services.domain.tensors import ANY, BYTES, TensorSpec
from catenary_services.errors import InvalidInput, RequestCancelled
from catenary_services.transport.frames import layout
from catenary_services.transport.interface import Link, Slot


class LinkSource(Protocol):
    """The part of `catenary_services.transport.hub.TransportHub` that deliveries use."""

    def open_link(self, peer_id: str) -> Link | None:
        """Returns the link to a peer if one is open."""
        ...

    async def link_to(self, peer_id: str, timeout_s: float) -> Link:
        """Returns an open link to a peer, after waiting for it up to `timeout_s` seconds."""
        ...


Rest = Coroutine[None, None, None]
"""The rest of a delivery, which has to wait for the peer or for memory."""
_Run = Sequence[common_pb2.Slice]


def deliver(
    attempt: BatchAttempt,
    dispatch: scheduler_pb2.DispatchBatch,
    requests: Mapping[int, PendingRequest],
    hub: LinkSource,
) -> Rest | None:
    """Pushes this gateway's rows of a batch to the first agent of its route.

    It returns None if the link took all of them at once, else the rest of the delivery, which is to
    be awaited and raises the same errors.

    Raises:
        RequestCancelled: Every request of the batch has ended.
        DeadlineExceeded: No time is left.
        InvalidInput: The rows do not fit into one tensor.
        PartitionLost: The agent cannot be reached.
        Overloaded: The agent took no frame in time.
    """
    live = [requests[piece.request_id] for piece in attempt.slices if piece.request_id in requests]
    if not live:
        raise RequestCancelled("no request of the batch is waiting any more")
    rows = _Rows(attempt, dispatch, requests, live)
    link = hub.open_link(dispatch.route[0].agent_id)
    runs = _runs(dispatch.slices)
    return _deliver_later(rows, runs, hub) if link is None else _push(rows, runs, link)


async def _deliver_later(rows: _Rows, runs: Sequence[_Run], hub: LinkSource) -> None:
    link = await hub.link_to(rows.dispatch.route[0].agent_id, left_s(rows.deadline_ns))
    rest = _push(rows, runs, link)
    if rest is not None:
        await rest


def _push(rows: _Rows, runs: Sequence[_Run], link: Link) -> Rest | None:
    """Pushes a frame for each run of slices that are adjacent in the batch."""
    for at, run in enumerate(runs):
        left_s(rows.deadline_ns)
        frame = _Frame(rows, run)
        slot = link.try_export(frame.nbytes)
        if slot is None:
            return _push_later(frame, link, runs[at + 1 :])
        try:
            header = frame.fill(slot)
            if not link.try_push(slot, header):
                return _push_later(frame, link, runs[at + 1 :], (slot, header))
        except BaseException:
            slot.release()
            raise
    rows.attempt.sent_ns = time.monotonic_ns()
    return None


async def _push_later(
    frame: _Frame, link: Link, runs: Sequence[_Run], filled: tuple[Slot, bytes] | None = None
) -> None:
    """Pushes a frame, which is in the slot `filled` or in none yet, and those of more runs."""
    deadline_ns = frame.rows.deadline_ns
    slot = await link.export(frame.nbytes, left_s(deadline_ns)) if filled is None else filled[0]
    try:
        header = frame.fill(slot) if filled is None else filled[1]
        await link.push(slot, header, left_s(deadline_ns))
    finally:
        slot.release()
    rest = _push(frame.rows, runs, link)
    if rest is not None:
        await rest


class _Rows:
    """The rows of a batch by request; rows of requests that have ended are blanks.

    The batch has a place for every row: without the blanks it would never be complete, and its
    other requests would wait in vain.
    """

    __slots__ = ("_example", "_requests", "attempt", "deadline_ns", "dispatch", "model")

    def __init__(
        self,
        attempt: BatchAttempt,
        dispatch: scheduler_pb2.DispatchBatch,
        requests: Mapping[int, PendingRequest],
        live: Sequence[PendingRequest],
    ) -> None:
        self.attempt = attempt
        self.dispatch = dispatch
        self.model: Model = live[0].request.model
        self.deadline_ns = min([request.deadline_ns for request in live])
        self._requests = requests
        self._example = live[0]

    def widest(self, run: _Run) -> int:
        """Returns the largest size of rows that may be of unlike sizes; 0 if these may not."""
        if not self._example.request.row_sizes:
            return 0
        widest = 1
        for piece in run:
            request = self._requests.get(piece.request_id)
            if request is not None:
                sizes = request.request.row_sizes
                rows = slice(piece.request_row, piece.request_row + piece.rows)
                widest = max(widest, *sizes[rows])
        return widest

    def of(
        self, name: str, run: _Run, count: int, widest: int
    ) -> tuple[tuple[int, ...], list[Tensor | None]]:
        """Returns the input called `name` for a run of slices that have `count` rows in all.

        That is its shape, and each slice's rows as a view of the request's array; None for blanks.
        With `widest`, rows have this size, and those of some slices may be smaller.
        """
        whole, batched = self._example.request.inputs[name].shape, self.model.batched
        if widest:
            whole = (whole[0], widest, *whole[2:])
        parts: list[Tensor | None] = []
        for piece in run:
            request = self._requests.get(piece.request_id)
            if request is None:
                parts.append(None)
                continue
            array, expected = request.request.inputs[name], whole
            if batched:
                array = array[piece.request_row : piece.request_row + piece.rows]
                expected = (piece.rows, *whole[1:])
            if widest:
                parts.append(array[:, :widest])
                continue
            if array.shape != expected:
                raise InvalidInput(
                    name, "requests with different shapes of a row cannot share a batch"
                )
            parts.append(array)
        return (count, *whole[1:]) if batched else whole, parts


class _Frame:
    """One frame, with slices that are adjacent in the batch."""

    __slots__ = ("_contents", "_count", "_run", "_tensors", "nbytes", "rows")

    def __init__(self, rows: _Rows, run: _Run) -> None:
        self.rows = rows
        self._run = run
        self._count = sum([piece.rows for piece in run])
        laid_out: list[tuple[str, str, tuple[int, ...]]] = []
        encoded: dict[str, int] = {}
        self._contents: list[tuple[tuple[int, ...], list[Tensor | None], bytes | None]] = []
        widest = rows.widest(run)
        for spec in rows.model.inputs:
            shape, parts = rows.of(spec.name, run, self._count, widest)
            raw = _encode(spec, parts, run) if spec.datatype == BYTES else None
            self._contents.append((shape, parts, raw))
            laid_out.append((spec.name, spec.datatype, shape))
            if raw is not None:
                encoded[spec.name] = len(raw)
        self._tensors, self.nbytes = layout(laid_out, encoded)

    def fill(self, slot: Slot) -> bytes:
        """Copies the rows into a slot, and returns the header that says where they are."""
        rows, run = self.rows, self._run
        for tensor, (shape, parts, raw) in zip(self._tensors, self._contents, strict=True):
            target = slot.view[tensor.offset : tensor.offset + tensor.nbytes]
            if raw is None:
                _fill(target, shape, parts, run)
            else:
                target[:] = raw
        attempt, dispatch = rows.attempt, rows.dispatch
        attempt.push_ns = now_ns = time.monotonic_ns()
        return frame_pb2.FrameHeader(
            kind=frame_pb2.FRAME_KIND_FEATURE_MAP,
            epoch=dispatch.epoch,
            batch_id=dispatch.batch_id,
            batch_rows=dispatch.batch_rows,
            first_row=run[0].batch_row,
            rows=self._count,
            slices=run,
            route=dispatch.route,
            tensors=self._tensors,
            budget_ns=rows.deadline_ns - now_ns,
            plan_id=dispatch.plan_id,
            sent_monotonic_ns=now_ns,
        ).SerializeToString()


def _fill(
    target: memoryview,
    shape: tuple[int, ...],
    parts: Sequence[Tensor | None],
    run: Sequence[common_pb2.Slice],
) -> None:
    """Copies the rows of all slices into `target`, one slice after the other; blanks are zeros."""
    example = next((part for part in parts if part is not None), None)
    if example is None:
        target[:] = bytes(len(target))
        return
    array = np.frombuffer(target, example.dtype).reshape(shape)
    if len(parts) == 1:
        array[...] = example
        return
    row = 0
    for piece, part in zip(run, parts, strict=True):
        rows = array[row : row + piece.rows]
        if part is not None and part.shape == rows.shape:
            rows[...] = part
        else:
            rows[...] = 0
            if part is not None:
                rows[:, : part.shape[1]] = part
        row += piece.rows


def _encode(
    spec: TensorSpec, parts: Sequence[Tensor | None], run: Sequence[common_pb2.Slice]
) -> bytes:
    """Returns the raw form of BYTES rows; an element of a blank is empty: four zero bytes."""
    example = next((part for part in parts if part is not None), None)
    if example is None and ANY in spec.shape[1:]:
        raise InvalidInput(spec.name, "the shape of rows nobody waits for is unknown")
    per_row = int(np.prod(example.shape[1:] if example is not None else spec.shape[1:]))
    return b"".join(
        bytes(4 * per_row * piece.rows) if part is None else to_raw(part)
        for piece, part in zip(run, parts, strict=True)
    )


def _runs(slices: Sequence[common_pb2.Slice]) -> list[list[common_pb2.Slice]]:
    """Returns slices in the order of batch rows, split at rows of other gateways."""
    if len(slices) == 1:
        return [list(slices)]
    runs: list[list[common_pb2.Slice]] = []
    end = -1
    for piece in sorted(slices, key=lambda piece: piece.batch_row):
        if piece.batch_row == end:
            runs[-1].append(piece)
        else:
            runs.append([piece])
        end = piece.batch_row + piece.rows
    return runs


def slices_of(dispatch: scheduler_pb2.DispatchBatch) -> tuple[RequestSlice, ...]:
    """Returns the slices of an order, in the form that is kept in attempts."""
    return tuple(
        RequestSlice(piece.request_id, piece.request_row, piece.rows, piece.batch_row)
        for piece in dispatch.slices
    )
