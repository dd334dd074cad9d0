"""The data plane behind every inference endpoint: it takes requests and returns arrays."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from typing import Protocol

from catenary_gateway.catalog import Catalog
from catenary_gateway.inference import (
    LONGEST_BUDGET_NS,
    InferenceRequest,
    InferenceResponse,
    RequestArrival,
    Tensor,
)
from catenary_gateway.observability.outcome_kinds import OK
from catenary_gateway.observability.outcomes import FinishedRequest
from catenary_gateway.observability.request_metrics import RequestMetrics
from catenary_gateway.results import delivery
from catenary_gateway.results.pending import BatchAttempt, Deadlines, PendingRequest
from catenary_gateway.results.results import ResultMerger
from catenary_gateway.results.window_dispatch import WindowCallbacks, WindowDispatcher
from catenary_protos.catenary.v1 import scheduler_pb2
from catenary_services.errors import (
    CatenaryError,
    DeadlineExceeded,
    InvalidInput,
    Overloaded,
    PartitionLost,
    RequestCancelled,
)
from catenary_services.grpc.error_tables import error_of, error_of_exception, failure_of

DEFAULT_SLO_NS = 30_000_000_000
"""Time to answer a request in nanoseconds, if neither the request nor its model names one."""

_Message = scheduler_pb2.GatewayMessage


class Outbox(Protocol):
    """The part of `SchedulerLink` that the two planes use."""

    def send(self, message: scheduler_pb2.GatewayMessage) -> None:
        """Queues a message for the scheduler; drops it while no scheduler is connected."""
        ...

    def send_soon(self, message: scheduler_pb2.GatewayMessage) -> None:
        """Queues a message that may wait a moment, because nobody waits for its effect."""
        ...


class DataPlane:
    """The registry of all unanswered requests, which sees each one to its end.

    Invariants: a request is in `_requests` exactly while its future is not done; an attempt is in
    `_attempts` exactly while one of its requests is in `_requests`.
    """

    def __init__(
        self,
        catalog: Catalog,
        outbox: Outbox,
        hub: delivery.LinkSource,
        request_metrics: RequestMetrics,
    ) -> None:
        self.catalog = catalog
        self.request_metrics = request_metrics
        self._outbox = outbox
        self._hub = hub
        self._requests: dict[int, PendingRequest] = {}
        self._attempts: dict[int, BatchAttempt] = {}
        self._deadlines = Deadlines(self._expired, self._requests)
        self._deliveries: set[asyncio.Task[None]] = set()
        self.numbers = itertools.count(1)
        """The series of request ids. Every submission to the scheduler takes its id from this
        series."""
        self._idle: asyncio.Future[None] | None = None
        """The end of the last request, for those who wait in `idle`; None while nobody does."""
        self.results = ResultMerger(self._requests, self._attempts, self._complete, self._fail)
        self.windows = WindowDispatcher(
            request_metrics.gateway_id,
            self._requests,
            hub,
            WindowCallbacks(self.dispatch, self._hand_over, self._tell),
        )
        self.results.of_window = self.windows
        self.results.on_refused = request_metrics.metrics.frames_refused.labels(
            "unplanned_sender"
        ).inc

    @property
    def unanswered(self) -> int:
        """Number of requests that have no answer yet."""
        return len(self._requests)

    def waits_for(self, now_ns: int) -> list[scheduler_pb2.UnansweredRequest]:
        """Returns every unanswered request that a scheduler knows, for its audit."""
        return [
            scheduler_pb2.UnansweredRequest(request_id=number)
            for number, pending in self._requests.items()
            if not pending.by_window
        ]

    async def infer(self, request: InferenceRequest, arrival: RequestArrival) -> InferenceResponse:
        """Computes the answer to a checked request.

        Raises:
            CatenaryError: The reason why there is no answer; raised at the deadline at the latest.
        """
        try:
            pending = self._submit(request, arrival)
        except CatenaryError as error:
            self.request_metrics.refused(request.model.label, error.reason)
            raise
        try:
            outputs = await pending.future
        except asyncio.CancelledError:
            self._end(pending, RequestCancelled("the client went away"), "cancel")
            raise
        return InferenceResponse(request.model, request.id, outputs)

    def connected(self, mine: Callable[[int], bool] | None = None) -> None:
        """Submits every unfinished request to a new scheduler.

        Args:
            mine: Says by its number whether a request belongs to that scheduler; None: all do.
        """
        now_ns = time.monotonic_ns()
        by_window = set(self.windows.clear())  # granted by a scheduler that may be gone
        for pending in list(self._requests.values()):
            if mine is None or pending.number in by_window or mine(pending.number):
                pending.by_window = False
                self._outbox.send(pending.submission(now_ns))

    def resubmission(self, number: int) -> scheduler_pb2.GatewayMessage | None:
        """Returns the message that submits a request to another scheduler.

        None if the request has ended, or if rows of it are in a batch already.
        """
        pending = self._requests.get(number)
        if pending is None or pending.attempts or pending.by_window:
            return None
        return pending.submission(time.monotonic_ns())

    def dispatch(self, order: scheduler_pb2.DispatchBatch, window: int = 0) -> None:
        """Sends the rows of a batch, as the scheduler orders or as a window (its id) allows."""
        now_ns = time.monotonic_ns()
        attempt = BatchAttempt(
            batch_id=order.batch_id,
            batch_rows=order.batch_rows,
            slices=delivery.slices_of(order),
            dispatched_ns=now_ns,
            expected_ns=now_ns + order.expected_after_ns,
            agents=tuple(hop.agent_id for hop in order.route),
            window=window,
        )
        for number in {piece.request_id for piece in attempt.slices}:
            pending = self._requests.get(number)
            if pending is None:
                continue
            attempt.waiting += 1
            if window:
                self.request_metrics.sent_by_window(pending.request.model.label)
            earlier = pending.attempts
            if earlier and earlier[-1].failed:
                self.request_metrics.metrics.redispatches.labels(earlier[-1].failed).inc()
            earlier.append(attempt)
        if attempt.waiting:
            self._attempts[attempt.batch_id] = attempt
        self._deliver(attempt, order)

    def revoke_window(self, order: scheduler_pb2.RevokeWindow) -> None:
        """Ends a window that the scheduler revokes, perhaps because its batches are lost."""
        for attempt in self._attempts.values() if order.lost else ():
            if attempt.window == order.window_id and not attempt.result_ns:
                attempt.failed = PartitionLost.reason
        self.windows.revoked(order)

    def reject(self, order: scheduler_pb2.RejectRequest) -> None:
        """Ends a request that the scheduler has given up."""
        pending = self._requests.get(order.request_id)
        if pending is None:
            return
        error = error_of(order.failure, retry_after_ns=order.retry_after_ns or None)
        if order.earliest_finish_after_ns:
            error.details["earliest_finish_ms"] = str(order.earliest_finish_after_ns // 1_000_000)
        self._end(pending, error, "none")

    async def idle(self, timeout_s: float) -> bool:
        """Waits until no request is unanswered; returns False after a timeout."""
        if not self._requests:
            return True
        if self._idle is None:
            self._idle = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(self._idle)  # others may be waiting for it, too
        except TimeoutError:
            return False
        return True

    async def close(self, error: CatenaryError) -> None:
        """Ends every unanswered request with `error`."""
        for pending in list(self._requests.values()):
            self._end(pending, error, "cancel")
        self._deadlines.close()
        self.windows.close()
        deliveries = list(self._deliveries)
        for task in deliveries:
            task.cancel()
        await asyncio.gather(*deliveries, return_exceptions=True)

    def _submit(self, request: InferenceRequest, arrival: RequestArrival) -> PendingRequest:
        deadline_ns = arrival.monotonic_ns + budget_of(request, arrival)
        number = next(self.numbers)
        future: asyncio.Future[tuple[Tensor, ...]] = asyncio.get_running_loop().create_future()
        pending = PendingRequest(number, request, arrival, deadline_ns, future)
        pending.submitted_ns = time.monotonic_ns()
        if pending.submitted_ns >= deadline_ns:
            raise DeadlineExceeded(
                "the deadline passed while the request was read", details={"stage": "arrival"}
            )
        if self.windows.grants:
            pending.by_window = self.windows.take(pending)
        if not pending.by_window:
            # Sending may raise Overloaded, so the request is registered only after it.
            self._outbox.send(pending.submission(pending.submitted_ns))
        self._requests[number] = pending
        self._deadlines.add(number, deadline_ns)
        return pending

    def _deliver(self, attempt: BatchAttempt, order: scheduler_pb2.DispatchBatch) -> None:
        """Sends the rows of a batch, by a task of its own only if that has to wait."""
        try:
            if not order.route or not order.slices:
                raise InvalidInput("route", "an order needs a route and slices")
            rest = delivery.deliver(attempt, order, self._requests, self._hub)
        except Exception as exc:
            self._not_delivered(attempt, order, exc)
            return
        if rest is not None:
            task = asyncio.get_running_loop().create_task(self._go_on(attempt, order, rest))
            self._deliveries.add(task)
            task.add_done_callback(self._deliveries.discard)

    async def _go_on(
        self, attempt: BatchAttempt, order: scheduler_pb2.DispatchBatch, rest: delivery.Rest
    ) -> None:
        try:
            await rest
        except Exception as exc:
            self._not_delivered(attempt, order, exc)

    def _not_delivered(
        self, attempt: BatchAttempt, order: scheduler_pb2.DispatchBatch, exc: Exception
    ) -> None:
        """Tells the scheduler that the rows of a batch cannot be sent."""
        error = error_of_exception(exc)
        attempt.failed = error.reason
        if attempt.window:
            self.windows.failed(attempt.batch_id)
            return
        # Rows that do not fit together, and our own bugs, fail again on any other chain.
        retryable = not isinstance(error, InvalidInput) and error.reason != "INTERNAL"
        is_ours = isinstance(error, RequestCancelled) or not order.route
        agent_id = "" if is_ours else order.route[0].agent_id
        self._tell(
            _Message(
                delivery_failed=scheduler_pb2.DeliveryFailed(
                    batch_id=order.batch_id,
                    failure=failure_of(error, agent_id, retryable=retryable),
                )
            )
        )

    def _hand_over(self, number: int) -> None:
        """Submits a request that went by a window, or was to, and has no answer."""
        pending = self._requests.get(number)
        if pending is not None and pending.by_window:
            pending.by_window = False
            self._tell(pending.submission(time.monotonic_ns()))

    def _expired(self, number: int) -> None:
        pending = self._requests[number]
        stage = "execute" if pending.attempts else "queue"
        error = DeadlineExceeded(
            f"the deadline passed while the request was in stage '{stage}'",
            details={"stage": stage},
        )
        self._end(pending, error, "cancel")

    def _complete(self, pending: PendingRequest) -> None:
        self._end(pending, None, "finished")

    def _fail(self, pending: PendingRequest, error: CatenaryError) -> None:
        self._end(pending, error_of_exception(error), "finished")

    def _end(self, pending: PendingRequest, error: CatenaryError | None, tell: str) -> None:
        """Ends a request exactly once: with its outputs if `error` is None, else with `error`.

        `tell` is what the scheduler hears: "finished", "cancel" or "none".
        """
        if self._requests.pop(pending.number, None) is None:
            return
        for attempt in pending.attempts:
            attempt.waiting -= 1
            if attempt.waiting == 0:
                self._attempts.pop(attempt.batch_id, None)
        if not pending.future.done():
            if error is None:
                pending.future.set_result(pending.answer())
            else:
                pending.future.set_exception(error)
        if pending.by_window:
            self.windows.withdraw(pending)  # no scheduler knows it
        elif tell == "finished":
            message = _Message()
            message.finished.request_id = pending.number
            self._outbox.send_soon(message)
        elif tell == "cancel":
            cancel = scheduler_pb2.CancelRequest(request_id=pending.number)
            self._tell(_Message(cancel=cancel))
        if self._idle is not None and not self._requests:
            self._idle.set_result(None)
            self._idle = None
        # Metrics and traces are written after the answer, so that they do not delay it.
        outcome = OK if error is None else error.reason
        done = FinishedRequest.of(pending, outcome, time.monotonic_ns())
        loop = asyncio.get_running_loop()
        loop.call_soon(self.request_metrics.finished, done, pending.deadline_ns)

    def _tell(self, message: scheduler_pb2.GatewayMessage) -> None:
        try:
            self._outbox.send(message)
        except Overloaded:
            # A scheduler that does not read is about to be lost; `connected` tells the next one.
            return


def budget_of(request: InferenceRequest, arrival: RequestArrival) -> int:
    """Returns the nanoseconds, from its arrival, in which a request is to be answered."""
    slo_ns = request.options.slo_ns
    if arrival.budget_ns is not None:
        slo_ns = arrival.budget_ns if slo_ns is None else min(slo_ns, arrival.budget_ns)
    if slo_ns is None:
        slo_ns = request.model.default_slo_ns or DEFAULT_SLO_NS
    return min(slo_ns, LONGEST_BUDGET_NS)
