"""The session plane behind every door that generates text."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from catenary_gateway.data_plane import Outbox
from catenary_gateway.generation.answer import Generation
from catenary_gateway.generation.record import finished_session
from catenary_gateway.generation.request import GenerationRequest
from catenary_gateway.generation.sessions.limits import SILENCE_NS, AnswerLimits, limits_of
from catenary_gateway.generation.sessions.progress import ProgressReports
from catenary_gateway.generation.sessions.rings import Rings, Surroundings
from catenary_gateway.generation.sessions.session import PendingSession
from catenary_gateway.inference import Arrival
from catenary_gateway.observability.bookkeeping import OK, Bookkeeping
from catenary_gateway.results.deadlines import Deadlines
from catenary_gateway.results.delivery import Links
from catenary_protos.catenary.v1 import frame_pb2, scheduler_pb2
from catenary_services.errors import (
    CatenaryError,
    DeadlineExceeded,
    Overloaded,
    RequestCancelled,
)
from catenary_services.grpc.error_tables import error_of

_Message = scheduler_pb2.GatewayMessage


@dataclass(frozen=True, slots=True)
class Pace:
    """How often one hears of answers, and for how long one may hear nothing."""

    progress_interval_ns: int = 100_000_000
    """Between two reports to the scheduler."""
    silence_ns: int = SILENCE_NS
    """Without a token, after which an answer is given up."""


class Watcher(Protocol):
    """Who wants to hear how a generation gets on."""

    def first_token(self) -> None:
        """It has a token; may be said again."""
        ...

    def ended(self, error: CatenaryError | None, prompt_tokens: int, answer_tokens: int) -> None:
        """It is over."""
        ...


class SessionPlane:
    """Keeps every unanswered generation, and sees each one to its end.

    Invariant: a session is in `_requests` exactly while it has not ended.
    """

    def __init__(
        self,
        gateway_id: str,
        outbox: Outbox,
        hub: Links,
        books: Bookkeeping,
        numbers: Iterator[int],
        pace: Pace | None = None,
    ) -> None:
        self.books = books
        self._outbox = outbox
        self._numbers = numbers
        self._pace = pace or Pace()
        self._requests: dict[int, PendingSession] = {}
        self._watchers: dict[int, Watcher] = {}
        self._deadlines = Deadlines(self._expired, self._requests)
        self._progress = ProgressReports(self._tell, self._pace.progress_interval_ns)
        self._rings = Rings(Surroundings(gateway_id, hub, books, self._tell), self._took)
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def unanswered(self) -> int:
        """Number of generations being worked on."""
        return len(self._requests)

    @property
    def running(self) -> int:
        """Those of them that have a chain."""
        return self._rings.running

    @property
    def dropped(self) -> int:
        """Tokens nobody waits for: late, twice, or of a session that goes on elsewhere."""
        return self._rings.dropped

    def waits_for(self, now_ns: int) -> list[scheduler_pb2.UnansweredRequest]:
        """Returns every unanswered generation and its starts, for the scheduler's audit."""
        return [session.waits_for(now_ns) for session in self._requests.values()]

    def request_id(self, number: int) -> str:
        """Returns the id of an unanswered generation by its number; empty if there is none."""
        session = self._requests.get(number)
        return session.request.id if session is not None else ""

    def session_id(self, request_id: str) -> int | None:
        """Returns the session that generates for a request now; None if none does."""
        for session in self._requests.values():
            if session.request.id == request_id and session.current is not None:
                return session.current.session_id
        return None

    def limits(self, request: GenerationRequest, arrival: Arrival) -> AnswerLimits:
        """Returns when a request is given up that gets no tokens, or no further ones."""
        return limits_of(request, arrival, self._pace.silence_ns)

    def open(
        self, request: GenerationRequest, arrival: Arrival, watcher: Watcher | None = None
    ) -> Generation:
        """Asks the scheduler for a chain; if it can, `watcher` hears of what becomes of it.

        Raises:
            DeadlineExceeded: the deadline passed while the request was read.
            Overloaded: the scheduler does not keep up.
        """
        limits = self.limits(request, arrival)
        session = PendingSession(next(self._numbers), request, arrival, limits)
        session.submitted_ns = time.monotonic_ns()
        try:
            if session.submitted_ns >= session.due_ns:
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
        if watcher is not None:
            self._watchers[session.number] = watcher
        self._idle.clear()
        self._deadlines.add(session.number, session.due_ns)
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
        if session is not None:
            self._rings.start(session, order)

    def reject(self, order: scheduler_pb2.RejectRequest) -> None:
        """Ends a generation the scheduler gave up."""
        session = self._requests.get(order.request_id)
        if session is None:
            return
        error = error_of(order.failure, retry_after_ns=order.retry_after_ns or None)
        if order.earliest_finish_after_ns:
            error.details["earliest_finish_ms"] = str(order.earliest_finish_after_ns // 1_000_000)
        self._end(session, error, "none")

    def tokens(self, header: frame_pb2.FrameHeader, sender: str = "") -> bool:
        """Takes the tokens of a frame, each if it is the next one of its request.

        Returns:
            False if `sender` is on none of the rings that some of them are to come from.
        """
        return self._rings.tokens(header, sender)

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
        await self._rings.close()

    def _took(self, session: PendingSession) -> None:
        self._progress.took(session)
        watcher = self._watchers.get(session.number)
        if watcher is not None:
            watcher.first_token()
        if session.finish_reason:
            self._end(session, None, "finished")

    def _expired(self, number: int) -> None:
        session = self._requests[number]
        now_ns = time.monotonic_ns()
        if now_ns < session.due_ns:  # tokens came since this was set
            self._deadlines.add(number, session.due_ns)
            return
        stage = "execute" if session.starts else "queue"
        what = session.limits.stage_at(now_ns, session.last_token_ns)
        error = DeadlineExceeded(
            f"{what} while the request was in stage '{stage}'", details={"stage": stage}
        )
        self._end(session, error, "cancel")

    def _end(self, session: PendingSession, error: CatenaryError | None, tell: str) -> None:
        """Ends a generation exactly once: complete, or with `error`."""
        if self._requests.pop(session.number, None) is None:
            return
        self._rings.leave(session)
        self._progress.ended(session)
        session.end(error)
        watcher = self._watchers.pop(session.number, None)
        if watcher is not None:
            own_tokens = len(session.generated) - session.continued
            watcher.ended(error, len(session.request.prompt), own_tokens)
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
        done = finished_session(session, outcome, time.monotonic_ns(), self.books.gateway_id)
        asyncio.get_running_loop().call_soon(self.books.finished, done, session.limits.whole_ns)

    def _tell(self, message: scheduler_pb2.GatewayMessage) -> None:
        try:
            self._outbox.send(message)
        except Overloaded:
            # A scheduler that does not read is about to be lost; the next one is told anew.
            return
