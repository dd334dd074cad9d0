"""The ring's state machine at one agent: sessions, steps, and what is to be sent out.

No threads, no event loop, no clock of its own: whoever holds it tells it events and asks for one
step after another. The life of a session here:

    Opened -> (queued -> step -> rows or token out -> rows or token arrived)* -> closed

Invariants: a session holds its block slots from `Opened` until it is closed, whichever comes first:
its last token, an order, a failure, its deadline. Whatever still arrives of a closed session is
ignored. What is wrong with one session fails that one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from catenary_agent.decoders.base import StepItem, Want
from catenary_agent.decoders.sampling import NO_TOKEN
from catenary_agent.device_errors import failure
from catenary_agent.generation import admission
from catenary_agent.generation.cache.cache_budget import affordable
from catenary_agent.generation.migration.moving import Moving
from catenary_agent.generation.state.events import (
    Broken,
    CacheArrived,
    CachePushed,
    Call,
    CloseOrdered,
    EpochRaised,
    Event,
    MoveSaid,
    Opened,
    Outflow,
    RowsArrived,
    RowsOut,
    StepDone,
    TokenArrived,
    TokenOut,
)
from catenary_agent.generation.state.holdings import HoldingsAnswer
from catenary_agent.generation.state.session import Arrived, Chunk, Work
from catenary_agent.generation.state.sessions import REPORT_NS, Sessions
from catenary_agent.steps import StepKind, StepsInHand
from catenary_services.errors import CatenaryError, DeviceLost, InternalError

if TYPE_CHECKING:
    import numpy as np

    from catenary_agent.generation.state.lane import Lane
    from catenary_agent.generation.state.session import Session
    from catenary_agent.generation.surroundings import GenerationLimits
    from catenary_services.domain.ids import Nanoseconds

Times = tuple["Nanoseconds", "Nanoseconds"]
"""Start and end of a step."""


class Ring:
    """The sessions of one agent and the steps that bring them on."""

    def __init__(
        self,
        agent_id: str,
        limits: GenerationLimits,
        clock: Callable[[], Nanoseconds],
        lane_closed: Callable[[Lane], None] = lambda lane: None,
        steps: StepsInHand | None = None,
    ) -> None:
        """Holds nothing yet.

        Args:
            agent_id: Ours.
            limits: How much a step takes, how caches travel.
            clock: Monotonic.
            lane_closed: Told when a lane's executor was closed.
            steps: What is computed now.
        """
        self.sessions = Sessions(agent_id, lane_closed)
        self._ignored = 0
        self._agent_id = agent_id
        self._chunk_tokens = limits.chunk_tokens
        self._clock = clock
        self._steps = steps or StepsInHand()
        self._moving = Moving(self.sessions, limits.caches, clock)

    @property
    def ignored(self) -> int:
        """Openings, rows, tokens, caches and steps of moves that came late, twice or for nobody."""
        return self._ignored + self._moving.ignored + self._moving.waiting.ignored

    def add_lane(self, lane: Lane) -> None:
        """Lets sessions begin on a lane."""
        self.sessions.lanes.append(lane)

    def retire_lane(self, lane: Lane) -> None:
        """Lets none begin there any more; it is closed with its last session."""
        self.sessions.retire(lane)

    def say_holdings(self, number: int) -> None:
        """Answers the scheduler's audit, behind what was said before."""
        leads, lanes = self._moving.led, self.sessions.lanes
        self.sessions.out.messages.append(HoldingsAnswer(number, self.sessions, leads, lanes))

    def expire(self) -> None:
        """Does what is due by time alone: deadlines, emulated waiting, reports."""
        now = self._clock()
        self.sessions.expire(now)
        self._moving.expire(now)
        self._moving.renew()
        self._moving.settle()

    def next_wakeup_ns(self) -> Nanoseconds | None:
        """Returns when `expire` has something to do; None if never."""
        moments = (self.sessions.next_wakeup_ns(), self._moving.next_wakeup_ns())
        return min((each for each in moments if each is not None), default=None)

    def take_outflow(self) -> Outflow:
        """Returns what came out since the last call."""
        out, self.sessions.out = self.sessions.out, Outflow()
        return out

    def close(self) -> None:
        """Frees every session and executor, without a word to anybody."""
        self.sessions.close()

    # -- events ----------------------------------------------------------------------------------

    def handle(self, event: Event) -> None:
        """Takes one event in."""
        match event:
            case TokenArrived():
                self._on_token(event)
            case RowsArrived():
                self._on_rows(event)
            case CacheArrived():
                self._moving.waiting.on_cache(event)
            case CachePushed():
                self._moving.on_pushed(event)
            case MoveSaid():
                self._moving.on_said(event)
            case EpochRaised():
                self._moving.raise_epoch(event.epoch)
            case Opened():
                self._on_opened(event)
            case CloseOrdered():
                self._moving.order_closed(event.session_ids)
            case Broken():
                self._on_broken(event)
            case Call():
                self._on_call(event)
        self._moving.settle()

    def _on_opened(self, event: Opened) -> None:
        session_id = event.facts.session_id
        is_over = self.sessions.is_over(session_id)
        if is_over or self.sessions.get(session_id) is not None:
            # On its decode side several agents introduce a session: none knows of the others.
            self._ignored += is_over or event.facts.side != "decode"
            if is_over:
                self.sessions.out.gone.append(session_id)
            return
        session = admission.try_admit(event, self.sessions.lanes)
        if isinstance(session, CatenaryError):
            self.sessions.fail(session_id, session)
            return
        self.sessions.add(session)
        if session.awaited is not None:
            self._moving.waiting.begin(session)
        elif session.pending:
            session.lane.queue(session, self._clock())

    def _on_rows(self, event: RowsArrived) -> None:
        session = self.sessions.get(event.session_id)
        if session is None or session.facts.is_first:
            self._ignored += 1
            self.sessions.out.consumed_bytes += event.rows.nbytes
            return
        if session.awaited is not None and session.arriving is not None and not session.chunks:
            session.expected = event.position  # checked when it is handed over
        try:
            admission.check_rows(session, event.position, event.rows)
        except CatenaryError as error:
            self.sessions.out.consumed_bytes += event.rows.nbytes
            self.sessions.fail(event.session_id, error)
            return
        was_idle = not session.pending
        session.expected += len(event.rows)
        session.chunks.append(Chunk(event.rows, event.sample, event.arrived))
        if was_idle and session.pending:
            session.lane.queue(session, self._clock())

    def _on_token(self, event: TokenArrived) -> None:
        session = self.sessions.get(event.session_id)
        awaited = session.awaited if session is not None else None
        if session is not None and awaited is not None and awaited.word and not session.arriving:
            self._moving.waiting.on_token(session, awaited, event)
            return
        if session is None or not session.facts.is_first or session.facts.is_last:
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
        """The newest token of a session is here, and nothing of it is on its way."""
        if not self._moving.turned(session) and session.pending:
            session.lane.queue(session, self._clock())

    def _on_broken(self, event: Broken) -> None:
        for session_id in event.session_ids:
            if self._moving.broken(session_id, event.error, event.blamed):
                continue
            if self.sessions.is_over(session_id) and event.blamed == self._agent_id:
                self._ignored += 1  # a wrong frame of a session that is over
            else:  # also one that is over: its last token did not reach the gateway
                self.sessions.fail(session_id, event.error, event.blamed)

    def _on_call(self, call: Call) -> None:
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
        return any(lane.is_ready for lane in self.sessions.lanes)

    def step(self) -> None:
        """Computes one iteration of the lane whose turn it is; lanes take turns."""
        lane = next((lane for lane in self.sessions.lanes if lane.is_ready), None)
        if lane is None:
            return
        if len(self.sessions.lanes) > 1:
            self.sessions.lanes.remove(lane)
            self.sessions.lanes.append(lane)
        works, decode_rows = lane.compose(self._chunk_tokens, self._clock())
        works, decode_rows = affordable(self.sessions, lane, works, decode_rows)
        if not works:
            self._moving.settle()
            return
        started_ns = self._clock()
        try:
            outputs = self._run(lane, works, decode_rows)
        except Exception as error:
            told = failure(error, partition=str(lane.key))
            if len(works) == 1 or isinstance(told, DeviceLost):
                self._step_failed(works, told)
            else:
                self._one_by_one(lane, works, decode_rows)
            self._moving.settle()
            return
        self._computed(lane, works, decode_rows, outputs, (started_ns, self._clock()))
        self._moving.settle()

    def _run(self, lane: Lane, works: list[Work], decode_rows: int) -> list[np.ndarray | None]:
        return self._steps.run(
            partial(lane.executor.step, [_item(work) for work in works]),
            StepKind.GENERATION,
            lane.key,
            _booked_ns(lane, works, decode_rows),
        )

    def _one_by_one(self, lane: Lane, works: list[Work], decode_rows: int) -> None:
        """Computes the parts of a step that failed alone: who fails again fails alone.

        It may be one session that makes a device fail, or too little memory for all at once. A
        step that failed has added nothing to what executors count as cached.
        """
        for number, work in enumerate(works):
            if work.session.closed:
                continue
            started_ns = self._clock()
            is_decode = int(number < decode_rows)
            try:
                outputs = self._run(lane, [work], is_decode)
            except Exception as error:
                told = failure(error, partition=str(lane.key))
                if isinstance(told, DeviceLost):
                    self._step_failed(works[number:], told)
                    return
                self._step_failed([work], told)
            else:
                times = (started_ns, self._clock())
                self._computed(lane, [work], is_decode, outputs, times)

    def _computed(
        self,
        lane: Lane,
        works: list[Work],
        decode_rows: int,
        outputs: list[np.ndarray | None],
        times: Times,
    ) -> None:
        """Sends on what a step brought."""
        prefill_tokens = lane.work_done.add(works, decode_rows, times, lane.cost)
        for work, output in zip(works, outputs, strict=True):
            self._advance(work, output, times)
        model = lane.key.model.name
        self.sessions.out.steps.append(
            StepDone(model, decode_rows, prefill_tokens, times[1] - times[0])
        )
        if times[1] - lane.work_done.since_ns >= REPORT_NS:
            self.sessions.report(lane)

    def _advance(self, work: Work, output: np.ndarray | None, times: Times) -> None:
        """Sends on what a session's part of a step brought, and queues what is left of it."""
        session, facts = work.session, work.session.facts
        position = session.cached
        session.cached += len(work.inputs)
        session.steps += 1
        session.compute_ns += times[1] - times[0]
        session.first_step_ns = session.first_step_ns or times[0]
        if work.sample and not session.prefilled_ns:
            session.prefilled_ns = times[1]
        if not facts.is_first:
            self.sessions.out.consumed_bytes += work.inputs.nbytes
        if not facts.is_last:
            assert output is not None
            opens, session.introduced = not session.introduced, True
            self.sessions.out.rows.append(
                RowsOut(facts, position, output, work.sample, opens, work.arrived, *times)
            )
        elif work.sample:
            assert output is not None
            self._accept(work, int(output[0]), times)
        if facts.side == "prefill" and session.cached >= facts.history:
            session.leaves = True
        if not session.closed:
            self._moving.advanced(session)
        if not session.closed and session.pending:
            self._go_on(session)

    def _accept(self, work: Work, token_id: int, times: Times) -> None:
        """Sends on the token that was chosen behind a session's part of a step."""
        session, facts = work.session, work.session.facts
        assert session.sampler is not None
        if token_id in NO_TOKEN:
            self.sessions.fail(facts.session_id, InternalError(NO_TOKEN[token_id]))
            return
        position = session.cached
        reason = session.sampler.accept(token_id)
        reason = reason or ("length" if position + 1 >= session.limit else "")
        self.sessions.out.tokens.append(
            TokenOut(facts, position, token_id, reason, work.arrived, *times)
        )
        if reason:
            self.sessions.finish(session)
        elif facts.is_first and facts.side != "prefill":
            session.arrived = Arrived(times[1])
            session.tokens.append(token_id)

    def _step_failed(self, works: list[Work], error: CatenaryError) -> None:
        """Fails every session of a step; what is in their caches now is not known."""
        for work in works:
            if not work.session.facts.is_first:
                self.sessions.out.consumed_bytes += work.inputs.nbytes
            self.sessions.fail(work.session.facts.session_id, error)


def _booked_ns(lane: Lane, works: list[Work], decode_rows: int) -> Nanoseconds:
    """Returns how long a step takes by what was measured; 0 if nothing was."""
    cost = lane.cost
    if cost is None:
        return 0
    context = sum(work.session.cached for work in works[:decode_rows])
    expected = cost.decode(decode_rows, context) if decode_rows else 0.0
    for work in works[decode_rows:]:
        prompt_ns = cost.prefill_ns + len(work.inputs) * cost.prefill_token_ns
        expected += max(cost.prefill_floor_ns, prompt_ns)
    return round(expected)


def _item(work: Work) -> StepItem:
    """Returns what the executor is asked for."""
    session = work.session
    want: Want = "hidden"
    if session.facts.is_last:
        want = "token" if work.sample else "nothing"
    return StepItem(session.facts.session_id, session.cached, work.inputs, want, session.sampler)
