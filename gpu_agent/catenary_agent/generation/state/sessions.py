"""The sessions of one agent: their slots, their deadlines, and the messages about their end."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from catenary_agent.generation.state.events import LoopOutput, RowsOut
from catenary_agent.generation.state.incidents import incident
from catenary_agent.generation.state.partition_batcher import BatcherWork
from catenary_agent.generation.state.reporting import (
    generation_report,
    session_failed,
    sessions_closed,
)
from catenary_agent.generation.state.session import NO_DRAFTS
from catenary_agent.generation.state.states import (
    CLOSED,
    FIRST_STATES,
    LEAVING,
    QUEUED,
    ROUND,
    TRANSITIONS,
    WAITING,
    InvalidTransitionError,
)
from catenary_services.domain.prefixes import PREFIX_BLOCK_TOKENS
from catenary_services.errors import DeadlineExceeded
from catenary_services.log import get_logger

if TYPE_CHECKING:
    from catenary_agent.generation.state.partition_batcher import PartitionBatcher
    from catenary_agent.generation.state.session import Session
    from catenary_agent.generation.state.states import Cause, SessionState
    from catenary_services.domain.ids import Nanoseconds
    from catenary_services.errors import CatenaryError

_log = get_logger("catenary_agent.generation")
_REMEMBERED = 65_536
"""The most closed sessions remembered, whose late frames are recognised."""
_SPARE_DEADLINES = 256
REPORT_NS = 1_000_000_000
"""The time between two reports of a batcher."""


class SessionTable:
    """The open sessions, their states, and the output caused by changes to them.

    Invariants: a session is closed exactly once; then its block slots are free, and the bytes of
    its waiting rows are given back. A retired batcher is closed with its last session.
    """

    def __init__(
        self,
        agent_id: str,
        batcher_closed: Callable[[PartitionBatcher], None],
        *,
        is_strict: bool = False,
    ) -> None:
        """Begins empty.

        Args:
            agent_id: The id of this agent.
            batcher_closed: Called with each batcher whose executor was closed.
            is_strict: Whether an invalid change of a state is raised; otherwise its session fails.
        """
        self.agent_id = agent_id
        self.is_strict = is_strict
        self.cause: Cause = ("Start", 0, 0)
        """The cause of all changes that are made now."""
        self.batchers: list[PartitionBatcher] = []
        """Every batcher whose executor is not closed yet; the next to compute comes first."""
        self.out = LoopOutput()
        """The output since it was last taken."""
        self.on_closed: Callable[[Session, CatenaryError | None, str], None] | None = None
        """Called with each closed session, its error (None if it ended well), and who is blamed."""
        self.on_closing: Callable[[Session], None] | None = None
        """Called with each session that ends well and has some text, with its caches still here."""
        self._batcher_closed = batcher_closed
        self._open: dict[int, Session] = {}
        self.get: Callable[[int], Session | None] = self._open.get
        """Returns an open session by its id, None if there is none with that id."""
        self._over: OrderedDict[int, None] = OrderedDict()
        self._deadlines: list[tuple[Nanoseconds, int]] = []

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._open.values()))

    def is_over(self, session_id: int) -> bool:
        """Returns True if a session was closed here, as far as is remembered."""
        return session_id in self._over

    def add(self, session: Session) -> None:
        """Adds a session that holds its slots."""
        assert session.state in FIRST_STATES
        session.history.add(None, session.state, self.cause)
        self._open[session.spec.session_id] = session
        self.bound(session, session.spec.deadline_ns)

    def bound(self, session: Session, moment_ns: Nanoseconds) -> None:
        """Ends a session at a moment: well if it is leaving, otherwise with DeadlineExceeded."""
        heapq.heappush(self._deadlines, (moment_ns, session.spec.session_id))
        if len(self._deadlines) > 2 * len(self._open) + _SPARE_DEADLINES:
            self._deadlines = [each for each in self._deadlines if each[1] in self._open]
            heapq.heapify(self._deadlines)

    def introduce(self, session: Session, position: int) -> None:
        """Opens a session at the next agent, before it has rows; they will begin at `position`."""
        session.introduced = True
        none = np.empty((0, session.batcher.executor.table.hidden_size), np.float32)
        spec, now = session.spec, self.cause[2]
        out = RowsOut(spec, position, none, False, True, session.arrived, now, now, NO_DRAFTS)
        self.out.rows.append(out)

    # -- states ----------------------------------------------------------------------------------

    def because(self, kind: str, now: Nanoseconds) -> None:
        """Notes what is the cause of all changes until the next call."""
        self.cause = (kind, self.cause[1] + 1, now)

    def go(self, session: Session, state: SessionState) -> None:
        """Changes the state of a session.

        Raises:
            InvalidTransitionError: `TRANSITIONS` does not have this change.
        """
        before = session.state
        if ROUND.get(before) is state:
            session.history.latest.append((before, state, self.cause))
        elif state in TRANSITIONS[before]:
            session.history.add(before, state, self.cause)
        else:
            session_id = session.spec.session_id
            raise InvalidTransitionError(session_id, state, self.cause, session.history)
        session.state = state

    def resume(self, session: Session, *, is_awaited: bool = False) -> None:
        """Queues a waiting session if it has tokens to compute.

        Args:
            session: The session.
            is_awaited: Whether its stream stands still, because it has just moved here.
        """
        if session.state is WAITING and session.pending:
            self.go(session, QUEUED)
            batcher = session.batcher
            queue = batcher.queue_first if is_awaited else batcher.queue
            queue(session, self.cause[2])

    def fail_invalid(self, error: InvalidTransitionError) -> None:
        """Fails the session of a bug that is being handled, or raises it if that is asked for."""
        if self.is_strict:
            raise error
        self.fail(error.session_id, incident("the session came into a state it cannot be in"))

    def validate(self) -> None:
        """Raises AssertionError unless every invariant of the sessions and batchers holds."""
        for session_id, session in self._open.items():
            session.validate()
            assert session_id == session.spec.session_id
            assert session_id not in self._over
            assert session.batcher in self.batchers
        for batcher in self.batchers:
            own = {each.spec.session_id: each for each in self if each.batcher is batcher}
            assert batcher.executor.sessions == len(own)
            queued = [each for each in batcher.queued if each in own and own[each].state is QUEUED]
            assert sorted(queued) == sorted(each for each in own if own[each].state is QUEUED)

    # -- ends ------------------------------------------------------------------------------------

    def finish(self, session: Session) -> None:
        """Ends a session that has all its tokens."""
        self._close(session)
        self.out.messages.append(sessions_closed((session.spec.session_id,)))

    def order_closed(self, session_ids: tuple[int, ...]) -> None:
        """Ends sessions by order of the scheduler. Frames of ids not seen yet are ignored later."""
        for session_id in session_ids:
            session = self._open.get(session_id)
            if session is not None:
                self._close(session)
            else:
                self._remember(session_id)
        if session_ids:
            self.out.messages.append(sessions_closed(session_ids))

    def fail(self, session_id: int, error: CatenaryError, blamed: str = "") -> None:
        """Ends a session with an error and reports it, even if it never began here.

        Args:
            session_id: The session.
            error: The reason.
            blamed: A peer that could not be reached; empty for this agent.
        """
        blamed = blamed or self.agent_id
        _log.warning(
            "session_failed",
            session_id=session_id,
            reason=error.reason,
            error=error.message,
            blamed=blamed,
        )
        session = self._open.get(session_id)
        if session is not None:
            self._close(session, error, blamed)
        elif session_id not in self._over:
            self.out.gone.append(session_id)
            self._remember(session_id)
        # This message comes first, so that the scheduler does not order the session closed.
        self.out.messages.append(sessions_closed((session_id,)))
        self.out.messages.append(session_failed(session_id, error, blamed))

    def _close(
        self, session: Session, error: CatenaryError | None = None, blamed: str = ""
    ) -> None:
        """Frees everything a session holds."""
        session_id = session.spec.session_id
        self.go(session, CLOSED)
        _log.debug("session_closed", session_id=session_id, history=session.history)
        del self._open[session_id]
        self.out.consumed_bytes += sum(chunk.rows.nbytes for chunk in session.chunks)
        session.chunks.clear()
        is_worth_keeping = error is None and session.cached >= PREFIX_BLOCK_TOKENS
        if is_worth_keeping and self.on_closing is not None:
            self.on_closing(session)
        session.batcher.executor.close_session(session_id)
        if session.sampler is not None and session.sampler.mask is not None:
            session.sampler.mask.drop()
        self._remember(session_id)
        self.out.gone.append(session_id)
        self.out.ended.append(session)
        outcome = "OK" if error is None else error.reason
        self.out.outcomes.append((session.batcher.key.model.name, outcome))
        self._close_if_unused(session.batcher)
        if self.on_closed is not None:
            self.on_closed(session, error, blamed)

    def _remember(self, session_id: int) -> None:
        self._over[session_id] = None
        if len(self._over) > _REMEMBERED:
            self._over.popitem(last=False)

    def close(self) -> None:
        """Closes every session and executor without sending anything."""
        self.on_closed = self.on_closing = None
        for session in self:
            self._close(session)
        for batcher in list(self.batchers):
            self.retire(batcher)
        self.out.messages.clear()

    # -- batchers ----------------------------------------------------------------------------------

    def retire(self, batcher: PartitionBatcher) -> None:
        """Lets no session begin on a batcher any more; it is closed with its last session."""
        batcher.retired = True
        batcher.kept.clear()
        self._close_if_unused(batcher)

    def report(self, batcher: PartitionBatcher) -> None:
        """Reports what a batcher computed since the last report, if anything."""
        if batcher.work_done.since_ns:
            self.out.messages.append(generation_report(batcher, batcher.executor.sessions))
            batcher.work_done = BatcherWork(batcher.work_done.pace)

    def _close_if_unused(self, batcher: PartitionBatcher) -> None:
        if batcher.retired and batcher.executor.sessions == 0 and batcher in self.batchers:
            self.report(batcher)
            self.batchers.remove(batcher)
            if batcher.masks is not None:
                batcher.masks.close()
            try:
                batcher.executor.close()
            except Exception:
                _log.exception("decoder_close_failed", partition=str(batcher.key))
            self._batcher_closed(batcher)
            _log.info("decoder_unloaded", partition=str(batcher.key))

    # -- time ------------------------------------------------------------------------------------

    def expire(self, now: Nanoseconds) -> None:
        """Fails sessions past their deadline, ends emulated waits, reports quiet batchers."""
        while self._deadlines and self._deadlines[0][0] <= now:
            session_id = heapq.heappop(self._deadlines)[1]
            session = self._open.get(session_id)
            if session is not None and session.state is LEAVING:
                self.finish(session)
            elif session is not None:
                error = DeadlineExceeded(
                    "the deadline passed while text was generated", details={"stage": "generate"}
                )
                self.fail(session_id, error)
        for batcher in self.batchers:
            for session_id in batcher.woken(now):
                session = self._open.get(session_id)
                if session is not None:
                    batcher.wake(session)
            if batcher.work_done.since_ns and now - batcher.work_done.since_ns >= REPORT_NS:
                self.report(batcher)

    def next_wakeup_ns(self) -> Nanoseconds | None:
        """Returns the moment at which `expire` has something to do; None if never."""
        moments = [
            batcher.work_done.since_ns + REPORT_NS
            for batcher in self.batchers
            if batcher.work_done.since_ns
        ]
        if self._deadlines:
            moments.append(self._deadlines[0][0])
        moments += [wake for batcher in self.batchers if (wake := batcher.next_wake_ns) is not None]
        return min(moments, default=None)
