"""Every invariant of the chained dispatcher, checked at once; tests do so after every event.

States must agree with everything that is kept beside them: queues, timers, bookings, tokens, moves
and the load of workers. Whether the book agrees with agents and gateways is what audits compare
(`dispatch.auditing`), by the same states.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from catenary_scheduler.dispatch.chained.sessions.session_table import SessionTable
from catenary_scheduler.dispatch.chained.states import OWNED, RequestState, SessionState
from catenary_scheduler.dispatch.chained.tracking import SequenceRequest, Session
from catenary_services.domain.ids import RequestId


def validate(table: SessionTable) -> None:
    """Checks all invariants.

    Raises:
        AssertionError: Some do not hold; the message names each of them.
    """
    found = [*_requests(table), *_sessions(table), *_moves(table), *_chains(table)]
    if found:
        raise AssertionError("; ".join(found))


def _requests(table: SessionTable) -> Iterator[str]:
    waiting = Counter(
        sequence.request
        for model_queue in table.model_queues.values()
        for sequence in model_queue.waiting.sequences()
    )
    for request in waiting.keys() - table.sequences.keys():
        yield f"{request} waits and was answered"
    if table.resting.keys() - table.sequences.keys():
        yield "an answered request rests"
    for request, sequence in table.sequences.items():
        if sequence.request != request:
            yield f"{sequence.request} is filed as {request}"
        yield from _request(table, sequence, waiting)


def _request(
    table: SessionTable, sequence: SequenceRequest, waiting: Counter[RequestId]
) -> Iterator[str]:
    state, session, request = sequence.state, sequence.session, sequence.request
    if waiting[request] != (state is RequestState.WAITING):
        yield f"{request} is {state} and {waiting[request]} times in a queue"
    if (request in table.resting) != (state is RequestState.RESTING):
        yield f"{request} is {state}, against what rests"
    if (session is not None) != (state is RequestState.RUNNING):
        yield f"{request} is {state}, with the session {session and session.session_id}"
    if state in (RequestState.NEW, RequestState.ANSWERED):
        yield f"{request} is {state} between events"
    if session is not None and (
        session.sequence is not sequence or table.sessions.get(session.session_id) is not session
    ):
        yield f"{request} has the session {session.session_id} of another"
    if session is not None and table.next_stall_look is None:
        yield f"{request} has a session, and no stall is looked for"
    if sequence.timer < 0:
        yield f"{request} is never looked at"
    last = sequence.deadline + table.config.deadline_grace_ns
    if sequence.timer > last:
        yield f"{request} is looked at only after its deadline"


def _sessions(table: SessionTable) -> Iterator[str]:
    booked = table.slots.sessions()
    for session_id in booked:
        if session_id not in table.sessions:
            yield f"nobody knows the session {session_id}, which holds slots"
    for session_id in table.kv_budget.sessions() - table.sessions.keys():
        yield f"nobody knows the session {session_id}, which holds tokens"
    for name, ids in (("unclaimed", table.unclaimed), ("misplaced", table.misplaced)):
        for session_id in ids.keys() - table.sessions.keys():
            yield f"nobody knows the session {session_id}, which is {name}"
    for session_id, session in table.sessions.items():
        if session.session_id != session_id:
            yield f"{session.session_id} is filed as {session_id}"
        for fault in _session(table, session):
            yield f"the session {session_id} is {session.state} and {fault}"


def _session(table: SessionTable, session: Session) -> Iterator[str]:
    state, session_id, sequence = session.state, session.session_id, session.sequence
    is_booked = session_id in table.slots
    if (sequence is not None) != (state in OWNED):
        yield f"its request is {sequence and sequence.request}"
    if sequence is not None and sequence.session is not session:
        yield "its request has another session"
    if (session_id in table.unclaimed) != (state is SessionState.UNCLAIMED):
        yield "awaits a claim" if session_id in table.unclaimed else "awaits none"
    if (session_id in table.moves.ongoing) != (state is SessionState.MIGRATING_IN):
        yield "a move leads to it" if session_id in table.moves.ongoing else "no move leads to it"
    if session.moving is None and state is SessionState.MIGRATING_OUT:
        yield "does not move"
    if session.moving is not None and state not in (
        SessionState.MIGRATING_OUT,
        SessionState.DELIVERING,
    ):
        yield "moves"
    if state in (SessionState.NEW, SessionState.CLOSED):
        yield "was not put into another state"
    if not is_booked and state is not SessionState.DELIVERING:
        yield "holds no slots"
    if not is_booked and (session.route is not None or session.prefill is not None):
        yield "counts on a chain without slots there"
    is_leaving = table.kv_budget.is_leaving(session_id)
    if is_leaving is not None and is_leaving != (state is SessionState.CLOSING):
        yield "its tokens leave" if is_leaving else "its tokens stay"
    if is_leaving is None and session.route is not None:
        yield "has no tokens on its chain"
    if session_id in table.misplaced and state not in OWNED:
        yield "is misplaced"


def _moves(table: SessionTable) -> Iterator[str]:
    if len(table.moves) > table.config.max_moves:
        yield f"{len(table.moves)} sessions move"
    at = Counter(agent for move in table.moves.ongoing.values() for agent in move.agents)
    if at != table.moves.at:
        yield f"moves are counted as {table.moves.at}, and are {dict(at)}"
    if max(at.values(), default=0) > table.config.max_moves_per_agent:
        yield "too many moves concern one agent"
    for session_id, move in table.moves.ongoing.items():
        if table.sessions.get(session_id) is not move.target:
            yield f"a move leads to {session_id}, which is another session"
        if move.source.moving is not move or move.sequence.session is not move.source:
            yield f"the move to {session_id} is not that of {move.source.session_id}"
    for session in table.sessions.values():
        move_of = session.moving
        if move_of is not None and table.moves.to(move_of.target.session_id) is not move_of:
            yield f"the move of {session.session_id} is over"


def _chains(table: SessionTable) -> Iterator[str]:
    owned = {each.request for each in table.sequences.values() if each.session is not None}
    moving = {move.sequence.request for move in table.moves.ongoing.values()}
    for model_queue in table.model_queues.values():
        for route in model_queue.routes():
            here = [
                session
                for session in table.sessions.values()
                if route is session.route or route is session.prefill
            ]
            if route.running != len(here):
                yield f"{route.running} sessions count on {route.chain_id}, and {len(here)} are"
            tokens = sum(table.kv_budget.tokens_of(session.session_id) for session in here)
            if route.tokens != tokens:
                yield f"{route.chain_id} counts {route.tokens} tokens of {tokens}"
        if model_queue.placer is not None:
            yield from model_queue.placer.loads.faults(owned, moving)
