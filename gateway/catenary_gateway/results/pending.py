"""Unanswered requests: their tensors, batches under way, rows that came back, and deadlines."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from catenary_gateway.inference import InferenceRequest, RequestArrival, Tensor
from catenary_protos.catenary.v1 import common_pb2, scheduler_pb2
from catenary_services.domain.tensors import DTYPE_OF
from catenary_services.errors import DeadlineExceeded, InternalError

_OBJECT = np.dtype(np.object_)
LONGEST_PUSH_S = 5.0
SLACK_S = 0.002
"""Seconds by which the timer of deadlines is late on purpose."""
_FEW = 1_024


class RequestSlice(NamedTuple):
    """A slice of a batch: rows `[request_row, request_row + rows)` of a request.

    `batch_row` is the batch's row that holds the first of them.
    """

    request_id: int
    request_row: int
    rows: int
    batch_row: int


@dataclass(slots=True, eq=False)
class BatchAttempt:
    """A batch with rows of this gateway.

    Times are nanoseconds of the monotonic clock; 0 if it has not happened.
    """

    batch_id: int
    batch_rows: int
    slices: tuple[RequestSlice, ...]
    dispatched_ns: int
    expected_ns: int
    """Time at which the scheduler expects the last hop to be done."""
    window: int = 0
    """Id of the window by which it was sent; 0 if the scheduler ordered it."""
    agents: tuple[str, ...] = ()
    """Agents of the route. The last one sends the result; any of them may report a failure."""
    waiting: int = 0
    """Number of unanswered requests of this gateway with rows in the batch."""
    push_ns: int = 0
    sent_ns: int = 0
    result_ns: int = 0
    merged_ns: int = 0
    failed: str = ""
    """Reason why it will bring no result, as far as this gateway knows; empty if it may."""
    timings: tuple[HopTimes, ...] = ()
    is_counted: bool = False
    """Whether it is in the sums of its model, as it is once for all its requests."""


class PendingRequest:
    """An unanswered request, which collects its rows until it has all of them.

    Invariants: `missing` is the number of zeros in `have`; a row of `outputs` is written exactly
    once, by the first result that brings it.
    """

    __slots__ = (
        "arrival",
        "attempts",
        "by_window",
        "deadline_ns",
        "future",
        "have",
        "missing",
        "number",
        "outputs",
        "request",
        "submitted_ns",
    )

    def __init__(
        self,
        number: int,
        request: InferenceRequest,
        arrival: RequestArrival,
        deadline_ns: int,
        future: asyncio.Future[tuple[Tensor, ...]],
    ) -> None:
        self.number = number
        self.request = request
        self.arrival = arrival
        self.deadline_ns = deadline_ns
        self.future = future
        self.submitted_ns = 0
        self.by_window = False
        """True while it goes by a window, and no scheduler knows it."""
        self.attempts: list[BatchAttempt] = []
        self.have = bytearray(request.rows)
        self.missing = request.rows
        self.outputs: list[Tensor] | None = None

    def submission(self, now_ns: int) -> scheduler_pb2.GatewayMessage:
        """Returns the message that submits the request, with the rows already dispatched."""
        request, trace = self.request, self.arrival.trace
        # A message that is filled in place is made in half the time of one that is copied into it.
        message = scheduler_pb2.GatewayMessage()
        submit = message.submit
        submit.request_id = self.number
        submit.model = request.model.key.name
        submit.model_version = request.model.key.version
        submit.rows = request.rows
        submit.budget_ns = max(0, self.deadline_ns - now_ns)
        submit.priority = request.options.priority
        if trace.sampled:
            submit.traceparent = trace.traceparent
        for tokens, rows in itertools.groupby(request.row_sizes):
            submit.texts.add(rows=len(list(rows)), tokens=tokens)
        if self.attempts:
            submit.in_flight.extend(self._in_flight(now_ns))
        return message

    def merge(self, row: int, rows: int, views: Mapping[str, Tensor], at: int) -> bool:
        """Copies rows `[at, at + rows)` of a result to rows `[row, row + rows)` of the answer.

        Rows that came before are not copied again.

        Returns:
            True if the request is complete with them.

        Raises:
            InternalError: The result does not have the outputs of this model.
        """
        if self.outputs is None:
            if rows == self.request.rows:
                return self._take_whole(views, at)
            self.outputs = self._allocate(views)
        fresh = rows - self.have.count(1, row, row + rows)
        if fresh == 0:
            return False
        if fresh == rows:
            spans: Iterator[tuple[int, int]] = iter([(row, rows)])
        else:
            spans = self._gaps(row, rows)
        for start, count in list(spans):
            self._copy(start, count, views, at + start - row)
            self.have[start : start + count] = b"\x01" * count
            self.missing -= count
        return self.missing == 0

    def answer(self) -> tuple[Tensor, ...]:
        """Returns the outputs, in the order in which they were requested; none may be missing."""
        assert self.missing == 0
        assert self.outputs is not None
        return tuple(self.outputs)

    def _take_whole(self, views: Mapping[str, Tensor], at: int) -> bool:
        """Copies all rows from the one result that has them, as most requests get theirs."""
        request, rows = self.request, self.request.rows
        outputs: list[Tensor] = []
        for index in request.outputs:
            view = self._view(index, views)
            outputs.append((view[at : at + rows] if request.model.batched else view).copy())
        self.outputs = outputs
        self.have[:] = b"\x01" * rows
        self.missing = 0
        return True

    def _view(self, index: int, views: Mapping[str, Tensor]) -> Tensor:
        """Returns the rows that a result has of one of the model's outputs."""
        spec = self.request.model.outputs[index]
        view = views.get(spec.name)
        if view is None or view.dtype != DTYPE_OF.get(spec.datatype, _OBJECT):
            raise InternalError(f"a result has no output {spec.name!r} of {spec.datatype}")
        return view

    def _wanted(self) -> Iterator[str]:
        model = self.request.model
        return (model.outputs[index].name for index in self.request.outputs)

    def _allocate(self, views: Mapping[str, Tensor]) -> list[Tensor]:
        request = self.request
        outputs: list[Tensor] = []
        for index in request.outputs:
            view = self._view(index, views)
            shape = (request.rows, *view.shape[1:]) if request.model.batched else view.shape
            outputs.append(np.empty(shape, view.dtype))
        return outputs

    def _copy(self, start: int, count: int, views: Mapping[str, Tensor], at: int) -> None:
        assert self.outputs is not None
        for name, output in zip(self._wanted(), self.outputs, strict=True):
            view = views.get(name)
            batched = self.request.model.batched
            same = (
                view is not None
                and view.dtype == output.dtype
                and (view.shape[1:] == output.shape[1:] if batched else view.shape == output.shape)
            )
            if view is None or not same:
                raise InternalError(f"results differ in the shape or datatype of {name!r}")
            if batched:
                output[start : start + count] = view[at : at + count]
            else:
                output[...] = view

    def _gaps(self, row: int, rows: int) -> Iterator[tuple[int, int]]:
        """Yields (first row, count) of every run of missing rows in `[row, row + rows)`."""
        end = row + rows
        while (start := self.have.find(0, row, end)) >= 0:
            row = self.have.find(1, start, end)
            if row < 0:
                row = end
            yield start, row - start

    def _in_flight(self, now_ns: int) -> Iterator[scheduler_pb2.InFlight]:
        """Yields the batch that brings or has brought each run of rows."""
        owner: list[BatchAttempt | None] = [None] * self.request.rows
        for attempt in self.attempts:
            for piece in attempt.slices:
                if piece.request_id != self.number:
                    continue
                for row in range(piece.request_row, piece.request_row + piece.rows):
                    # A row that has arrived needs no other batch, even if its batch failed later.
                    if not attempt.failed or self.have[row]:
                        owner[row] = attempt
        start = 0
        for row in range(1, len(owner) + 1):
            ends = row == len(owner)
            if not ends and owner[row] is owner[start] and self.have[row] == self.have[start]:
                continue
            attempt_here = owner[start]
            if attempt_here is not None:
                # Rows that have arrived must never look overdue, or they are dispatched again.
                due_ns = self.deadline_ns if self.have[start] else attempt_here.expected_ns
                yield scheduler_pb2.InFlight(
                    batch_id=attempt_here.batch_id,
                    request_row=start,
                    rows=row - start,
                    expected_after_ns=max(0, due_ns - now_ns),
                )
            start = row


class HopTimes(NamedTuple):
    """Times of one hop in nanoseconds, as its agent measured them.

    A field of a message keeps the whole message in memory. Records of requests outlive the requests
    by far, so they hold these plain numbers instead.
    """

    agent_id: str
    first_block: int
    last_block: int
    transfer_ns: int
    wait_ns: int
    compute_ns: int
    send_ns: int

    @classmethod
    def of(cls, timing: common_pb2.HopTiming) -> HopTimes:
        """Returns the times that a message reports."""
        return cls(
            timing.agent_id,
            timing.first_block,
            timing.last_block,
            timing.transfer_ns,
            timing.wait_ns,
            timing.compute_ns,
            timing.send_ns,
        )

    @property
    def blocks(self) -> tuple[str, int, int]:
        """Identity of the hop: agent, first block and last block."""
        return self.agent_id, self.first_block, self.last_block

    @property
    def phases(self) -> tuple[tuple[str, int], ...]:
        """The phases of the hop in order, each as a name and a duration in nanoseconds."""
        return (
            ("agent.transfer", self.transfer_ns),
            ("agent.wait", self.wait_ns),
            ("agent.compute", self.compute_ns),
            ("agent.send", self.send_ns),
        )

    def plus(self, other: HopTimes) -> HopTimes:
        """Returns the sums of these times and those of another token on the same hop."""
        return HopTimes(
            *self.blocks,
            self.transfer_ns + other.transfer_ns,
            self.wait_ns + other.wait_ns,
            self.compute_ns + other.compute_ns,
            self.send_ns + other.send_ns,
        )


class Deadlines:
    """A registry of deadlines with one event-loop timer, set for the earliest of them.

    Most requests finish long before their deadline. Removing an entry from a heap is slow and a
    stale entry is harmless, so an entry stays until it is the earliest when the timer fires. The
    timer is then set for the first request still pending, so that under load it fires about once
    per usual time limit and not once per request. If stale entries far outnumber pending ones
    (long deadlines, quick answers), all of them are removed at once.
    """

    def __init__(self, expired: Callable[[int], None], pending: Collection[int]) -> None:
        self._expired = expired
        self._pending = pending
        self._heap: list[tuple[int, int]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ns = 0

    def add(self, number: int, deadline_ns: int) -> None:
        """Arranges a call of `expired(number)` soon after `deadline_ns` on the monotonic clock."""
        if len(self._heap) > max(_FEW, 4 * len(self._pending)):
            self._heap = [entry for entry in self._heap if entry[1] in self._pending]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (deadline_ns, number))
        if self._timer is None or deadline_ns < self._timer_ns:
            self._arm()

    def close(self) -> None:
        """Drops all deadlines and cancels the timer."""
        self._heap.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_ns = self._heap[0][0]
        # Event loops count in milliseconds: without the slack a timer fires too early and has to
        # be set again. A timer that is a little late serves all deadlines up to then.
        delay_s = max(0, self._timer_ns - time.monotonic_ns()) / 1e9 + SLACK_S
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._fire)

    def _fire(self) -> None:
        self._timer = None
        heap, pending = self._heap, self._pending
        while heap and (heap[0][1] not in pending or heap[0][0] <= time.monotonic_ns()):
            number = heapq.heappop(heap)[1]
            if number in pending:
                self._expired(number)
        if self._heap:
            self._arm()


def left_s(deadline_ns: int) -> float:
    """Returns the seconds left for one step of a delivery, at most `LONGEST_PUSH_S`.

    Raises:
        DeadlineExceeded: No time is left.
    """
    left = (deadline_ns - time.monotonic_ns()) / 1e9
    if left <= 0:
        raise DeadlineExceeded("no time was left to send the rows", details={"stage": "send"})
    return min(left, LONGEST_PUSH_S)
