"""The session plane behind every door that generates text."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator

from catenary_protos.catenary.v1 import common_pb2, frame_pb2, scheduler_pb2
from gateway.bookkeeping import OK, Bookkeeping
from gateway.data_plane import LONGEST_BUDGET_NS, Outbox
from gateway.deadlines import Deadlines
from gateway.delivery import Links
from gateway.generation.answer import Generation
from gateway.generation.opening import open_session
from gateway.generation.progress import ProgressReports
from gateway.generation.record import finished_session
from gateway.generation.request import GenerationRequest
from gateway.generation.session import PendingSession, Start
from gateway.inference import Arrival
from services.error_tables import error_of, error_of_exception, failure_of
from services.errors import (
    CatenaryError,
    DeadlineExceeded,
    InvalidInput,
    Overloaded,
    PartitionLost,
    RequestCancelled,
)

DEFAULT_DEADLINE_NS = 300_000_000_000
"""For models that name none."""
PROGRESS_INTERVAL_NS = 100_000_000

_Message = scheduler_pb2.GatewayMessage


class SessionPlane:
    """Keeps every unanswered generation, and sees each one to its end.

    Invariants: a session is in `_requests` exactly while it has not ended; `_sessions` has exactly
    the current starts of those. Tokens of any other session id are nobody's.
    """

    def __init__(
        self, gateway_id: str, outbox: Outbox, hub: Links, books: Bookkeeping,
        numbers: Iterator[int], progress_interval_ns: int = PROGRESS_INTERVAL_NS,
    ) -> None:  # fmt: skip
        self.books = books
        self.dropped = 0
        """Tokens nobody waits for: late, twice, or of a session that goes on elsewhere."""
        self._gateway_id = gateway_id
        self._outbox = outbox
        self._hub = hub
        self._numbers = numbers
        self._requests: dict[int, PendingSession] = {}
        self._sessions: dict[int, PendingSession] = {}
        self._deadlines = Deadlines(self._expired, self._requests)
        self._progress = ProgressReports(self._tell, progress_interval_ns)
        self._deliveries: dict[int, asyncio.Task[None]] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def unanswered(self) -> int:
        """Number of generations being worked on."""
        return len(self._requests)

    @property
    def running(self) -> int:
        """Those of them that have a chain."""
        return len(self._sessions)

    def open(self, request: GenerationRequest, arrival: Arrival) -> Generation:
        """Asks the scheduler for a chain.

        Raises:
            DeadlineExceeded: the deadline passed while the request was read.
            Overloaded: the scheduler does not keep up.
        """
        deadline_ns = arrival.monotonic_ns + _budget_ns(request, arrival)
        session = PendingSession(next(self._numbers), request, arrival, deadline_ns)
        session.submitted_ns = time.monotonic_ns()
        try:
            if session.submitted_ns >= deadline_ns:
                raise DeadlineExceeded(
                    "the deadline passed while the request was read", details={"stage": "arrival"}
                )
            # May refuse; only then is there anything to undo, so nothing is kept before.
            submission = session.submission(session.submitted_ns)
            self._outbox.send(_Message(submit_session=submission))
        except CatenaryError as error:
            self.books.refused(request.model.label, error.reason)
            raise
        self._requests[session.number] = session
        self._idle.clear()
        self._deadlines.add(session.number, deadline_ns)
        return Generation(session, self.give_up)

    def give_up(self, session: PendingSession) -> None:
        """Ends a generation nobody reads any more; nothing happens if it has ended."""
        self._end(session, RequestCancelled("the client went away"), "cancel")

    def connected(self, mine: Callable[[int], bool] | None = None) -> None:
        """Tells a new scheduler of every unfinished generation and where it goes on.

        Args:
            mine: Says by its number whether a generation is that scheduler's; None: all are.
        """
        now_ns = time.monotonic_ns()
        for session in list(self._requests.values()):
            if mine is None or mine(session.number):
                self._outbox.send(_Message(submit_session=session.submission(now_ns)))

    def resubmission(self, number: int) -> scheduler_pb2.GatewayMessage | None:
        """Returns what another scheduler is told of a generation that was not started yet."""
        session = self._requests.get(number)
        if session is None or session.starts:
            return None
        return _Message(submit_session=session.submission(time.monotonic_ns()))

    def start(self, order: scheduler_pb2.StartSession) -> None:
        """Carries out the scheduler's order to open a session; again: somewhere else."""
        session = self._requests.get(order.request_id)
        if session is None or order.session_id in self._sessions:
            return
        if session.starts:
            reason = session.starts[-1].failed or PartitionLost.reason
            self.books.metrics.redispatches.labels(reason).inc()
        self._leave(session)
        now_ns = time.monotonic_ns()
        start = Start(order.session_id, order, now_ns, len(session.generated))
        session.starts.append(start)
        session.current = start
        self._sessions[order.session_id] = session
        task = asyncio.create_task(self._deliver(session, start))
        self._deliveries[order.session_id] = task
        task.add_done_callback(lambda _: self._deliveries.pop(order.session_id, None))

    def reject(self, order: scheduler_pb2.RejectRequest) -> None:
        """Ends a generation the scheduler gave up."""
        session = self._requests.get(order.request_id)
        if session is None:
            return
        error = error_of(order.failure, retry_after_ns=order.retry_after_ns or None)
        if order.earliest_finish_after_ns:
            error.details["earliest_finish_ms"] = str(order.earliest_finish_after_ns // 1_000_000)
        self._end(session, error, "none")

    def tokens(self, header: frame_pb2.FrameHeader) -> None:
        """Takes the tokens of a frame, each if it is the next one of a current session."""
        now_ns = time.monotonic_ns()
        for token in header.session_tokens:
            session = self._sessions.get(token.session_id)
            if session is None or token.position < session.next_position:
                self.dropped += 1
            elif token.HasField("failure"):
                self._failed(session, token.failure)
            elif session.is_early(token):
                # The ring of the prompt sends the first token, another ring the second.
                continue
            elif token.position > session.next_position:
                # Links keep their order, so one between was lost, and no later one can be believed.
                lost = PartitionLost(f"the token at {session.next_position} was lost")
                self._failed(session, failure_of(lost, retryable=True))
            else:
                self._take(session, token, now_ns)
                while (following := session.early_token()) is not None:
                    self._take(session, following, now_ns)

    async def idle(self, timeout_s: float) -> bool:
        """Waits until no generation is unanswered; False if some still were at the end."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def close(self, error: CatenaryError) -> None:
        """Ends everything unanswered with `error`."""
        for session in list(self._requests.values()):
            self._end(session, error, "cancel")
        self._deadlines.close()
        self._progress.close()
        deliveries = list(self._deliveries.values())
        await asyncio.gather(*deliveries, return_exceptions=True)

    def _take(self, session: PendingSession, token: frame_pb2.SessionToken, now_ns: int) -> None:
        previous_ns = session.last_token_ns
        session.take(token, now_ns)
        self._progress.took(session)
        if previous_ns:
            self.books.token_after(session.request.model.label, now_ns - previous_ns)
        if session.finish_reason:
            self._end(session, None, "finished")

    async def _deliver(self, session: PendingSession, start: Start) -> None:
        try:
            if not start.order.route:
                raise InvalidInput("route", "an order needs a route")
            await open_session(session, start, self._gateway_id, self._hub)
        except Exception as exc:
            if session.current is not start:
                return
            error = error_of_exception(exc)
            # What does not fit and our bugs fail again; all else may work elsewhere.
            retryable = not isinstance(error, InvalidInput) and error.reason != "INTERNAL"
            # No agent failed: whom this gateway could not reach, the scheduler knows by the route.
            self._failed(session, failure_of(error, retryable=retryable))

    def _failed(self, session: PendingSession, failure: common_pb2.Failure) -> None:
        """Leaves the current session; the scheduler decides whether there is another."""
        assert session.current is not None
        start = session.current
        start.failed = failure.reason or PartitionLost.reason
        self._leave(session)
        report = scheduler_pb2.SessionFailed(session_id=start.session_id, failure=failure)
        self._tell(_Message(session_failed=report))

    def _leave(self, session: PendingSession) -> None:
        if session.current is None:
            return
        session_id = session.current.session_id
        session.current = None
        self._sessions.pop(session_id, None)
        delivery = self._deliveries.get(session_id)
        if delivery is not None and delivery is not asyncio.current_task():
            # A frame is sent whole or never, so this harms nobody else's.
            delivery.cancel()

    def _expired(self, number: int) -> None:
        session = self._requests[number]
        stage = "execute" if session.starts else "queue"
        error = DeadlineExceeded(
            f"the deadline passed while the request was in stage '{stage}'",
            details={"stage": stage},
        )
        self._end(session, error, "cancel")

    def _end(self, session: PendingSession, error: CatenaryError | None, tell: str) -> None:
        """Ends a generation exactly once: complete, or with `error`."""
        if self._requests.pop(session.number, None) is None:
            return
        self._leave(session)
        self._progress.ended(session)
        session.end(error)
        # At once: a free slot is what the head of the scheduler's queue waits for.
        if tell == "finished":
            finished = scheduler_pb2.RequestFinished(
                request_id=session.number, progress=session.progress()
            )
            self._tell(_Message(finished=finished))
        elif tell == "cancel":
            self._tell(_Message(cancel=scheduler_pb2.CancelRequest(request_id=session.number)))
        if not self._requests:
            self._idle.set()
        outcome = OK if error is None else error.reason
        done = finished_session(session, outcome, time.monotonic_ns())
        asyncio.get_running_loop().call_soon(self.books.finished, done, session.deadline_ns)

    def _tell(self, message: scheduler_pb2.GatewayMessage) -> None:
        try:
            self._outbox.send(message)
        except Overloaded:
            # A scheduler that does not read is about to be lost; the next one is told anew.
            return


def _budget_ns(request: GenerationRequest, arrival: Arrival) -> int:
    """Returns the time for the whole answer: the least of what was said, else the default."""
    said = [ns for ns in (request.terms.deadline_ns, arrival.budget_ns) if ns is not None]
    default_ns = request.model.default_slo_ns or DEFAULT_DEADLINE_NS
    return min(*said, LONGEST_BUDGET_NS) if said else min(default_ns, LONGEST_BUDGET_NS)
