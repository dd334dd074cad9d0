"""The one data plane behind every door: requests in, arrays out."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from typing import Protocol

from catenary_gateway.catalog import Catalog
from catenary_gateway.inference import (
    LONGEST_BUDGET_NS,
    Arrival,
    InferenceRequest,
    InferenceResponse,
    Tensor,
)
from catenary_gateway.observability.bookkeeping import OK, Bookkeeping
from catenary_gateway.observability.recent_requests import FinishedRequest
from catenary_gateway.results import delivery
from catenary_gateway.results.deadlines import Deadlines
from catenary_gateway.results.pending import Attempt, PendingRequest
from catenary_gateway.results.results import ResultMerger
from catenary_protos.catenary.v1 import scheduler_pb2
from catenary_services.errors import (
    CatenaryError,
    DeadlineExceeded,
    InvalidInput,
    Overloaded,
    RequestCancelled,
)
from catenary_services.grpc.error_tables import error_of, error_of_exception, failure_of
from catenary_services.transport.interface import ReceivedFrame

DEFAULT_SLO_NS = 30_000_000_000
"""For models that name none."""

_Message = scheduler_pb2.GatewayMessage


class Outbox(Protocol):
    """What is needed of `SchedulerLink`."""

    def send(self, message: scheduler_pb2.GatewayMessage) -> None:
        """Queues a message for the scheduler; dropped while there is none."""
        ...

    def send_soon(self, message: scheduler_pb2.GatewayMessage) -> None:
        """The same for a message nobody waits for."""
        ...


class DataPlane:
    """Keeps every unanswered request, and sees each one to its end.

    Invariants: a request is in `_requests` exactly while its future is not done; an attempt is in
    `_attempts` while one of its requests is.
    """

    def __init__(
        self, catalog: Catalog, outbox: Outbox, hub: delivery.Links, books: Bookkeeping
    ) -> None:
        self.catalog = catalog
        self.books = books
        self._outbox = outbox
        self._hub = hub
        self._requests: dict[int, PendingRequest] = {}
        self._attempts: dict[int, Attempt] = {}
        self._deadlines = Deadlines(self._expired, self._requests)
        self._deliveries: set[asyncio.Task[None]] = set()
        self.numbers = itertools.count(1)
        """Request ids; whoever else submits to the scheduler takes from the same series."""
        self._idle = asyncio.Event()
        self._idle.set()
        self.results = ResultMerger(self._requests, self._attempts, self._complete, self._fail)
        self.results.on_refused = books.metrics.frames_refused.labels("unplanned_sender").inc

    @property
    def unanswered(self) -> int:
        """Number of requests being worked on."""
        return len(self._requests)

    def waits_for(self, now_ns: int) -> list[scheduler_pb2.UnansweredRequest]:
        """Returns every unanswered request, for the scheduler's audit."""
        return [scheduler_pb2.UnansweredRequest(request_id=number) for number in self._requests]

    async def infer(self, request: InferenceRequest, arrival: Arrival) -> InferenceResponse:
        """Returns the answer to a checked request.

        Raises:
            CatenaryError: whatever kept it from being answered, at the latest at its deadline.
        """
        try:
            pending = self._submit(request, arrival)
        except CatenaryError as error:
            self.books.refused(request.model.label, error.reason)
            raise
        try:
            outputs = await pending.future
        except asyncio.CancelledError:
            self._end(pending, RequestCancelled("the client went away"), "cancel")
            raise
        return InferenceResponse(request.model, request.id, outputs)

    def connected(self, mine: Callable[[int], bool] | None = None) -> None:
        """Tells a new scheduler of every unfinished request; of those `mine` names if given."""
        now_ns = time.monotonic_ns()
        for pending in list(self._requests.values()):
            if mine is None or mine(pending.number):
                self._outbox.send(_Message(submit=pending.submission(now_ns)))

    def resubmission(self, number: int) -> scheduler_pb2.GatewayMessage | None:
        """Returns what another scheduler is told of a request that no batch was made for yet."""
        pending = self._requests.get(number)
        if pending is None or pending.attempts:
            return None
        return _Message(submit=pending.submission(time.monotonic_ns()))

    def dispatch(self, order: scheduler_pb2.DispatchBatch) -> None:
        """Carries out the scheduler's order to send rows."""
        now_ns = time.monotonic_ns()
        attempt = Attempt(
            batch_id=order.batch_id,
            batch_rows=order.batch_rows,
            slices=delivery.slices_of(order),
            dispatched_ns=now_ns,
            expected_ns=now_ns + order.expected_after_ns,
            agents=tuple(hop.agent_id for hop in order.route),
        )
        numbers = {piece.request_id for piece in attempt.slices} & self._requests.keys()
        attempt.waiting = len(numbers)
        for number in numbers:
            pending = self._requests[number]
            pending.attempts.append(attempt)
            if len(pending.attempts) > 1 and pending.attempts[-2].failed:
                self.books.metrics.redispatches.labels(pending.attempts[-2].failed).inc()
        if numbers:
            self._attempts[attempt.batch_id] = attempt
        task = asyncio.create_task(self._deliver(attempt, order))
        self._deliveries.add(task)
        task.add_done_callback(self._deliveries.discard)

    def reject(self, order: scheduler_pb2.RejectRequest) -> None:
        """Ends a request the scheduler gave up."""
        pending = self._requests.get(order.request_id)
        if pending is None:
            return
        error = error_of(order.failure, retry_after_ns=order.retry_after_ns or None)
        if order.earliest_finish_after_ns:
            error.details["earliest_finish_ms"] = str(order.earliest_finish_after_ns // 1_000_000)
        self._end(pending, error, "none")

    def frame(self, frame: ReceivedFrame) -> None:
        """Takes a frame from an agent."""
        self.results.take(frame)

    async def idle(self, timeout_s: float) -> bool:
        """Waits until no request is unanswered; False if some still were at the end."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def close(self, error: CatenaryError) -> None:
        """Ends everything unanswered with `error`."""
        for pending in list(self._requests.values()):
            self._end(pending, error, "cancel")
        self._deadlines.close()
        deliveries = list(self._deliveries)
        for task in deliveries:
            task.cancel()
        await asyncio.gather(*deliveries, return_exceptions=True)

    def _submit(self, request: InferenceRequest, arrival: Arrival) -> PendingRequest:
        deadline_ns = arrival.monotonic_ns + budget_of(request, arrival)
        number = next(self.numbers)
        future: asyncio.Future[tuple[Tensor, ...]] = asyncio.get_running_loop().create_future()
        pending = PendingRequest(number, request, arrival, deadline_ns, future)
        pending.submitted_ns = time.monotonic_ns()
        if pending.submitted_ns >= deadline_ns:
            raise DeadlineExceeded(
                "the deadline passed while the request was read", details={"stage": "arrival"}
            )
        # May refuse; only then is there anything to undo, so nothing is kept before.
        self._outbox.send(_Message(submit=pending.submission(pending.submitted_ns)))
        self._requests[number] = pending
        self._idle.clear()
        self._deadlines.add(number, deadline_ns)
        return pending

    async def _deliver(self, attempt: Attempt, order: scheduler_pb2.DispatchBatch) -> None:
        try:
            if not order.route or not order.slices:
                raise InvalidInput("route", "an order needs a route and slices")
            await delivery.deliver(attempt, order, self._requests, self._hub)
        except Exception as exc:
            error = error_of_exception(exc)
            attempt.failed = error.reason
            # Rows that do not fit together and our bugs fail again; all else may work elsewhere.
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
        """Ends a request exactly once: with its outputs, or with `error`."""
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
        if tell == "finished":
            finished = scheduler_pb2.RequestFinished(request_id=pending.number)
            self._outbox.send_soon(_Message(finished=finished))
        elif tell == "cancel":
            cancel = scheduler_pb2.CancelRequest(request_id=pending.number)
            self._tell(_Message(cancel=cancel))
        if not self._requests:
            self._idle.set()
        # Counting and tracing wait until the answer is on its way.
        outcome = OK if error is None else error.reason
        done = FinishedRequest.of(pending, outcome, time.monotonic_ns())
        loop = asyncio.get_running_loop()
        loop.call_soon(self.books.finished, done, pending.deadline_ns)

    def _tell(self, message: scheduler_pb2.GatewayMessage) -> None:
        try:
            self._outbox.send(message)
        except Overloaded:
            # A scheduler that does not read is about to be lost; the next one is told anew.
            return


def budget_of(request: InferenceRequest, arrival: Arrival) -> int:
    """Returns the time from its arrival in which a request wants its answer, in nanoseconds."""
    slo_ns = request.terms.slo_ns
    if arrival.budget_ns is not None:
        slo_ns = arrival.budget_ns if slo_ns is None else min(slo_ns, arrival.budget_ns)
    if slo_ns is None:
        slo_ns = request.model.default_slo_ns or DEFAULT_SLO_NS
    return min(slo_ns, LONGEST_BUDGET_NS)
