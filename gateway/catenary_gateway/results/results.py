"""The merging of result frames into complete requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np

from catenary_gateway.inference import Tensor
from catenary_gateway.results.pending import BatchAttempt, HopTimes, PendingRequest
from catenary_protos.catenary.v1 import common_pb2, frame_pb2
from catenary_services.domain.tensors import BYTES
from catenary_services.errors import CatenaryError, InternalError, InvalidInput, InvalidMessage
from catenary_services.log import get_logger
from catenary_services.transport.bytes_tensors import decode_bytes
from catenary_services.transport.frames import read_header, tensor_views
from catenary_services.transport.interface import FrameSender, ReceivedFrame

_log = get_logger("catenary_gateway.results.results")


class WindowBatches(Protocol):
    """The part of `WindowDispatcher` that hears of results."""

    def answered(self, batch_id: int) -> None:
        """Notes that the result of a batch is there."""
        ...

    def failed(self, batch_id: int) -> None:
        """Notes that a batch brings no result."""
        ...


class ResultMerger:
    """A merger, which copies the rows of result frames into the requests that wait for them.

    A frame is accepted only if it repeats what the scheduler ordered: rows are placed by the slices
    of the order, so a faulty agent can never put a row into another request.
    """

    def __init__(
        self,
        requests: Mapping[int, PendingRequest],
        attempts: Mapping[int, BatchAttempt],
        complete: Callable[[PendingRequest], None],
        failed: Callable[[PendingRequest, CatenaryError], None],
    ) -> None:
        self._requests = requests
        self._attempts = attempts
        self._complete = complete
        self._failed = failed
        self.others: dict[int, Callable[[frame_pb2.FrameHeader, str], bool]] = {}
        """Handlers of other kinds of frames. A handler gets the header and the sender's name, and
        returns False if the sender has no part in it."""
        self.keepers: dict[int, Callable[[frame_pb2.FrameHeader, ReceivedFrame], None]] = {}
        """Handlers of kinds of frames whose payload matters; a handler may release the frame."""
        self.of_window: WindowBatches | None = None
        """Told of the batches that were sent by windows."""
        self.on_refused: Callable[[], None] = _nothing
        """Called for every frame whose sender was not to send it."""
        self.dropped = 0
        """Number of frames that came too late or were malformed."""
        self.refused = 0
        """Number of frames whose sender was not to send them."""

    def take(self, frame: ReceivedFrame) -> None:
        """Handles one frame and releases it; never raises."""
        try:
            self._take(frame)
        except (InvalidInput, InvalidMessage) as error:
            self.dropped += 1
            _log.warning("frame_refused", error=error.message)
        finally:
            frame.release()

    def _take(self, frame: ReceivedFrame) -> None:
        received_ns = time.monotonic_ns()
        header = read_header(frame)
        keeper = self.keepers.get(header.kind)
        if keeper is not None:
            keeper(header, frame)
            return
        other = self.others.get(header.kind)
        if other is not None:
            if not other(header, frame.sender.name):
                self._refuse(frame.sender)
            return
        attempt = self._attempts.get(header.batch_id)
        if attempt is None:
            # The result is late, or its request has ended: usual for a batch that was sent again.
            self.dropped += 1
            return
        if not _is_ordered(header, attempt, frame.sender):
            self._refuse(frame.sender)
            return
        if header.kind == frame_pb2.FRAME_KIND_FAILURE:
            # The scheduler gets the failure too, and decides; here it is kept for the trace.
            attempt.failed = header.failure.reason
            if attempt.window and self.of_window is not None:
                self.of_window.failed(attempt.batch_id)
            return
        if header.kind != frame_pb2.FRAME_KIND_RESULT:
            raise InvalidInput("kind", "a gateway takes results only")
        attempt.result_ns = received_ns
        attempt.timings = tuple(map(HopTimes.of, header.timings))
        views = tensor_views(header.tensors, frame.payload)
        for tensor in header.tensors:
            if tensor.datatype == BYTES:
                raw = views[tensor.name].astype(np.uint8, copy=False)
                views[tensor.name] = decode_bytes(raw, tensor.shape)
        self._merge(header, attempt, views)
        if attempt.window and self.of_window is not None:
            self.of_window.answered(attempt.batch_id)

    def _refuse(self, sender: FrameSender) -> None:
        self.refused += 1
        self.on_refused()
        _log.warning("frame_refused", sender=sender.name, why="nothing was ordered from it")

    def _merge(
        self, header: frame_pb2.FrameHeader, attempt: BatchAttempt, views: Mapping[str, Tensor]
    ) -> None:
        _check_rows(header, views)
        ordered = {(piece.request_id, piece.request_row): piece for piece in attempt.slices}
        at = 0
        for piece in header.slices:
            order = ordered.get((piece.request_id, piece.request_row))
            if order is None or (order.rows, order.batch_row) != (piece.rows, piece.batch_row):
                raise InvalidInput("slices", f"batch {header.batch_id} was not ordered like this")
            request = self._requests.get(piece.request_id)
            if request is not None:
                self._merge_slice(request, attempt, piece, views, at)
            at += piece.rows

    def _merge_slice(
        self,
        request: PendingRequest,
        attempt: BatchAttempt,
        piece: common_pb2.Slice,
        views: Mapping[str, Tensor],
        at: int,
    ) -> None:
        row, rows = piece.request_row, piece.rows
        if not request.request.model.batched:
            row, rows, at = 0, 1, 0
        elif any(view.ndim == 0 or len(view) < at + rows for view in views.values()):
            raise InvalidInput("tensors", "have fewer rows than the frame says")
        try:
            done = request.merge(row, rows, views, at)
        except InternalError as error:
            self._failed(request, error)
            return
        attempt.merged_ns = time.monotonic_ns()
        if done:
            self._complete(request)


def _is_ordered(header: frame_pb2.FrameHeader, attempt: BatchAttempt, sender: FrameSender) -> bool:
    """Returns whether a frame comes from an agent that was to send it."""
    if header.kind == frame_pb2.FRAME_KIND_RESULT:
        return not attempt.agents or sender.name in (attempt.agents[-1], "")
    return not sender.name or sender.name in attempt.agents


def _nothing() -> None:
    """Does nothing; the default of `ResultMerger.on_refused`."""


def _check_rows(header: frame_pb2.FrameHeader, views: Mapping[str, Tensor]) -> None:
    if sum(piece.rows for piece in header.slices) != header.rows:
        raise InvalidInput("slices", "do not add up to the rows of the frame")
    if not views:
        raise InvalidInput("tensors", "a result carries rows")
