"""The session plane, which serves every endpoint that generates text."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from catenary_gateway.data_plane import Outbox
from catenary_gateway.generation.record import chain_changes, finished_session, objectives_report
from catenary_gateway.generation.request import (
    SILENCE_NS,
    AnswerChunk,
    AnswerLimits,
    GenerationRequest,
    limits_of,
)
from catenary_gateway.generation.sessions.active_starts import ActiveStarts, StartDeps
from catenary_gateway.generation.sessions.session import PendingSession
from catenary_gateway.inference import RequestArrival
from catenary_gateway.observability.generations import ChainChange, ObjectivesReport
from catenary_gateway.observability.outcome_kinds import OK
from catenary_gateway.observability.request_metrics import RequestMetrics
from catenary_gateway.results.delivery import LinkSource
from catenary_gateway.results.pending import Deadlines
from catenary_protos.catenary.v1 import frame_pb2, scheduler_pb2
from catenary_services.domain.logprobs import TokenLogprobs
from catenary_services.errors import (
    CatenaryError,
    DeadlineExceeded,
    Overloaded,
    RequestCancelled,
)
from catenary_services.grpc.error_tables import error_of

Tell = Callable[[scheduler_pb2.GatewayMessage], None]
_Message = scheduler_pb2.GatewayMessage


class GenerationStream:
    """One generated answer as its endpoint reads it; leaving it early gives the answer up.

    It is a context manager around the loop that reads the answer.
    """

    def __init__(self, session: PendingSession, give_up: Callable[[PendingSession], None]) -> None:
        self.session = session
        self._give_up = give_up

    async def next(self) -> AnswerChunk | None:
        """Returns all text that is ready, after waiting for some; None after the last piece.

        Raises:
            CatenaryError: The reason why the answer is incomplete. All text that was generated
                before is returned first.
        """
        return await self.session.read()

    @property
    def request(self) -> GenerationRequest:
        """The request that is answered."""
        return self.session.request

    @property
    def prompt_tokens(self) -> int:
        return len(self.session.request.prompt)

    @property
    def cached_tokens(self) -> int:
        """Number of tokens of the prompt that were not computed: sessions before had cached them.

        0 until the first token of the answer is there.
        """
        return self.session.cached_prompt_tokens

    @property
    def prompt_logprobs(self) -> Sequence[TokenLogprobs]:
        """Log probabilities of all tokens of the prompt but the first, if they were asked for.

        They are complete when the first token of the answer is there, and empty in an answer that
        goes on after another gateway's.
        """
        return self.session.prompt_logprobs

    @property
    def completion_tokens(self) -> int:
        """Number of tokens generated so far, an end-of-text token included."""
        return len(self.session.generated)

    @property
    def stop_text(self) -> str:
        """The stop text at which the answer ended; empty if it ended, or goes on, otherwise."""
        return self.session.text.stop_text

    @property
    def objectives(self) -> ObjectivesReport:
        """Times of the answer so far, beside its objectives and predictions."""
        return objectives_report(self.session)

    @property
    def chain_changes(self) -> tuple[ChainChange, ...]:
        """The changes from one chain to another so far, in order."""
        return chain_changes(self.session)

    def __enter__(self) -> GenerationStream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._give_up(self.session)


class ProgressReporter:
    """A reporter of the sessions that got tokens since the last report.

    Its timer runs only while there is such a session.
    """

    def __init__(self, tell: Tell, interval_ns: int) -> None:
        self._tell = tell
        self._interval_s = interval_ns / 1e9
        self._progressed: dict[int, PendingSession] = {}
        self._timer: asyncio.TimerHandle | None = None

    def took(self, session: PendingSession) -> None:
        """Notes that a session has a new token; called for each one."""
        self._progressed[session.number] = session
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._interval_s, self._report)

    def ended(self, session: PendingSession) -> None:
        """Forgets a session that has ended, because the message of its end says how far it came."""
        self._progressed.pop(session.number, None)

    def close(self) -> None:
        """Cancels the next report."""
        self._progressed.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _report(self) -> None:
        self._timer = None
        if not self._progressed:
            return
        sessions = [session.progress() for session in self._progressed.values()]
        self._progressed.clear()
        report = scheduler_pb2.SessionsProgressed(sessions=sessions)
        self._tell(scheduler_pb2.GatewayMessage(sessions_progressed=report))


@dataclass(frozen=True, slots=True)
class GenerationIntervals:
    """Intervals of the session plane, in nanoseconds."""

    progress_interval_ns: int = 100_000_000
    """Time between two progress reports to the scheduler."""
    silence_ns: int = SILENCE_NS
    """Time without a further token after which an answer is given up."""


class GenerationObserver(Protocol):
    """Callbacks for the progress of one generation."""

    def first_token(self) -> None:
        """Called for every token of the generation."""
        ...

    def ended(self, error: CatenaryError | None, prompt_tokens: int, answer_tokens: int) -> None:
        """Called once when the generation ends; `error` is None if it is complete."""
        ...


class SessionPlane:
    """The registry of all unanswered generations, which sees each one to its end.

    Invariant: a session is in `_requests` exactly until it ends.
    """

    def __init__(
        self,
        gateway_id: str,
        outbox: Outbox,
        hub: LinkSource,
        request_metrics: RequestMetrics,
        numbers: Iterator[int],
        pace: GenerationIntervals | None = None,
    ) -> None:
        self.request_metrics = request_metrics
        self._outbox = outbox
        self._numbers = numbers
        self._pace = pace or GenerationIntervals()
        self._requests: dict[int, PendingSession] = {}
        self._watchers: dict[int, GenerationObserver] = {}
        self._deadlines = Deadlines(self._expired, self._requests)
        self._progress = ProgressReporter(self._tell, self._pace.progress_interval_ns)
        self._starts = ActiveStarts(
            StartDeps(gateway_id, hub, request_metrics, self._tell), self._took
        )
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def unanswered(self) -> int:
        """Number of generations that have not ended."""
        return len(self._requests)

    @property
    def running(self) -> int:
        """Number of generations that have a chain."""
        return self._starts.running

    @property
    def dropped(self) -> int:
        """Number of tokens that were late, duplicates, or of a session that was replaced."""
        return self._starts.dropped

    def waits_for(self, now_ns: int) -> list[scheduler_pb2.UnansweredRequest]:
        """Returns every unanswered generation with its starts, for the scheduler's audit."""
        return [session.waits_for(now_ns) for session in self._requests.values()]

    def request_id(self, number: int) -> str:
        """Returns the id of an unanswered generation by its number; empty if there is none."""
        session = self._requests.get(number)
        return session.request.id if session is not None else ""

    def number_of(self, request_id: str) -> int | None:
        """Returns the number of an unanswered generation by its id; None if there is none."""
        for number, session in self._requests.items():
            if session.request.id == request_id:
                return number
        return None

    def session_id(self, request_id: str) -> int | None:
        """Returns the id of the session that generates for a request; None if none does."""
        for session in self._requests.values():
            if session.request.id == request_id and session.current is not None:
                return session.current.session_id
        return None

    def limits(self, request: GenerationRequest, arrival: RequestArrival) -> AnswerLimits:
        """Returns the time limits of a request's answer."""
        return limits_of(request, arrival, self._pace.silence_ns)

    def open(
        self,
        request: GenerationRequest,
        arrival: RequestArrival,
        observer: GenerationObserver | None = None,
        shares_prompt_of: GenerationStream | None = None,
    ) -> GenerationStream:
        """Asks the scheduler for a chain, and returns the stream of the answer.

        Args:
            request: The request.
            arrival: When it came.
            observer: Told of the answer's progress.
            shares_prompt_of: Another answer to the same prompt. On the same chain, the prompt is
                computed once for both.

        Raises:
            DeadlineExceeded: The deadline passed while the request was read.
            Overloaded: The scheduler does not read fast enough.
        """
        limits = self.limits(request, arrival)
        other = shares_prompt_of.session if shares_prompt_of is not None else None
        session = PendingSession(next(self._numbers), request, arrival, limits, other)
        session.submitted_ns = time.monotonic_ns()
        try:
            if session.submitted_ns >= session.due_ns:
                raise DeadlineExceeded(
                    "the deadline passed while the request was read", details={"stage": "arrival"}
                )
            # Sending may raise Overloaded, so the session is registered only after it.
            submission = session.submission(session.submitted_ns)
            self._outbox.send(_Message(submit_session=submission))
        except CatenaryError as error:
            self.request_metrics.refused(request.model.label, error.reason)
            raise
        self._requests[session.number] = session
        if observer is not None:
            self._watchers[session.number] = observer
        self._idle.clear()
        self._deadlines.add(session.number, session.due_ns)
        return GenerationStream(session, self.give_up)

    def give_up(self, session: PendingSession) -> None:
        """Ends a generation that nobody reads any more; does nothing if it has ended."""
        if session.number in self._requests:
            self._end(session, RequestCancelled("the client went away"), "cancel")

    def connected(self, mine: Callable[[int], bool] | None = None) -> None:
        """Submits every unfinished generation, with its current session, to a new scheduler.

        Args:
            mine: Says by its number whether a generation belongs to that scheduler; None: all do.
        """
        now_ns = time.monotonic_ns()
        for session in list(self._requests.values()):
            if mine is None or mine(session.number):
                self._outbox.send(_Message(submit_session=session.submission(now_ns)))

    def resubmission(self, number: int) -> scheduler_pb2.GatewayMessage | None:
        """Returns the message that submits a generation to another scheduler.

        None if the generation has ended, or was started already.
        """
        session = self._requests.get(number)
        if session is None or session.starts:
            return None
        return _Message(submit_session=session.submission(time.monotonic_ns()))

    def start(self, order: scheduler_pb2.StartSession) -> None:
        """Carries out the scheduler's order to start or restart a session on a chain."""
        session = self._requests.get(order.request_id)
        if session is not None:
            self._starts.start(session, order)

    def reject(self, order: scheduler_pb2.RejectRequest) -> None:
        """Ends a generation that the scheduler has given up."""
        session = self._requests.get(order.request_id)
        if session is None:
            return
        error = error_of(order.failure, retry_after_ns=order.retry_after_ns or None)
        if order.earliest_finish_after_ns:
            error.details["earliest_finish_ms"] = str(order.earliest_finish_after_ns // 1_000_000)
        self._end(session, error, "none")

    def tokens(self, header: frame_pb2.FrameHeader, sender: str = "") -> bool:
        """Takes the tokens of a frame, each only if it is the next one of its generation.

        Returns:
            False if some tokens are of a session whose rings do not include `sender`.
        """
        return self._starts.tokens(header, sender)

    async def idle(self, timeout_s: float) -> bool:
        """Waits until no generation is unanswered; returns False after a timeout."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def close(self, error: CatenaryError) -> None:
        """Ends every unanswered generation with `error`."""
        for session in list(self._requests.values()):
            self._end(session, error, "cancel")
        self._deadlines.close()
        self._progress.close()
        await self._starts.close()

    def _took(self, session: PendingSession) -> None:
        self._progress.took(session)
        observer = self._watchers.get(session.number)
        if observer is not None:
            observer.first_token()
        if session.finish_reason:
            self._end(session, None, "finished")

    def _expired(self, number: int) -> None:
        session = self._requests[number]
        now_ns = time.monotonic_ns()
        if now_ns < session.due_ns:  # tokens have come since the timer was set
            self._deadlines.add(number, session.due_ns)
            return
        stage = "execute" if session.starts else "queue"
        what = session.limits.stage_at(now_ns, session.last_token_ns)
        error = DeadlineExceeded(
            f"{what} while the request was in stage '{stage}'", details={"stage": stage}
        )
        self._end(session, error, "cancel")

    def _end(self, session: PendingSession, error: CatenaryError | None, tell: str) -> None:
        """Ends a generation exactly once: complete if `error` is None, else with `error`.

        `tell` is what the scheduler hears: "finished", "cancel" or "none".
        """
        if self._requests.pop(session.number, None) is None:
            return
        finished = session.finished() if tell == "finished" else None
        self._starts.leave(session)
        self._progress.ended(session)
        session.end(error)
        observer = self._watchers.pop(session.number, None)
        if observer is not None:
            own_tokens = len(session.generated) - session.continued
            observer.ended(error, session.request.charged_prompt_tokens, own_tokens)
        # Sent at once: the first generation in the scheduler's queue waits for this slot.
        if finished is not None:
            self._tell(_Message(finished=finished))
        elif tell == "cancel":
            self._tell(_Message(cancel=scheduler_pb2.CancelRequest(request_id=session.number)))
        if not self._requests:
            self._idle.set()
        outcome = OK if error is None else error.reason
        done = finished_session(
            session, outcome, time.monotonic_ns(), self.request_metrics.gateway_id
        )
        asyncio.get_running_loop().call_soon(
            self.request_metrics.finished, done, session.limits.whole_ns
        )

    def _tell(self, message: scheduler_pb2.GatewayMessage) -> None:
        try:
            self._outbox.send(message)
        except Overloaded:
            # A scheduler that does not read is about to be lost; `connected` tells the next one.
            return
