"""The state machine of generation at one agent: sessions, steps, and what is to be sent.

It has no thread, event loop or clock of its own: its owner passes in events and asks for one step
after another. `state.states` has the states of a session and the ways between them.

Invariants: a session holds its block slots from `SessionOpened` until it is closed, by its last
token, an order, a failure or its deadline, whichever comes first. Whatever arrives of a closed
session later is ignored. An error in one session fails only that session.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from catenary_agent.generation.cache.prefix_cache import PrefixCache
from catenary_agent.generation.loop.session_events import SessionEvents
from catenary_agent.generation.loop.step_runner import StepRunner
from catenary_agent.generation.migration.migrations import Migrations
from catenary_agent.generation.state.events import (
    CacheArrived,
    CacheLent,
    CachePushed,
    CloseOrdered,
    EngineAnswered,
    EpochRaised,
    Event,
    GrammarCompiled,
    LoanMessage,
    LoopCall,
    LoopOutput,
    MoveMessage,
    PrefixConfirmed,
    RowsArrived,
    RowsPushed,
    SessionOpened,
    SessionsBroken,
    TokenArrived,
)
from catenary_agent.generation.state.holdings import HoldingsAnswer
from catenary_agent.generation.state.sessions import SessionTable
from catenary_agent.generation.state.states import InvalidTransitionError
from catenary_agent.supervision.steps import RunningSteps, StepKind

if TYPE_CHECKING:
    from catenary_agent.generation.context import GenerationLimits
    from catenary_agent.generation.state.partition_batcher import PartitionBatcher
    from catenary_services.domain.ids import Nanoseconds


class GenerationLoop:
    """The sessions of one agent, and the steps that advance them."""

    def __init__(
        self,
        agent_id: str,
        limits: GenerationLimits,
        clock: Callable[[], Nanoseconds],
        batcher_closed: Callable[[PartitionBatcher], None] = lambda batcher: None,
        steps: RunningSteps | None = None,
        *,
        validates: bool = False,
    ) -> None:
        """Begins without batchers and sessions.

        Args:
            agent_id: The id of this agent.
            limits: The size of steps, and how caches travel.
            clock: Returns monotonic nanoseconds.
            batcher_closed: Called when the executor of a batcher was closed.
            steps: Where the running step is noted, for the watchdog.
            validates: Whether all invariants are checked after every event and step, and an invalid
                change of a session's state is raised. For tests.
        """
        self._clock = clock
        self._steps = steps or RunningSteps()
        self._validates = validates
        self.sessions = SessionTable(agent_id, batcher_closed, is_strict=validates)
        self.migrations = Migrations(self.sessions, limits.caches, clock)
        self.prefixes = PrefixCache(self.sessions, limits, clock)
        self.runner = StepRunner(
            self.sessions, self.migrations, self.prefixes, limits, clock, self._steps
        )
        self._prefix_host_bytes = limits.prefix_host_bytes
        self._ring = SessionEvents(self.sessions, self.migrations, self.prefixes)
        self._handlers: Mapping[type[Event], Callable[[Any], None]] = {
            TokenArrived: self._ring.on_token,
            RowsArrived: self._ring.on_rows,
            RowsPushed: self._ring.on_left,
            SessionOpened: self._ring.on_opened,
            SessionsBroken: self._ring.on_broken,
            GrammarCompiled: self._ring.on_compiled,
            EngineAnswered: self._ring.on_answered,
            PrefixConfirmed: self.prefixes.on_confirmed,
            CloseOrdered: self.migrations.on_close_ordered,
            CacheArrived: self.migrations.waiting.on_cache,
            CacheLent: self.migrations.waiting.on_cache,
            LoanMessage: self.migrations.on_loan,
            CachePushed: self.migrations.on_pushed,
            MoveMessage: self.migrations.on_said,
            EpochRaised: self.migrations.on_epoch,
            LoopCall: self._on_call,
        }

    @property
    def ignored(self) -> int:
        """Number of openings, rows, tokens, caches and steps of moves that came late or twice."""
        ignored = self._ring.ignored + self.migrations.ignored + self.prefixes.ignored
        return ignored + self.migrations.waiting.ignored

    def add_batcher(self, batcher: PartitionBatcher) -> None:
        """Lets sessions begin on a batcher."""
        block_token_bytes = batcher.executor.sizes.cache_bytes_per_token
        batcher.host_block_tokens = self._prefix_host_bytes // max(1, block_token_bytes)
        self.sessions.batchers.append(batcher)

    def retire_batcher(self, batcher: PartitionBatcher) -> None:
        """Lets no session begin on a batcher any more; it is closed with its last session."""
        self.sessions.retire(batcher)

    def say_holdings(self, number: int) -> None:
        """Answers the scheduler's audit, behind all messages that were queued before."""
        leads, batchers = self.migrations.led, self.sessions.batchers
        self.sessions.out.messages.append(HoldingsAnswer(number, self.sessions, leads, batchers))

    def next_wakeup_ns(self) -> Nanoseconds | None:
        """Returns the moment at which `expire` has something to do; None if never."""
        moments = [self.sessions.next_wakeup_ns(), self.migrations.next_wakeup_ns()]
        if self.prefixes.stall_timer.since:
            moments.append(self.prefixes.stall_timer.next_wakeup_ns())
        return min((each for each in moments if each is not None), default=None)

    def take_outflow(self) -> LoopOutput:
        """Returns everything that came out since the last call."""
        out, self.sessions.out = self.sessions.out, LoopOutput()
        return out

    def close(self) -> None:
        """Closes every session and executor without sending anything."""
        self.sessions.close()
        self.migrations.close()

    def handle(self, event: Event) -> None:
        """Handles one event."""
        self.sessions.because(type(event).__name__, self._clock())
        handler = self._handlers.get(type(event))
        if handler is not None:
            self._run(handler, event)

    def expire(self) -> None:
        """Handles everything that is due by time alone: deadlines, emulated waits, reports."""
        self.sessions.because("TimePassed", self._clock())
        self._run(self._expire)

    @property
    def is_ready(self) -> bool:
        """True if `step` would compute something."""
        return any(batcher.is_ready for batcher in self.sessions.batchers)

    def step(self) -> None:
        """Computes one iteration of the next batcher that is ready; batchers take turns."""
        self._run(self.runner.step)

    def _run(self, work: Callable[..., None], *arguments: Any) -> None:
        """Does something, and passes on the steps of moves that this agent sends to itself.

        A session that would come into a state it cannot be in fails; the process goes on.
        """
        try:
            work(*arguments)
            self.migrations.settle()
        except InvalidTransitionError as error:
            self.sessions.fail_invalid(error)
        if self._validates:
            self.validate()

    def _expire(self) -> None:
        now = self.sessions.cause[2]
        self.sessions.expire(now)
        self.migrations.expire(now)
        if self.prefixes.stall_timer.since:
            self.prefixes.expire(now)
        self.migrations.renew()

    def _on_call(self, call: LoopCall) -> None:
        try:
            result = self._steps.run(call.work, StepKind.MEASURING)
        except Exception as error:
            call.done(None, error)
        else:
            call.done(result, None)

    def validate(self) -> None:
        """Raises AssertionError unless every invariant holds."""
        self.sessions.validate()
        self.migrations.validate()
        self.prefixes.validate()
