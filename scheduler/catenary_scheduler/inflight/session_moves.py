"""Moves of running sessions as operators see them: asked for, waited for, measured."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from catenary_protos.catenary.v1 import scheduler_pb2
from catenary_scheduler.dispatch import ChainedDispatcher
from catenary_scheduler.dispatch.chained.sessions.views import SessionView
from catenary_scheduler.dispatch.events import Event, MoveMode, MoveRequested
from catenary_scheduler.storage.clock import now_ns
from catenary_scheduler.wire.session_messages import move_mode, session_moved
from catenary_services.domain.ids import NANOSECONDS_PER_SECOND, Nanoseconds, RequestId, SessionId
from catenary_services.errors import InvalidInput, Unavailable
from catenary_services.telemetry.metrics import Metrics

_REMEMBERED = 256
_LOOK_S = 0.02
"""Failures are not told here, so they are looked for this often by whoever waits."""
_FAILURES = {
    "deadline": "it took too long",
    "agent": "an agent or its gateway could not go on with it",
    "lost": "an agent of the chain it was to go to was lost",
    "closed": "an agent of the chain it was to go to closed it",
    "over": "its request ended, or was started again",
}


@dataclass(frozen=True, slots=True)
class OngoingMove:
    """A move under way.

    Attributes:
        session: What the session becomes.
        moved: What it is.
        chain_id: Where to.
        mode: What travels.
    """

    session: SessionId
    moved: SessionId
    chain_id: str
    mode: str


@dataclass(frozen=True, slots=True)
class FinishedMove:
    """What became of a move.

    Attributes:
        outcome: "moved", "failed", or "begun" if it is not over yet.
        problem: Why it failed.
        tokens: That were cached when it was handed over.
        rounds: Of sending before that.
        duration_ns: From the order to the hand-over.
        held_ns: The part of it in which no token was computed.
    """

    outcome: str
    problem: str = ""
    tokens: int = 0
    rounds: int = 0
    duration_ns: Nanoseconds = 0
    held_ns: Nanoseconds = 0


class SessionMoves:
    """Moves of one term.

    Args:
        dispatcher: Who moves them.
        feed: Gives it an event.
        metrics: Where durations go.
    """

    def __init__(
        self,
        dispatcher: ChainedDispatcher,
        feed: Callable[[Event, Nanoseconds], None],
        metrics: Metrics,
    ) -> None:
        self._dispatcher = dispatcher
        self._feed = feed
        self._metrics = metrics
        self._done: dict[SessionId, FinishedMove] = {}
        """The last ones, by what the sessions became."""

    def moved(self, message: scheduler_pb2.SessionMoved) -> None:
        """An agent says that it has handed a session over."""
        event = session_moved(message)
        self._done[event.session] = FinishedMove(
            "moved", "", message.tokens, message.rounds, message.duration_ns, message.held_ns
        )
        if len(self._done) > _REMEMBERED:
            del self._done[next(iter(self._done))]
        mode = move_mode(message.mode)
        seconds = message.duration_ns / NANOSECONDS_PER_SECOND
        self._metrics.migration_seconds.labels(mode).observe(seconds)
        self._metrics.migration_held_seconds.labels(mode).observe(
            message.held_ns / NANOSECONDS_PER_SECOND
        )
        self._feed(event, now_ns())

    def caches_sent(self, message: scheduler_pb2.CachesSent) -> None:
        """An agent says what caches it sent lately."""
        self._metrics.migration_bytes.inc(sum(link.bytes for link in message.links))

    def sessions(self) -> list[SessionView]:
        """Returns the session of every request that has one, by id."""
        return self._dispatcher.sessions()

    def begin(
        self, session: SessionId | RequestId, chain_id: str = "", mode: MoveMode | None = None
    ) -> OngoingMove:
        """Has a session go on, on another chain.

        Args:
            session: Its id, or whose it is.
            chain_id: Where to; empty: wherever is best.
            mode: What travels; None: whatever is faster.

        Raises:
            InvalidInput: There is no such session.
            Unavailable: It cannot be moved now; the message says why.
        """
        found = self._find(session)
        problem = self._dispatcher.problem(found.session, chain_id)
        if not problem:
            self._feed(MoveRequested(found.session, chain_id, mode), now_ns())
            now = self._dispatcher.view(found.session)
            if now is not None and now.moving_to is not None:
                return OngoingMove(now.moving_to, found.session, now.moving_chain, now.moving_by)
            problem = "it has just ended, or that chain has just become full"
        raise Unavailable(f"session {found.session} cannot be moved: {problem}")

    async def ended(self, move: OngoingMove, timeout_s: float) -> FinishedMove:
        """Returns what became of a move once it is over, or after `timeout_s`."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        while True:
            done = self._done.get(move.session)
            if done is not None:
                return done
            why = self._dispatcher.move_failure(move.session)
            if why:
                return FinishedMove("failed", _FAILURES[why])
            view = self._dispatcher.view(move.session)
            if view is not None:  # its gateway named it, and nobody said how long it took
                return FinishedMove("moved")
            if loop.time() >= deadline_s:
                return FinishedMove("begun")
            await asyncio.sleep(_LOOK_S)

    def _find(self, session: SessionId | RequestId) -> SessionView:
        if isinstance(session, RequestId):
            found = self._dispatcher.session_of(session)
            if found is None:
                raise InvalidInput("request", f"{session} has no session")
        else:
            found = self._dispatcher.view(session)
            if found is None:
                raise InvalidInput("session_id", f"no request is answered by session {session}")
        return found
