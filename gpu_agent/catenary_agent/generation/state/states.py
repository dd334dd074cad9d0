"""The states of a session at one agent, and the one table of the changes between them.

`SessionTable.go` makes every change and records it with its cause. The drawing in
docs/agent-session-states.md is made from this table.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterator, Mapping
from typing import NamedTuple


class SessionState(enum.StrEnum):
    """What a session does at an agent; it holds its block slots in every state but the last."""

    MIGRATING_IN = "migrating_in"
    """Its old ring generates; here it only takes up room and, in a move of caches, rows."""
    AWAITING_TOKEN = "awaiting_token"
    """Its caches are on their way, and so is the first token, which the prefill ring samples."""
    RECEIVING = "receiving"
    """Its caches are on their way, and nothing else is missing."""
    WAITING = "waiting"
    """It has nothing to compute until rows or a token come round the ring."""
    QUEUED = "queued"
    """It has tokens to compute, and is in one queue of its batcher."""
    COMPUTING = "computing"
    """It is part of the step that runs, or of the one whose output is being applied."""
    LEAVING = "leaving"
    """Nothing more of it is computed here; it ends once its caches have left."""
    CLOSED = "closed"
    """It is over, and its slots are free."""


WAITING, QUEUED, COMPUTING = SessionState.WAITING, SessionState.QUEUED, SessionState.COMPUTING
MIGRATING_IN, RECEIVING = SessionState.MIGRATING_IN, SessionState.RECEIVING
AWAITING_TOKEN = SessionState.AWAITING_TOKEN
LEAVING, CLOSED = SessionState.LEAVING, SessionState.CLOSED

FIRST_STATES: Mapping[SessionState, str] = {
    WAITING: "opened",
    MIGRATING_IN: "a move to here began",
    AWAITING_TOKEN: "opened to decode",
    RECEIVING: "opened to decode, between the first hop and the last",
}
"""The states in which a session may begin, and what happened."""
TRANSITIONS: Mapping[SessionState, Mapping[SessionState, str]] = {
    MIGRATING_IN: {
        RECEIVING: "handed over, caches are missing",
        WAITING: "its tokens are to be read, or were",
        LEAVING: "moves on",
        CLOSED: "move given up",
    },
    AWAITING_TOKEN: {RECEIVING: "first token", LEAVING: "moves on", CLOSED: "ended"},
    RECEIVING: {WAITING: "all caches are here", LEAVING: "moves on", CLOSED: "ended"},
    WAITING: {QUEUED: "has tokens to compute", LEAVING: "handed over", CLOSED: "ended"},
    QUEUED: {COMPUTING: "step began", LEAVING: "closed while it moves", CLOSED: "ended"},
    COMPUTING: {WAITING: "step done", LEAVING: "prompt done", CLOSED: "last token, or failed"},
    LEAVING: {CLOSED: "caches have left"},
    CLOSED: {},
}
"""Every change there is, and what happened."""
_ROUND = frozenset({WAITING, QUEUED, COMPUTING})
"""The states that a session passes through once per token."""
_LATEST, _MILESTONES = 8, 16


class Cause(NamedTuple):
    """The reason of changes: one event, one step, or the passing of time."""

    kind: str
    number: int
    """Counts everything that happened at this agent."""
    at_ns: int

    def __str__(self) -> str:
        return f"{self.kind}-{self.number}"


class Transition(NamedTuple):
    """One change of a session's state."""

    before: SessionState | None
    """None at the beginning."""
    state: SessionState
    cause: Cause

    def __str__(self) -> str:
        return f"{self.before or 'new'} -> {self.state} ({self.cause})"


class History:
    """The latest changes of a session's state, and the latest that are not part of every token."""

    __slots__ = ("_latest", "_milestones")

    def __init__(self) -> None:
        self._latest: deque[tuple[SessionState | None, SessionState, Cause]] = deque(maxlen=_LATEST)
        self._milestones = self._latest.__class__(maxlen=_MILESTONES)

    def add(self, before: SessionState | None, state: SessionState, cause: Cause) -> None:
        """Records a change."""
        change = (before, state, cause)
        self._latest.append(change)
        if before not in _ROUND or state not in _ROUND:
            self._milestones.append(change)

    def __iter__(self) -> Iterator[Transition]:
        older = [each for each in self._milestones if each not in self._latest]
        return (Transition(*each) for each in (*older, *self._latest))

    def __repr__(self) -> str:
        return "; ".join(map(str, self))


class IllegalTransitionError(Exception):
    """A change of state that the table does not have, which is a bug."""

    def __init__(self, session_id: int, change: Transition, history: History) -> None:
        super().__init__(f"session {session_id}: {change} after {history}")
        self.session_id = session_id
