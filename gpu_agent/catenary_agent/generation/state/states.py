"""The states of a session at one agent, and the one table of the changes between them.

`SessionTable.go` makes every change and records it with its cause. The drawing in
docs/agent-session-states.md is made from this table.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Mapping


class SessionState(enum.StrEnum):
    """A session's state at an agent; it holds its block slots in every state but the last."""

    MIGRATING_IN = "migrating_in"
    """The old ring generates; the session takes up room here and, in a move of caches, rows."""
    AWAITING_TOKEN = "awaiting_token"
    """The caches are on their way, and so is the first token, which the prefill ring samples."""
    RECEIVING = "receiving"
    """The caches are on their way, and nothing else is missing."""
    WAITING = "waiting"
    """The session has nothing to compute until rows or a token come round the ring."""
    QUEUED = "queued"
    """The session has tokens to compute, and is in one queue of its batcher."""
    COMPUTING = "computing"
    """The session is part of the step that runs, or whose output is being applied."""
    LEAVING = "leaving"
    """Nothing more of it is computed here; it ends once its caches have left."""
    CLOSED = "closed"
    """The session is over, and its slots are free."""


WAITING, QUEUED, COMPUTING = SessionState.WAITING, SessionState.QUEUED, SessionState.COMPUTING
MIGRATING_IN, RECEIVING = SessionState.MIGRATING_IN, SessionState.RECEIVING
AWAITING_TOKEN = SessionState.AWAITING_TOKEN
LEAVING, CLOSED = SessionState.LEAVING, SessionState.CLOSED

FIRST_STATES: Mapping[SessionState, str] = {
    WAITING: "opened",
    MIGRATING_IN: "a move to here began",
    AWAITING_TOKEN: "opened to decode",
    RECEIVING: "opened to share a prompt, or to decode between the first hop and the last",
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
ROUND = {each: next(iter(_ROUND & TRANSITIONS[each].keys())) for each in _ROUND}
"""The changes among them that generating one token takes: the state that follows each."""
_LATEST, _MILESTONES = 8, 16

Cause = tuple[str, int, int]
"""The reason of changes: the kind of an event, "StepDone" or the like; its number among everything
that happened at this agent; and the moment, in monotonic nanoseconds."""
Transition = tuple[SessionState | None, SessionState, Cause]
"""One change: the state before it, None for a new session; the state after it; and its cause."""


class History:
    """The latest changes of a session's state, and the latest that not every token takes."""

    __slots__ = ("latest", "milestones")

    def __init__(self) -> None:
        self.latest: deque[Transition] = deque(maxlen=_LATEST)
        self.milestones: deque[Transition] = deque(maxlen=_MILESTONES)

    def add(self, before: SessionState | None, state: SessionState, cause: Cause) -> None:
        """Records a change that is not part of every token."""
        self.latest.append((before, state, cause))
        self.milestones.append(self.latest[-1])

    def __repr__(self) -> str:
        older = [each for each in self.milestones if each not in self.latest]
        return "; ".join(
            f"{before or 'new'} -> {state} ({kind}-{number})"
            for before, state, (kind, number, _) in (*older, *self.latest)
        )


class InvalidTransitionError(Exception):
    """A change of state that the table does not have, which is a bug."""

    def __init__(
        self, session_id: int, state: SessionState, cause: Cause, history: History
    ) -> None:
        kind, number, _ = cause
        super().__init__(f"session {session_id}: -> {state} ({kind}-{number}) after {history}")
        self.session_id = session_id
