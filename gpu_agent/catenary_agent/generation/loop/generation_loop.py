"""The state machine of generation at one agent: sessions, steps, and what is to be sent.

It has no thread, event loop or clock of its own: its owner passes in events and asks for one step
after another. The life of a session here:

    Opened -> (queued -> step -> rows or token out -> rows or token arrived)* -> closed

Invariants: a session holds its block slots from `SessionOpened` until it is closed, by its last
token, an order, a failure or its deadline, whichever comes first. Whatever arrives of a closed
session later is ignored. An error in one session fails only that session.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from catenary_agent.decoders.base import StepItem, Want
from catenary_agent.decoders.sampling.sampling import NO_TOKEN
from catenary_agent.devices.device_errors import failure
from catenary_agent.generation import admission
from catenary_agent.generation.cache.cache_budget import affordable
from catenary_agent.generation.migration.migrations import Migrations
from catenary_agent.generation.state.events import (
    CacheArrived,
    CachePushed,
    CloseOrdered,
    EpochRaised,
    Event,
    LoopCall,
    LoopOutput,
    MoveMessage,
    RowsArrived,
    RowsOut,
    SessionOpened,
    SessionsBroken,
    StepDone,
    TokenArrived,
    TokenOut,
)
from catenary_agent.generation.state.holdings import HoldingsAnswer
from catenary_agent.generation.state.session import ArrivalTime, HiddenChunk, SessionWork
from catenary_agent.generation.state.sessions import REPORT_NS, SessionTable
from catenary_agent.supervision.steps import RunningSteps, StepKind
from catenary_services.errors import CatenaryError, DeviceLost, InternalError

if TYPE_CHECKING:
    import numpy as np

    from catenary_agent.generation.context import GenerationLimits
    from catenary_agent.generation.state.partition_batcher import PartitionBatcher
    from catenary_agent.generation.state.session import Session
    from catenary_services.domain.ids import Nanoseconds

Times = tuple["Nanoseconds", "Nanoseconds"]
"""The start and the end of a step in monotonic nanoseconds."""


class GenerationLoop:
    """The sessions of one agent, and the steps that advance them."""

    def __init__(
        self,
        agent_id: str,
        limits: GenerationLimits,
        clock: Callable[[], Nanoseconds],
        batcher_closed: Callable[[PartitionBatcher], None] = lambda batcher: None,
        steps: RunningSteps | None = None,
    ) -> None:
        """Begins without batchers and sessions.

        Args:
            agent_id: The id of this agent.
            limits: The size of steps, and how caches travel.
            clock: Returns monotonic nanoseconds.
            batcher_closed: Called when the executor of a batcher was closed.
            steps: Where the running step is noted, for the watchdog.
        """
        self.sessions = SessionTable(agent_id, batcher_closed)
        self._ignored = 0
        self._agent_id = agent_id
        self._chunk_tokens = limits.chunk_tokens
        self._clock = clock
        self._steps = steps or RunningSteps()
        self._moving = Migrations(self.sessions, limits.caches, clock)

    @property
    def ignored(self) -> int:
        """Number of openings, rows, tokens, caches and steps of moves that came late or twice."""
        return self._ignored + self._moving.ignored + self._moving.waiting.ignored

    def add_batcher(self, batcher: PartitionBatcher) -> None:
        """Lets sessions begin on a batcher."""
        self.sessions.batchers.append(batcher)

    def retire_batcher(self, batcher: PartitionBatcher) -> None:
        """Lets no session begin on a batcher any more; it is closed with its last session."""
        self.sessions.retire(batcher)

    def say_holdings(self, number: int) -> None:
        """Answers the scheduler's audit, behind all messages that were queued before."""
        leads, batchers = self._moving.led, self.sessions.batchers
        self.sessions.out.messages.append(HoldingsAnswer(number, self.sessions, leads, batchers))

    def expire(self) -> None:
        """Handles everything that is due by time alone: deadlines, emulated waits, reports."""
        now = self._clock()
        self.sessions.expire(now)
        self._moving.expire(now)
        self._moving.renew()
        self._moving.settle()

    def next_wakeup_ns(self) -> Nanoseconds | None:
        """Returns the moment at which `expire` has something to do; None if never."""
        moments = (self.sessions.next_wakeup_ns(), self._moving.next_wakeup_ns())
        return min((each for each in moments if each is not None), default=None)

    def take_outflow(self) -> LoopOutput:
        """Returns everything that came out since the last call."""
        out, self.sessions.out = self.sessions.out, LoopOutput()
        return out

    def close(self) -> None:
        """Closes every session and executor without sending anything."""
        self.sessions.close()

    # -- events ----------------------------------------------------------------------------------

    def handle(self, event: Event) -> None:
        """Handles one event."""
        match event:
            case TokenArrived():
                self._on_token(event)
            case RowsArrived():
                self._on_rows(event)
            case CacheArrived():
                self._moving.waiting.on_cache(event)
            case CachePushed():
                self._moving.on_pushed(event)
            case MoveMessage():
                self._moving.on_said(event)
            case EpochRaised():
                self._moving.raise_epoch(event.epoch)
            case SessionOpened():
                self._on_opened(event)
            case CloseOrdered():
                self._moving.order_closed(event.session_ids)
            case SessionsBroken():
                self._on_broken(event)
            case LoopCall():
                self._on_call(event)
        self._moving.settle()

    def _on_opened(self, event: SessionOpened) -> None:
        session_id = event.spec.session_id
        is_over = self.sessions.is_over(session_id)
        if is_over or self.sessions.get(session_id) is not None:
            # Several agents introduce a session on its decode side, each unaware of the others.
            self._ignored += is_over or event.spec.side != "decode"
            if is_over:
                self.sessions.out.gone.append(session_id)
            return
        session = admission.try_admit(event, self.sessions.batchers)
        if isinstance(session, CatenaryError):
            self.sessions.fail(session_id, session)
            return
        self.sessions.add(session)
        if session.pending_cache is not None:
            self._moving.waiting.begin(session)
        elif session.pending:
            session.batcher.queue(session, self._clock())

    def _on_rows(self, event: RowsArrived) -> None:
        session = self.sessions.get(event.session_id)
        if session is None or session.spec.is_first:
            self._ignored += 1
            self.sessions.out.consumed_bytes += event.rows.nbytes
            return
        if (
            session.pending_cache is not None
            and session.incoming is not None
            and not session.chunks
        ):
            session.expected = event.position  # verified when the session is handed over
        try:
            admission.check_rows(session, event.position, event.rows)
        except CatenaryError as error:
            self.sessions.out.consumed_bytes += event.rows.nbytes
            self.sessions.fail(event.session_id, error)
            return
        was_idle = not session.pending
        session.expected += len(event.rows)
        session.chunks.append(HiddenChunk(event.rows, event.sample, event.arrived))
        if was_idle and session.pending:
            session.batcher.queue(session, self._clock())

    def _on_token(self, event: TokenArrived) -> None:
        session = self.sessions.get(event.session_id)
        pending_cache = session.pending_cache if session is not None else None
        if (
            session is not None
            and pending_cache is not None
            and pending_cache.word
            and not session.incoming
        ):
            self._moving.waiting.on_token(session, pending_cache, event)
            return
        if session is None or not session.spec.is_first or session.spec.is_last:
            self._ignored += 1
            return
        if event.is_last:
            self.sessions.finish(session)
            return
        try:
            admission.check_token(session, event.position, event.token_id)
        except CatenaryError as error:
            self.sessions.fail(event.session_id, error)
            return
        session.arrived = event.arrived
        session.tokens.append(event.token_id)
        self._go_on(session)

    def _go_on(self, session: Session) -> None:
        """Continues a session whose newest token is known and of which no rows are in transit."""
        if not self._moving.turned(session) and session.pending:
            session.batcher.queue(session, self._clock())

    def _on_broken(self, event: SessionsBroken) -> None:
        for session_id in event.session_ids:
            if self._moving.broken(session_id, event.error, event.blamed):
                continue
            if self.sessions.is_over(session_id) and event.blamed == self._agent_id:
                self._ignored += 1  # a wrong frame of a session that is over
            else:  # also one that is over: its last token did not reach the gateway
                self.sessions.fail(session_id, event.error, event.blamed)

    def _on_call(self, call: LoopCall) -> None:
        try:
            result = self._steps.run(call.work, StepKind.MEASURING)
        except Exception as error:
            call.done(None, error)
        else:
            call.done(result, None)

    # -- steps -----------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        """True if `step` would compute something."""
        return any(batcher.is_ready for batcher in self.sessions.batchers)

    def step(self) -> None:
        """Computes one iteration of the next batcher that is ready; batchers take turns."""
        batcher = next((batcher for batcher in self.sessions.batchers if batcher.is_ready), None)
        if batcher is None:
            return
        if len(self.sessions.batchers) > 1:
            self.sessions.batchers.remove(batcher)
            self.sessions.batchers.append(batcher)
        works, decode_rows = batcher.compose(self._chunk_tokens, self._clock())
        works, decode_rows = affordable(self.sessions, batcher, works, decode_rows)
        if not works:
            self._moving.settle()
            return
        started_ns = self._clock()
        try:
            outputs = self._run(batcher, works, decode_rows)
        except Exception as error:
            told = failure(error, partition=str(batcher.key))
            if len(works) == 1 or isinstance(told, DeviceLost):
                self._step_failed(works, told)
            else:
                self._one_by_one(batcher, works, decode_rows)
            self._moving.settle()
            return
        self._computed(batcher, works, decode_rows, outputs, (started_ns, self._clock()))
        self._moving.settle()

    def _run(
        self, batcher: PartitionBatcher, works: list[SessionWork], decode_rows: int
    ) -> list[np.ndarray | None]:
        return self._steps.run(
            partial(batcher.executor.step, [_item(work) for work in works]),
            StepKind.GENERATION,
            batcher.key,
            _booked_ns(batcher, works, decode_rows),
        )

    def _one_by_one(
        self, batcher: PartitionBatcher, works: list[SessionWork], decode_rows: int
    ) -> None:
        """Computes each part of a failed step on its own, so that only faulty sessions fail.

        One session may make a device fail, or memory may be too small for all at once. A failed
        step has added nothing to what executors count as cached.
        """
        for number, work in enumerate(works):
            if work.session.closed:
                continue
            started_ns = self._clock()
            is_decode = int(number < decode_rows)
            try:
                outputs = self._run(batcher, [work], is_decode)
            except Exception as error:
                told = failure(error, partition=str(batcher.key))
                if isinstance(told, DeviceLost):
                    self._step_failed(works[number:], told)
                    return
                self._step_failed([work], told)
            else:
                times = (started_ns, self._clock())
                self._computed(batcher, [work], is_decode, outputs, times)

    def _computed(
        self,
        batcher: PartitionBatcher,
        works: list[SessionWork],
        decode_rows: int,
        outputs: list[np.ndarray | None],
        times: Times,
    ) -> None:
        """Counts a step, and sends what it computed for each session."""
        prefill_tokens = batcher.work_done.add(works, decode_rows, times, batcher.cost)
        for work, output in zip(works, outputs, strict=True):
            self._advance(work, output, times)
        model = batcher.key.model.name
        self.sessions.out.steps.append(
            StepDone(model, decode_rows, prefill_tokens, times[1] - times[0])
        )
        if times[1] - batcher.work_done.since_ns >= REPORT_NS:
            self.sessions.report(batcher)

    def _advance(self, work: SessionWork, output: np.ndarray | None, times: Times) -> None:
        """Sends the output of a session's part of a step, and queues what is pending of it."""
        session, spec = work.session, work.session.spec
        position = session.cached
        session.cached += len(work.inputs)
        session.steps += 1
        session.compute_ns += times[1] - times[0]
        session.first_step_ns = session.first_step_ns or times[0]
        if work.sample and not session.prefilled_ns:
            session.prefilled_ns = times[1]
        if not spec.is_first:
            self.sessions.out.consumed_bytes += work.inputs.nbytes
        if not spec.is_last:
            assert output is not None
            opens, session.introduced = not session.introduced, True
            self.sessions.out.rows.append(
                RowsOut(spec, position, output, work.sample, opens, work.arrived, *times)
            )
        elif work.sample:
            assert output is not None
            self._accept(work, int(output[0]), times)
        if spec.side == "prefill" and session.cached >= spec.history:
            session.leaves = True
        if not session.closed:
            self._moving.advanced(session)
        if not session.closed and session.pending:
            self._go_on(session)

    def _accept(self, work: SessionWork, token_id: int, times: Times) -> None:
        """Sends the token that was sampled for a session."""
        session, spec = work.session, work.session.spec
        assert session.sampler is not None
        if token_id in NO_TOKEN:
            self.sessions.fail(spec.session_id, InternalError(NO_TOKEN[token_id]))
            return
        position = session.cached
        reason = session.sampler.accept(token_id)
        reason = reason or ("length" if position + 1 >= session.limit else "")
        self.sessions.out.tokens.append(
            TokenOut(spec, position, token_id, reason, work.arrived, *times)
        )
        if reason:
            self.sessions.finish(session)
        elif spec.is_first and spec.side != "prefill":
            session.arrived = ArrivalTime(times[1])
            session.tokens.append(token_id)

    def _step_failed(self, works: list[SessionWork], error: CatenaryError) -> None:
        """Fails every session of a step, because the content of their caches is unknown now."""
        for work in works:
            if not work.session.spec.is_first:
                self.sessions.out.consumed_bytes += work.inputs.nbytes
            self.sessions.fail(work.session.spec.session_id, error)


def _booked_ns(
    batcher: PartitionBatcher, works: list[SessionWork], decode_rows: int
) -> Nanoseconds:
    """Returns how long a step should take by the measured cost; 0 if there is none."""
    cost = batcher.cost
    if cost is None:
        return 0
    context = sum(work.session.cached for work in works[:decode_rows])
    expected = cost.decode(decode_rows, context) if decode_rows else 0.0
    for work in works[decode_rows:]:
        prompt_ns = cost.prefill_ns + len(work.inputs) * cost.prefill_token_ns
        expected += max(cost.prefill_floor_ns, prompt_ns)
    return round(expected)


def _item(work: SessionWork) -> StepItem:
    """Returns the input of the executor for a session's part of a step."""
    session = work.session
    want: Want = "hidden"
    if session.spec.is_last:
        want = "token" if work.sample else "nothing"
    return StepItem(session.spec.session_id, session.cached, work.inputs, want, session.sampler)
