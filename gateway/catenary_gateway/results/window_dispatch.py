"""Dispatch by windows: requests for which the scheduler need not be asked (ADR 0058).

`catenary_services.domain.windows` decides; here are the clock, the messages and the timer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from catenary_gateway.results.delivery import LinkSource
from catenary_gateway.results.pending import PendingRequest
from catenary_protos.catenary.v1 import common_pb2, scheduler_pb2
from catenary_services.domain.ids import AgentId, BatchId, ModelKey, PartitionKey
from catenary_services.domain.windows.window import DispatchWindow, WindowHop
from catenary_services.domain.windows.window_queue import (
    WindowOrder,
    WindowQueue,
    WindowRows,
    WindowUse,
)

_SHORTEST_NS = 1_000_000
_Message = scheduler_pb2.GatewayMessage


@dataclass(frozen=True, slots=True)
class WindowCallbacks:
    """The parts of a data plane that carry out what windows decide."""

    dispatch: Callable[[scheduler_pb2.DispatchBatch, int], None]
    """Sends the rows of a batch by a window, which is given by its id."""
    submit: Callable[[int], None]
    """Submits a request to the scheduler, by its number."""
    tell: Callable[[_Message], None]
    """Sends a message to the scheduler."""


class WindowDispatcher:
    """The dispatch windows of a gateway.

    Attributes:
        grants: The windows that are not over, as they were granted.
    """

    def __init__(
        self,
        gateway_id: str,
        requests: Mapping[int, PendingRequest],
        hub: LinkSource,
        callbacks: WindowCallbacks,
    ) -> None:
        self._gateway_id = gateway_id
        self._requests = requests
        self._hub = hub
        self._callbacks = callbacks
        self._queue = WindowQueue()
        self.grants: dict[BatchId, scheduler_pb2.GrantWindow] = {}
        self._timer: asyncio.Handle | None = None
        self._timer_ns = 0
        """Moment of the timer; 0 if it fires in the next turn of the loop."""

    # ---- requests ----

    def take(self, pending: PendingRequest) -> bool:
        """Takes a new request if it can go by a window; False: the scheduler is to be asked."""
        request = pending.request
        if request.options.priority or request.row_sizes:
            return False
        window = self._queue.window_of(request.model.key)
        if window is None or self._hub.open_link(window.hops[0].agent) is None:
            return False
        rows = WindowRows(pending.number, request.rows, pending.deadline_ns)
        if not self._queue.offer(request.model.key, rows, pending.submitted_ns):
            return False
        # Requests that are read in the same turn of the loop go together.
        self._look_at(0)
        return True

    def withdraw(self, pending: PendingRequest) -> None:
        """Forgets a request that ended."""
        self._queue.withdraw(pending.request.model.key, pending.number)

    def answered(self, batch_id: int) -> None:
        """Notes that the result of a batch is there."""
        self._queue.answered(BatchId(batch_id), time.monotonic_ns())
        self._look_at(0)

    def failed(self, batch_id: int) -> None:
        """Has the scheduler told of the requests of a batch that brings no result."""
        self._queue.failed(BatchId(batch_id), time.monotonic_ns())
        self._look_at(0)

    def clear(self) -> list[int]:
        """Forgets all windows, and returns the requests that went by them, for a new scheduler."""
        self.grants.clear()
        self.close()
        return self._queue.clear()

    def close(self) -> None:
        """Cancels the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # ---- what the scheduler says ----

    def granted(self, grant: scheduler_pb2.GrantWindow) -> None:
        """Takes a window, unless nothing is left of it."""
        now = time.monotonic_ns()
        asked = self._requests.get(grant.request_id)
        window = None if asked is None else _window_of(grant, asked.submitted_ns, now)
        if window is None:
            given_back = scheduler_pb2.WindowReport(
                window_id=grant.window_id, number=1, first_batch_id=grant.first_batch_id
            )
            self._callbacks.tell(_Message(window_report=given_back))
            return
        self.grants[window.window] = grant
        self._queue.granted(window, now)
        self._look_at(0)

    def extended(self, order: scheduler_pb2.ExtendWindow) -> None:
        """Takes more time for a window."""
        window = BatchId(order.window_id)
        asked_ns = self._queue.asked_ns(window, order.number)
        if asked_ns is not None:
            ends = tuple([asked_ns + after_ns for after_ns in order.ends_after_ns])
            self._queue.extended(window, order.number, ends, time.monotonic_ns())
            self._look_at(0)

    def revoked(self, order: scheduler_pb2.RevokeWindow) -> None:
        """Ends a window; waiting requests are the scheduler's, at once."""
        self._queue.revoked(BatchId(order.window_id), order.lost, time.monotonic_ns())
        self._look()

    # ---- inside ----

    def _look(self) -> None:
        """Does what windows ask for now, and sets the timer."""
        self.close()
        now = time.monotonic_ns()
        actions = self._queue.look(now)
        for order in actions.orders:
            grant = self.grants[order.window.window]
            self._callbacks.dispatch(self._dispatch_of(order, grant, now), grant.window_id)
        for number in actions.submissions:
            self._callbacks.submit(number)
        for use in actions.reports:
            if not use.renew:
                del self.grants[use.window]
            self._callbacks.tell(_report_of(use))
        wakeup = self._queue.next_wakeup()
        if wakeup is not None:
            self._look_at(wakeup)

    def _look_at(self, moment_ns: int) -> None:
        """Has `_look` called at a moment at the latest; 0: in the next turn of the loop."""
        if self._timer is not None:
            if self._timer_ns <= moment_ns:
                return
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        left_ns = moment_ns - time.monotonic_ns() if moment_ns else 0
        self._timer_ns = moment_ns if left_ns > 0 else 0
        if left_ns > 0:
            # Loops count in milliseconds: of a shorter sleep they would make a busy wait.
            self._timer = loop.call_later(max(left_ns, _SHORTEST_NS) / 1e9, self._look)
        else:
            self._timer = loop.call_soon(self._look)

    def _dispatch_of(
        self, order: WindowOrder, grant: scheduler_pb2.GrantWindow, now: int
    ) -> scheduler_pb2.DispatchBatch:
        """Returns the order that the scheduler would have given."""
        batch = order.batch
        dispatch = scheduler_pb2.DispatchBatch(
            epoch=grant.epoch,
            batch_id=batch.batch,
            plan_id=grant.plan_id,
            batch_rows=batch.rows,
            expected_after_ns=max(0, batch.finish_ns - now),
        )
        timed = zip(grant.hops, order.window.hops, batch.starts_ns, strict=True)
        for granted, hop, start_ns in timed:
            planned = dispatch.route.add()
            planned.CopyFrom(granted.hop)
            planned.reserved_start_ns += start_ns - hop.start_ns
            planned.reserved_duration_ns = hop.compute_ns[batch.rows - 1]
        row = 0
        for each in order.requests:
            pending = self._requests.get(each.request)
            sampled = pending is not None and pending.arrival.trace.sampled
            dispatch.slices.add(
                gateway_id=self._gateway_id,
                request_id=each.request,
                rows=each.rows,
                batch_row=row,
                traceparent=pending.arrival.trace.traceparent if pending and sampled else "",
            )
            row += each.rows
        return dispatch


def _window_of(
    grant: scheduler_pb2.GrantWindow, asked_ns: int, now_ns: int
) -> DispatchWindow | None:
    """Returns a granted window on this process's clock; None if it is over, or senseless."""
    hops = []
    for said in grant.hops:
        end_ns, start_ns = asked_ns + said.ends_after_ns, now_ns + said.begins_after_ns
        if not said.compute_ns or end_ns <= start_ns:
            return None
        if len(said.compute_ns) != len(grant.hops[0].compute_ns):
            return None
        if said.transfer_ns and len(said.transfer_ns) != len(said.compute_ns):
            return None
        hops.append(
            WindowHop(
                AgentId(said.hop.agent_id),
                _partition_of(said.hop),
                tuple(said.compute_ns),
                tuple(said.transfer_ns),
                start_ns,
                end_ns,
            )
        )
    if not hops:
        return None
    batches = (BatchId(grant.first_batch_id), grant.batches)
    model = hops[0].partition.model
    return DispatchWindow(BatchId(grant.window_id), model, tuple(hops), batches, grant.most_wait_ns)


def _partition_of(hop: common_pb2.Hop) -> PartitionKey:
    return PartitionKey(ModelKey(hop.model, hop.model_version), hop.first_block, hop.last_block)


def _report_of(use: WindowUse) -> _Message:
    message = _Message()
    report = message.window_report
    report.window_id = use.window
    report.number = use.number
    report.first_batch_id = use.first_batch
    report.rows.extend(use.rows)
    report.requests = use.requests
    report.renew = use.renew
    report.busy_ns.extend(use.busy_ns)
    return message
