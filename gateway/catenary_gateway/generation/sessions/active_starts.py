"""The starts whose tokens are believed, and the tokens they bring.

A generation has at most one current start, whose tokens count. It may have successors: starts to
which a live migration is to hand it over. The current start goes on until a successor brings the
next token; then that successor becomes current. Whatever fails, restarts or arrives out of order,
the token of each position is taken exactly once, and in order.

A start begins with a frame to the first agent of its ring: its opening, or the order to move it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from catenary_gateway.generation.sessions.session import PendingSession
from catenary_gateway.generation.sessions.start import SessionStart
from catenary_gateway.observability.request_metrics import RequestMetrics
from catenary_gateway.results.delivery import LinkSource
from catenary_gateway.results.pending import left_s
from catenary_protos.catenary.v1 import common_pb2, frame_pb2, scheduler_pb2
from catenary_services.errors import InvalidInput, PartitionLost
from catenary_services.grpc.error_tables import error_of_exception, failure_of
from catenary_services.transport.acknowledgements import Lost

OVERTAKEN_S = 5.0
"""Seconds to wait for tokens of the ring that a session has left, once the new ring has brought
later ones. After that they count as lost."""
_MOST_SUCCESSORS = 4
"""Most successors of one generation. A move that failed at the agents keeps its successor here
until later moves replace it, because the scheduler decides about moves."""

_Message = scheduler_pb2.GatewayMessage


@dataclass(frozen=True, slots=True)
class StartDeps:
    """Dependencies of a start: the ways to reach rings, the scheduler and the metrics."""

    gateway_id: str
    hub: LinkSource
    request_metrics: RequestMetrics
    tell: Callable[[scheduler_pb2.GatewayMessage], None]


class ActiveStarts:
    """The current starts and successors of all generations.

    Invariants: of the sessions that have not ended, `_sessions` has exactly the current starts,
    `_successors` exactly those that are to take over. Tokens of any other session id are dropped.
    """

    def __init__(self, deps: StartDeps, took: Callable[[PendingSession], None]) -> None:
        """Creates an empty registry.

        `took` is called for every token taken; it may end the session.
        """
        self.dropped = 0
        """Number of tokens dropped: late, duplicates, or of a session that was replaced."""
        self._to = deps
        self._took = took
        self._sessions: dict[int, PendingSession] = {}
        self._successors: dict[int, tuple[PendingSession, SessionStart]] = {}
        self._deliveries: dict[int, asyncio.Task[None]] = {}

    @property
    def running(self) -> int:
        """Number of generations that have a current start."""
        return len(self._sessions)

    def start(self, session: PendingSession, order: scheduler_pb2.StartSession) -> None:
        """Opens a session on a ring, in place of the current one or to take over from it."""
        if order.session_id in self._sessions or order.session_id in self._successors:
            return
        start = SessionStart(order.session_id, order, time.monotonic_ns(), len(session.generated))
        if order.moved_session_id:
            self._move(session, start)
            return
        if session.starts:
            self._to.request_metrics.metrics.redispatches.labels(_why_again(session)).inc()
        self.leave(session)
        self._sessions[start.session_id] = session
        self._begin(session, start)

    def leave(self, session: PendingSession) -> None:
        """Stops taking tokens from all starts of a generation."""
        for start in (session.current, *session.successors):
            if start is not None:
                self._drop(session, start)

    async def close(self) -> None:
        """Waits for openings that are being sent. Every session was left before."""
        await asyncio.gather(*self._deliveries.values(), return_exceptions=True)

    # Tokens

    def tokens(self, header: frame_pb2.FrameHeader, sender: str = "") -> bool:
        """Takes the tokens of a frame, each only if it is the next one of its generation.

        Returns:
            False if some tokens are of a session whose rings do not include `sender`.
        """
        now_ns, planned = time.monotonic_ns(), True
        for part in header.prompt_logprobs:
            session = self._sessions.get(part.session_id)
            if sender and not self._is_planned(part.session_id, session, sender):
                planned = False
            elif session is not None:
                session.take_prompt(part)
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
                # The ring of the prompt sends the first token and another ring the second, so the
                # second can arrive first.
                continue
            elif token.position > session.next_position:
                # Links keep the order of frames, so a token in between was lost.
                self._failed(session, start, _lost(session))
            elif session.misses_prompt:
                self._failed(session, start, _prompt_lost())
            else:
                self._take(session, token, now_ns)
        return planned

    def _is_planned(self, session_id: int, session: PendingSession | None, sender: str) -> bool:
        start = session.current if session is not None else None
        if start is None:
            start = self._successors.get(session_id, (None, None))[1]
        return start is None or sender in start.agents

    def _of_successor(self, token: frame_pb2.SessionToken, now_ns: int) -> None:
        """Takes a token of a successor, or drops one of an unknown session."""
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
            # The session was handed over, and the last tokens of the old ring are on their way.
            if start.overtake_timer is None:
                loop = asyncio.get_running_loop()
                start.overtake_timer = loop.call_later(
                    OVERTAKEN_S, self._never_came, session, start
                )
        else:
            self._never_came(session, start)

    def _take(self, session: PendingSession, token: frame_pb2.SessionToken, now_ns: int) -> None:
        """Takes the next token, and those after it that arrived earlier."""
        following: frame_pb2.SessionToken | None = token
        while following is not None:
            previous_ns = session.last_token_ns
            session.take(following, now_ns)
            label = session.request.model.label
            self._to.request_metrics.token_came(label, now_ns, previous_ns)
            self._took(session)
            if session.successors and (due := session.successor_due()) is not None:
                self._take_over(session, due, now_ns)
            following = session.early_token()

    def _take_over(self, session: PendingSession, start: SessionStart, now_ns: int) -> None:
        """Makes a successor current, and drops every other start of the session."""
        for other in (session.current, *session.successors):
            if other is not None and other is not start:
                self._drop(session, other)
        session.take_over(start)
        del self._successors[start.session_id]
        self._sessions[start.session_id] = session
        stall_ns = now_ns - session.last_token_ns
        self._to.request_metrics.moved(session.request.model.label, start.mode, stall_ns)

    # Starts

    def _move(self, session: PendingSession, start: SessionStart) -> None:
        """Orders the current session to move to another ring, and goes on with it until it has."""
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

    def _begin(self, session: PendingSession, start: SessionStart) -> None:
        session.begin(start)
        task = asyncio.create_task(self._deliver(session, start))
        self._deliveries[start.session_id] = task
        task.add_done_callback(lambda _: self._deliveries.pop(start.session_id, None))

    async def _deliver(self, session: PendingSession, start: SessionStart) -> None:
        try:
            if not start.order.route:
                raise InvalidInput("route", "an order needs a route")
            # A move whose opening is lost is given up by the scheduler; the session goes on.
            lost = partial(self._opening_lost, session, start) if start.moves is None else None
            await open_session(session, start, self._to.gateway_id, self._to.hub, lost)
        except Exception as exc:
            if not session.believes(start):
                return
            error = error_of_exception(exc)
            # Invalid orders, and our own bugs, fail again on any other chain.
            retryable = not isinstance(error, InvalidInput) and error.reason != "INTERNAL"
            # No agent is blamed: the scheduler knows from the route who was not reached.
            self._failed(session, start, failure_of(error, retryable=retryable))

    def _opening_lost(
        self, session: PendingSession, start: SessionStart, error: PartitionLost
    ) -> None:
        """Fails the current start if its link broke before it brought a token."""
        if start is session.current and not start.first_token_ns:
            self._failed(session, start, failure_of(error, retryable=True))

    def _failed(
        self, session: PendingSession, start: SessionStart, failure: common_pb2.Failure
    ) -> None:
        """Drops a start and reports its failure; the scheduler decides whether there is another.

        If a successor fails, the session goes on with its current start. If the current start
        fails, the session may have been handed over to a successor before, which is still
        believed. Once a successor has brought tokens that others must precede, it cannot go on
        without the start that is to bring those, nor that start without it.
        """
        is_current = start is session.current
        handed_over = any(each.early for each in (session.successors if is_current else [start]))
        self._drop(session, start)
        self._report(session, start, failure)
        if handed_over:
            self._all_lost(session)

    def _never_came(self, session: PendingSession, start: SessionStart) -> None:
        """Ends all starts, as the last tokens of the ring the session left are lost."""
        self._drop(session, start)
        self._report(session, start, _lost(session))
        self._all_lost(session)

    def _all_lost(self, session: PendingSession) -> None:
        for start in (*session.successors, session.current):
            if start is not None:
                self._drop(session, start)
                self._report(session, start, _lost(session))

    def _report(
        self, session: PendingSession, start: SessionStart, failure: common_pb2.Failure
    ) -> None:
        """Tells the scheduler that a start brings no more tokens."""
        start.failed = failure.reason or PartitionLost.reason
        start.failed_ns = time.monotonic_ns()
        if start.order.moved_session_id and not start.first_token_ns:
            self._to.request_metrics.move_failed(session.request.model.label, start.mode)
        report = scheduler_pb2.SessionFailed(session_id=start.session_id, failure=failure)
        self._to.tell(_Message(session_failed=report))

    def _drop(self, session: PendingSession, start: SessionStart) -> None:
        """Stops taking tokens from a start."""
        if self._sessions.pop(start.session_id, None) is None:
            self._successors.pop(start.session_id, None)
        session.left(start)
        delivery = self._deliveries.get(start.session_id)
        if delivery is not None and delivery is not asyncio.current_task():
            # A frame is sent whole or not at all, so cancelling damages no other frame.
            delivery.cancel()


def _why_again(session: PendingSession) -> str:
    """Returns the reason why the last start whose tokens counted brings no more."""
    for start in reversed(session.starts):
        if start.moves is None or start.first_token_ns:
            return start.failed or PartitionLost.reason
    return PartitionLost.reason


def _lost(session: PendingSession) -> common_pb2.Failure:
    lost = PartitionLost(f"the token at {session.next_position} was lost")
    return failure_of(lost, retryable=True)


def _prompt_lost() -> common_pb2.Failure:
    lost = PartitionLost("log probabilities of the prompt were lost")
    return failure_of(lost, retryable=True)


async def open_session(
    session: PendingSession,
    start: SessionStart,
    gateway_id: str,
    hub: LinkSource,
    lost: Lost | None = None,
) -> None:
    """Sends the opening of a start, with the token history, to the agent that must know it.

    That is the first agent of the start's ring. For a start that takes over from another it is the
    first agent of the ring that generates now, which organises the move. Nothing is sent if the
    start has been replaced by another one, or the request has ended. `lost` is called if the link
    breaks before it is certain that the opening has arrived.

    Raises:
        DeadlineExceeded: No time is left.
        PartitionLost: The agent cannot be reached.
        Overloaded: The agent took no frame in time.
    """
    deadline_ns = session.due_ns
    ring = start.order.route if start.moves is None else start.moves.ring
    link = await hub.link_to(ring[0].agent_id, left_s(deadline_ns))
    slot = await link.export(0, left_s(deadline_ns))
    try:
        if not session.believes(start):
            return
        start.push_ns = time.monotonic_ns()
        opening = session.opening(start, gateway_id, start.push_ns)
        header = _opened(start, opening) if start.moves is None else _moved(start, opening)
        await link.push(slot, header.SerializeToString(), left_s(deadline_ns), lost)
        start.sent_ns = time.monotonic_ns()
    finally:
        slot.release()


def _opened(start: SessionStart, opening: frame_pb2.SessionOpening) -> frame_pb2.FrameHeader:
    rows = frame_pb2.SessionRows(session_id=start.session_id, sample=True, opening=opening)
    return frame_pb2.FrameHeader(
        kind=frame_pb2.FRAME_KIND_SESSION_STEP,
        epoch=start.order.epoch,
        route=start.order.route,
        position=0,
        budget_ns=opening.budget_ns,
        plan_id=start.order.plan_id,
        sent_monotonic_ns=start.push_ns,
        session_rows=[rows],
    )


def _moved(start: SessionStart, opening: frame_pb2.SessionOpening) -> frame_pb2.FrameHeader:
    order = start.order
    move = frame_pb2.SessionMove(
        session_id=start.session_id,
        moved_session_id=order.moved_session_id,
        step=frame_pb2.SessionMove.STEP_BEGIN,
        by_tokens=order.move_mode == scheduler_pb2.MOVE_MODE_TOKENS,
        opening=opening,
    )
    return frame_pb2.FrameHeader(
        kind=frame_pb2.FRAME_KIND_SESSION_MOVE,
        epoch=order.epoch,
        budget_ns=opening.budget_ns,
        plan_id=order.plan_id,
        sent_monotonic_ns=start.push_ns,
        move=move,
    )
