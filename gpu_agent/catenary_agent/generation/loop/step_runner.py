"""One step after another: planned, begun, executed and applied.

    plan_step  reads the sessions and changes nothing
    begin      takes the sessions of the plan out of their queues
    execute    calls the executor, and touches no session: a device thread may do it
    apply      counts the output and sends it, and queues the sessions again

Whatever happens between `begin` and `apply` finds the sessions in the state COMPUTING. See
docs/agent-session-states.md for why the next step is not planned before the output is applied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from catenary_agent.decoders.sampling.sampling import (
    NO_TOKEN,
    NOTHING_ALLOWED,
    SessionSampler,
)
from catenary_agent.devices.device_errors import failure
from catenary_agent.generation.cache.cache_budget import room_for_kept
from catenary_agent.generation.drafts.drafter import StepTimes, times_of
from catenary_agent.generation.loop.step_plan import PromptLimits, StepPlan, plan_step
from catenary_agent.generation.state.events import PromptScoresOut, RowsOut, TokenOut
from catenary_agent.generation.state.session import ArrivalTime
from catenary_agent.generation.state.sessions import REPORT_NS
from catenary_agent.generation.state.states import (
    CLOSED,
    COMPUTING,
    LEAVING,
    QUEUED,
    WAITING,
    InvalidTransitionError,
)
from catenary_agent.supervision.steps import RunningSteps, StepKind
from catenary_services.domain.prefixes import PREFIX_BLOCK_TOKENS
from catenary_services.errors import CatenaryError, DeviceLost, InternalError, InvalidInput

if TYPE_CHECKING:
    import numpy as np

    from catenary_agent.generation.cache.prefix_cache import PrefixCache
    from catenary_agent.generation.context import GenerationLimits
    from catenary_agent.generation.drafts.drafter import Drafter
    from catenary_agent.generation.migration.migrations import Migrations
    from catenary_agent.generation.state.session import Session, SessionWork, Times
    from catenary_agent.generation.state.sessions import SessionTable
    from catenary_services.domain.ids import Nanoseconds


_WHOLE, _HALF = 4, 2
"""Bytes of a number in rows on their way: float32, or bfloat16."""
_FEW_TOKENS = 4
"""So many rows at once are those of a stream that goes on, even if it has more than one to send."""


class StepRunner:
    """The steps of all batchers of one agent."""

    def __init__(
        self,
        sessions: SessionTable,
        migrations: Migrations,
        prefixes: PrefixCache,
        limits: GenerationLimits,
        clock: Callable[[], Nanoseconds],
        steps: RunningSteps,
    ) -> None:
        """Begins without steps.

        Args:
            sessions: The sessions that are computed, and their batchers.
            migrations: Told how sessions advance.
            prefixes: Keeps what prompts have cached.
            limits: The size of steps.
            clock: Returns monotonic nanoseconds.
            steps: Where the running step is noted, for the watchdog.
        """
        self._prompts = PromptLimits(
            limits.chunk_tokens, limits.link_bytes, _HALF if limits.narrows_rows else _WHOLE
        )
        self._sessions = sessions
        self._migrations = migrations
        self._prefixes = prefixes
        self._most_drafts = limits.draft_tokens
        self._clock = clock
        self._steps = steps

    def plan_step(self) -> StepPlan | None:
        """Returns a step of the next batcher that is ready; None if none is. Changes nothing."""
        for batcher in self._sessions.batchers:
            if batcher.is_ready:
                return plan_step(
                    batcher, self._sessions, self._prompts, self._clock(), self._drafts_for
                )
        return None

    def _drafts_for(self, session: Session, sessions: int) -> Sequence[int]:
        """Returns the guesses to compute with the newest token of a session.

        Args:
            session: A session that is computed next.
            sessions: Number of sessions that are computed beside it, and itself.
        """
        drafter = session.drafter
        if drafter is None or not session.ring_takes_drafts or not session.spec.is_first:
            return ()
        if session.pending != 1 or session.cache_sends or session.incoming is not None:
            return ()
        most = min(self._most_drafts, session.limit - len(session.tokens) - 1)
        if most <= 0 or self._migrations.is_led(session):
            return ()
        times = _times_of(session, sessions, drafter)
        if times is not None:
            times = times._replace(row_ns=times.row_ns + self._prompts.row_ns(session))
        return drafter.propose(session.tokens, most, times)

    def begin(self, plan: StepPlan) -> StepPlan:
        """Takes the sessions of a plan out of their queues; batchers take turns.

        Returns:
            The plan without sessions that were closed since it was made.
        """
        sessions, batcher = self._sessions, plan.batcher
        sessions.because("StepBegan", plan.made_ns)
        if len(sessions.batchers) > 1:
            sessions.batchers.remove(batcher)
            sessions.batchers.append(batcher)
        batcher.dequeue(*plan.looked_at, plan.prompts)
        for session_id, error in plan.evicted.items():
            sessions.fail(session_id, error)
        if batcher.kept.size:
            coming = {each.session.spec.session_id: each.end for each in plan.works}
            batcher.kept.shrink(room_for_kept(batcher, coming))
        is_stale = False
        for work in plan.works:
            if work.session.state is QUEUED:
                sessions.go(work.session, COMPUTING)
            else:
                is_stale = True
        return plan.only(lambda work: work.session.state is COMPUTING) if is_stale else plan

    def execute(self, plan: StepPlan) -> tuple[list[np.ndarray | None], Times]:
        """Runs a plan on its executor; returns the result of each work, and when that was.

        It waits for its turn on the device, which does not count as time of the step.
        """
        batcher = plan.batcher
        with self._steps.turns:
            started_ns = self._clock()
            results = self._steps.run(
                partial(batcher.executor.step, [work.item() for work in plan.works]),
                StepKind.GENERATION,
                batcher.key,
                plan.size.booked_ns(batcher.cost),
            )
            return results, (started_ns, self._clock())

    def apply(self, plan: StepPlan, results: list[np.ndarray | None], times: Times) -> None:
        """Counts a step, and sends what it computed for each session."""
        batcher, size = plan.batcher, plan.size
        self._sessions.because("StepDone", times[1])
        self._sessions.out.steps += batcher.count(size, times)
        for work, result in zip(plan.works, results, strict=True):
            try:
                if work.session.state is not CLOSED:
                    self._advance(work, result, times)
            except InvalidTransitionError as error:
                self._sessions.fail_invalid(error)
        if times[1] - batcher.work_done.since_ns >= REPORT_NS:
            self._sessions.report(batcher)

    def step(self) -> None:
        """Computes the next step, if any session is to be computed."""
        plan = self.plan_step()
        if plan is not None and (plan := self.begin(plan)).works:
            self._compute(plan)

    def _compute(self, plan: StepPlan) -> CatenaryError | None:
        """Executes a plan and applies its output; returns the error if the step failed.

        Then every session of the step fails, because the content of their caches is unknown. Of
        several sessions each is computed on its own first, so that only faulty ones fail: one may
        make a device fail, or memory may be too small for all at once. A failed step has added
        nothing to what executors count as cached. After the loss of the device nothing is tried.
        """
        told: CatenaryError | None = None
        try:
            output = self.execute(plan)
        except Exception as error:
            told = failure(error, partition=str(plan.batcher.key))
        else:
            self.apply(plan, *output)
            return None
        is_alone = len(plan.works) == 1
        for part in plan.parts():
            session = part.works[0].session
            if session.state is CLOSED:
                continue
            if is_alone or isinstance(told, DeviceLost):
                self._sessions.because("StepFailed", self._clock())
                self._sessions.fail(session.spec.session_id, told)
            else:
                told = self._compute(part) or told
        return told

    def _advance(self, work: SessionWork, result: np.ndarray | None, times: Times) -> None:
        """Sends the output of a session's part of a step, and queues what is pending of it."""
        session, spec, sessions = work.session, work.session.spec, self._sessions
        session.advance(work, times)
        if not spec.is_first:
            sessions.out.consumed_bytes += work.inputs.nbytes
        if not spec.is_last:
            assert result is not None
            self._pass_on(work, result, times)
        if len(work.inputs) > 1 and session.cached >= PREFIX_BLOCK_TOKENS:
            self._prefixes.advanced(session)
        if self._migrations.shared.readers:
            self._migrations.shared.advanced(session)
            if session.state is CLOSED:
                return
        if spec.is_last:
            self._answer(work, result, times)
        if session.state is CLOSED:
            return
        if spec.side == "prefill" and session.cached >= spec.history:
            sessions.go(session, LEAVING)
        self._migrations.advanced(session)
        if session.state is COMPUTING:
            sessions.go(session, WAITING)
            if session.pending and work.sample:
                self._migrations.go_on(session)
            elif session.pending:  # rows of what it reads are in transit: it is not handed over
                sessions.resume(session)

    def _answer(self, work: SessionWork, result: np.ndarray | None, times: Times) -> None:
        """Sends what the last agent of a ring computed for a session: scores and tokens."""
        if work.scores is not None and work.scores.prompt:
            scored = PromptScoresOut(work.session.spec, work.position + 1, work.scores.prompt)
            self._sessions.out.prompt_scores.append(scored)
        if work.sample:
            assert result is not None
            self._accept(work, result.tolist(), times)

    def _pass_on(self, work: SessionWork, result: np.ndarray, times: Times) -> None:
        """Sends the hidden states of a session to the next agent."""
        session, spec = work.session, work.session.spec
        opens, session.introduced = not session.introduced, True
        known = session.tokens[max(spec.history, work.position) : session.cached]
        turn = None
        if (
            not work.sample
            or session.unsent
            or len(work.inputs) > _FEW_TOKENS + len(work.drafts.tokens)
        ):
            # Rows of streams may overtake these, but no later rows of the same session may.
            turn = self._prompts.turn_of(session, len(work.inputs))
            session.unsent += turn is not None
        self._sessions.out.rows.append(
            RowsOut(
                spec,
                work.position,
                result,
                work.sample,
                opens,
                work.arrived,
                *times,
                work.drafts,
                known,
                turn,
            )
        )

    def _accept(self, work: SessionWork, token_ids: Sequence[int], times: Times) -> None:
        """Sends the tokens that were sampled for a session; all but the first were guessed."""
        session, spec, sessions = work.session, work.session.spec, self._sessions
        assert session.sampler is not None
        if work.drafts.tokens:
            model = session.batcher.key.model.name
            sessions.out.guesses.append((model, len(work.drafts.tokens), len(token_ids) - 1))
        for number, token_id in enumerate(token_ids):
            if token_id in NO_TOKEN:
                sessions.fail(spec.session_id, _why_no_token(session.sampler, token_id))
                return
            position = work.position + len(work.inputs) - len(work.drafts.tokens) + number
            reason = session.sampler.accept(token_id)
            reason = reason or ("length" if position + 1 >= session.limit else "")
            out = TokenOut(
                spec, position, token_id, reason, work.arrived, *times, work.drafts.are_taken
            )
            out.is_guessed = number > 0
            if position == spec.history:
                out.cached_tokens = session.reused
            if work.scores is not None:
                out.scored = work.scores.token
            sessions.out.tokens.append(out)
            if reason:
                sessions.finish(session)
                return
            if spec.is_first and spec.side != "prefill":
                session.take(token_id)
        if spec.is_first and spec.side != "prefill":
            session.arrived = ArrivalTime(times[1])
            session.settle(times[1])


def _times_of(session: Session, sessions: int, drafter: Drafter) -> StepTimes | None:
    """Returns what guesses of a session cost; None if that was not measured."""
    cost, executor = session.batcher.cost, session.batcher.executor
    if cost is None:
        return None
    share = (executor.key.last_block - session.spec.own_hop.first_block) / executor.table.blocks
    return times_of(cost, sessions, share, drafter.away_ns)


def _why_no_token(sampler: SessionSampler, placeholder: int) -> CatenaryError:
    """Returns the error for a placeholder that stands where a token was to be chosen."""
    if sampler.mask is not None and sampler.mask.problem is not None:
        return sampler.mask.problem
    why = NO_TOKEN[placeholder]
    if placeholder == NOTHING_ALLOWED:
        # Parameters that fit each by itself may exclude each other, which shows at some token only.
        return InvalidInput(sampler.narrowest, why)
    return InternalError(why)
