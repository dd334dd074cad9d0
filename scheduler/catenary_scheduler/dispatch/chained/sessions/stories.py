"""Tells the story of a request: what happened to it and its sessions, and why."""

from __future__ import annotations

from dataclasses import dataclass

from catenary_scheduler.dispatch.chained.sessions.session_table import SessionTable
from catenary_scheduler.dispatch.chained.tracking import StoryStep
from catenary_services.domain.ids import Nanoseconds, RequestId, SessionId


@dataclass(frozen=True, slots=True)
class StateChange:
    """One step of a story.

    Attributes:
        at_ns: The moment.
        event: Number of the event that caused it, counted since the scheduler leads.
        event_kind: Kind of that event, e.g. "SessionFailed".
        session: The session that changed; None: the request did.
        before: The state before.
        after: The state after.
        name: What happened, the name of the transition.
        why: Particulars, e.g. the chain or the failure; may be empty.
    """

    at_ns: Nanoseconds
    event: int
    event_kind: str
    session: SessionId | None
    before: str
    after: str
    name: str
    why: str


def story_of(table: SessionTable, key: RequestId | SessionId) -> list[StateChange]:
    """Returns the changes of state of a request and its sessions, in order of time.

    Args:
        table: The state.
        key: The request, or one of its sessions.
    """
    if isinstance(key, RequestId):
        sequence = table.sequences.get(key)
        steps = sequence.story if sequence is not None else table.history.ended_story(key)
    else:
        session = table.sessions.get(key)
        steps = session.story if session is not None else table.history.ended_story(key)
    # A session that was found brings its own story with it when it is claimed.
    return [_change(step) for step in sorted(steps, key=_moment)]


def _moment(step: StoryStep) -> tuple[Nanoseconds, int]:
    return step.cause.at_ns, step.cause.number


def _change(step: StoryStep) -> StateChange:
    cause, way = step.cause, step.way
    return StateChange(
        cause.at_ns,
        cause.number,
        cause.kind,
        step.session or None,
        str(step.before),
        str(way.target),
        way.name,
        step.why,
    )
