"""Moves of running sessions as operators see them: begun, awaited, measured."""

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
"""Interval at which `ended` looks for the outcome of a move: failures raise no event here."""
_FAILURES = {
    "deadline": "it took too long",
    "agent": "an agent or its gateway could not go on with it",
    "lost": "an agent of the chain it was to go to was lost",
    "closed": "an agent of the chain it was to go to closed it",
    "over": "its request ended, or was started again",
}


@dataclass(frozen=True, slots=True)
class OngoingMove:
    """A move that is not over yet.

    Attributes:
        session: The session that takes over.
        moved: The session that generates until then.
        chain_id: The chain the session moves to.
        mode: What travels, "kv" or "tokens".
    """

    session: SessionId
    moved: SessionId
    chain_id: str
    mode: str


@dataclass(frozen=True, slots=True)
class FinishedMove:
    """The outcome of a move.

    Attributes:
        outcome: "moved", "failed", or "begun" if it is not over yet.
        problem: Why it failed; empty if it did not.
        tokens: Tokens in the cache when the session was handed over.
        rounds: Rounds of sending before the hand-over.
        duration_ns: Time from the order to the hand-over.
        held_ns: The part of `duration_ns` in which no token was computed.
    """

    outcome: str
    problem: str = ""
    tokens: int = 0
    rounds: int = 0
    duration_ns: Nanoseconds = 0
    held_ns: Nanoseconds = 0


class SessionMoves:
    """The moves of running sessions in one term.

    Args:
        dispatcher: Decides about the moves and carries them out.
        feed: Hands an event to the dispatcher.
        metrics: Receives the durations.
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
        """The latest finished moves, by the session that took over."""

    def moved(self, message: scheduler_pb2.SessionMoved) -> None:
        """Handles an agent's message that it handed a session over."""
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
        """Handles an agent's message about the caches it sent lately."""
        self._metrics.migration_bytes.inc(sum(link.bytes for link in message.links))

    def sessions(self) -> list[SessionView]:
        """Returns the session of every request that has one, by id."""
        return self._dispatcher.sessions()

    def begin(
        self, session: SessionId | RequestId, chain_id: str = "", mode: MoveMode | None = None
    ) -> OngoingMove:
        """Begins to move a session to another chain.

        Args:
            session: The id of the session, or of the request it generates for.
            chain_id: The chain to move to; empty: the best one.
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
        """Returns the outcome of a move once it is over, or after `timeout_s`."""
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
            if view is not None:  # the gateway named it, and no agent said how long it took
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
