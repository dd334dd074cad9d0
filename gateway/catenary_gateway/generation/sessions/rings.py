"""Which rings may bring the tokens of which generation, and the tokens they bring.

A generation has one current start at most, whose tokens count. It may have successors: starts that
a live migration is to hand it to. It goes on until one of them brings the next token; that one is
current then. Whatever fails, restarts or overtakes, each position is taken once, and in order.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from catenary_gateway.generation.sessions.opening import open_session
from catenary_gateway.generation.sessions.session import PendingSession
from catenary_gateway.generation.sessions.start import Start
from catenary_gateway.observability.bookkeeping import Bookkeeping
from catenary_gateway.results.delivery import Links
from catenary_protos.catenary.v1 import common_pb2, frame_pb2, scheduler_pb2
from catenary_services.errors import InvalidInput, PartitionLost
from catenary_services.grpc.error_tables import error_of_exception, failure_of

OVERTAKEN_S = 5.0
"""Tokens of the ring a session left that are this long behind those of the new one are lost."""
_MOST_SUCCESSORS = 4
"""A move that failed at the agents is believed until others were ordered: who moved it decides."""

_Message = scheduler_pb2.GatewayMessage


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Whom rings, the scheduler and the books are reached by."""

    gateway_id: str
    hub: Links
    books: Bookkeeping
    tell: Callable[[scheduler_pb2.GatewayMessage], None]


class Rings:
    """Keeps the starts that are believed.

    Invariants: of the sessions that have not ended, `_sessions` has exactly the current starts,
    `_successors` exactly those that are to take over. Tokens of any other session id are nobody's.
    """

    def __init__(self, surroundings: Surroundings, took: Callable[[PendingSession], None]) -> None:
        """`took` is called for every token taken; it may end the session."""
        self.dropped = 0
        """Tokens nobody waits for."""
        self._to = surroundings
        self._took = took
        self._sessions: dict[int, PendingSession] = {}
        self._successors: dict[int, tuple[PendingSession, Start]] = {}
        self._deliveries: dict[int, asyncio.Task[None]] = {}

    @property
    def running(self) -> int:
        """Number of generations that have a ring."""
        return len(self._sessions)

    def start(self, session: PendingSession, order: scheduler_pb2.StartSession) -> None:
        """Opens a session on a ring, in place of any other, or moves the current one to it."""
        if order.session_id in self._sessions or order.session_id in self._successors:
            return
        start = Start(order.session_id, order, time.monotonic_ns(), len(session.generated))
        if order.moved_session_id:
            self._move(session, start)
            return
        if session.starts:
            self._to.books.metrics.redispatches.labels(_why_again(session)).inc()
        self.leave(session)
        self._sessions[start.session_id] = session
        self._begin(session, start)

    def leave(self, session: PendingSession) -> None:
        """Believes none of a generation's starts any more."""
        for start in (session.current, *session.successors):
            if start is not None:
                self._drop(session, start)

    async def close(self) -> None:
        """Waits for what is being sent; every session was left before."""
        await asyncio.gather(*self._deliveries.values(), return_exceptions=True)

    # Tokens

    def tokens(self, header: frame_pb2.FrameHeader, sender: str = "") -> bool:
        """Takes the tokens of a frame, each if it is the next one of its generation.

        Returns:
            False if `sender` is on none of the rings that some of them are to come from.
        """
        now_ns, planned = time.monotonic_ns(), True
        for token in header.session_tokens:
            session = self._sessions.get(token.session_id)
            if sender and not self._is_planned(token.session_id, session, sender):
                planned = False
                continue
            if session is None:
                self._of_successor(token, now_ns)
                continue
            start = session.current
            assert start is not None
            if token.position < session.next_position:
                self.dropped += 1
            elif token.HasField("failure"):
                self._failed(session, start, token.failure)
            elif session.is_early(start, token):
                # The ring of the prompt sends the first token, another ring the second.
                continue
            elif token.position > session.next_position:
                # Links keep their order, so one between was lost, and no later one can be believed.
                self._failed(session, start, _lost(session))
            else:
                self._take(session, token, now_ns)
        return planned

    def _is_planned(self, session_id: int, session: PendingSession | None, sender: str) -> bool:
        start = session.current if session is not None else None
        if start is None:
            start = self._successors.get(session_id, (None, None))[1]
        return start is None or sender in start.agents

    def _of_successor(self, token: frame_pb2.SessionToken, now_ns: int) -> None:
        """Takes a token of a session that is to take over, or of one that nobody knows."""
        session, start = self._successors.get(token.session_id, (None, None))
        if session is None or start is None:
            self.dropped += 1
        elif token.HasField("failure"):
            self._failed(session, start, token.failure)
        elif token.position < session.next_position:
            self.dropped += 1
        elif token.position == session.next_position:
            self._take_over(session, start, now_ns)
            self._take(session, token, now_ns)
        elif session.is_early(start, token):
            # It was handed over; the last tokens of the ring before are still on their way.
            if start.patience is None:
                loop = asyncio.get_running_loop()
                start.patience = loop.call_later(OVERTAKEN_S, self._never_came, session, start)
        else:
            self._never_came(session, start)

    def _take(self, session: PendingSession, token: frame_pb2.SessionToken, now_ns: int) -> None:
        """Takes the next token, and those behind it that came before."""
        following: frame_pb2.SessionToken | None = token
        while following is not None:
            previous_ns = session.last_token_ns
            session.take(following, now_ns)
            if previous_ns:
                label = session.request.model.label
                self._to.books.token_after(label, now_ns - previous_ns)
            self._took(session)
            if session.successors and (due := session.successor_due()) is not None:
                self._take_over(session, due, now_ns)
            following = session.early_token()

    def _take_over(self, session: PendingSession, start: Start, now_ns: int) -> None:
        """Makes a successor current; whatever still comes of any other start is nobody's."""
        for other in (session.current, *session.successors):
            if other is not None and other is not start:
                self._drop(session, other)
        session.take_over(start)
        del self._successors[start.session_id]
        self._sessions[start.session_id] = session
        stall_ns = now_ns - session.last_token_ns
        self._to.books.moved(session.request.model.label, start.mode, stall_ns)

    # Starts

    def _move(self, session: PendingSession, start: Start) -> None:
        """Has the session that generates move to another ring, and goes on with it until then."""
        moved_id, moved = start.order.moved_session_id, session.current
        problem = ""
        if moved is None or moved.session_id != moved_id or not moved.first_token_ns:
            problem = "it does not generate"
        elif any(each.early for each in session.successors):
            problem = "it was handed over already"
        if problem:
            lost = PartitionLost(f"session {moved_id} cannot move: {problem}")
            self._report(session, start, failure_of(lost, retryable=True))
            return
        if len(session.successors) >= _MOST_SUCCESSORS:
            self._drop(session, session.successors[0])
        start.moves = moved
        self._successors[start.session_id] = session, start
        self._begin(session, start)

    def _begin(self, session: PendingSession, start: Start) -> None:
        session.begin(start)
        task = asyncio.create_task(self._deliver(session, start))
        self._deliveries[start.session_id] = task
        task.add_done_callback(lambda _: self._deliveries.pop(start.session_id, None))

    async def _deliver(self, session: PendingSession, start: Start) -> None:
        try:
            if not start.order.route:
                raise InvalidInput("route", "an order needs a route")
            # A move that does not begin is the scheduler's to give up; the session goes on.
            lost = partial(self._opening_lost, session, start) if start.moves is None else None
            await open_session(session, start, self._to.gateway_id, self._to.hub, lost)
        except Exception as exc:
            if not session.believes(start):
                return
            error = error_of_exception(exc)
            # What does not fit and our bugs fail again; all else may work elsewhere.
            retryable = not isinstance(error, InvalidInput) and error.reason != "INTERNAL"
            # No agent failed: whom this gateway could not reach, the scheduler knows by the route.
            self._failed(session, start, failure_of(error, retryable=retryable))

    def _opening_lost(self, session: PendingSession, start: Start, error: PartitionLost) -> None:
        """The link broke behind an opening: unless it has brought tokens, nobody may have it."""
        if start is session.current and not start.first_token_ns:
            self._failed(session, start, failure_of(error, retryable=True))

    def _failed(self, session: PendingSession, start: Start, failure: common_pb2.Failure) -> None:
        """Leaves a start; the scheduler decides whether there is another.

        If it was to take over, the session goes on where it is. If it is the current one, a
        successor may have been handed the session before, and is still believed. Once one has
        brought tokens that others must precede, neither can go on without the other.
        """
        is_current = start is session.current
        handed_over = any(each.early for each in (session.successors if is_current else [start]))
        self._drop(session, start)
        self._report(session, start, failure)
        if handed_over:
            self._all_lost(session)

    def _never_came(self, session: PendingSession, start: Start) -> None:
        """The last tokens of the ring that a session left are lost: it cannot go on."""
        self._drop(session, start)
        self._report(session, start, _lost(session))
        self._all_lost(session)

    def _all_lost(self, session: PendingSession) -> None:
        for start in (*session.successors, session.current):
            if start is not None:
                self._drop(session, start)
                self._report(session, start, _lost(session))

    def _report(self, session: PendingSession, start: Start, failure: common_pb2.Failure) -> None:
        """Tells the scheduler that a start brings no more."""
        start.failed = failure.reason or PartitionLost.reason
        start.failed_ns = time.monotonic_ns()
        if start.order.moved_session_id and not start.first_token_ns:
            self._to.books.move_failed(session.request.model.label, start.mode)
        report = scheduler_pb2.SessionFailed(session_id=start.session_id, failure=failure)
        self._to.tell(_Message(session_failed=report))

    def _drop(self, session: PendingSession, start: Start) -> None:
        """Takes no token of a start any more."""
        if self._sessions.pop(start.session_id, None) is None:
            self._successors.pop(start.session_id, None)
        session.left(start)
        delivery = self._deliveries.get(start.session_id)
        if delivery is not None and delivery is not asyncio.current_task():
            # A frame is sent whole or never, so this harms nobody else's.
            delivery.cancel()


def _why_again(session: PendingSession) -> str:
    """Returns why the start whose tokens counted last brings no more."""
    for start in reversed(session.starts):
        if start.moves is None or start.first_token_ns:
            return start.failed or PartitionLost.reason
    return PartitionLost.reason


def _lost(session: PendingSession) -> common_pb2.Failure:
    lost = PartitionLost(f"the token at {session.next_position} was lost")
    return failure_of(lost, retryable=True)
