"""The states of requests and of sessions, and every way from one to another.

A request waits or runs; it runs while a session is its own. A session is its booking on one chain,
and a request has several of them over time, two while it moves. A state changes only by one of the
transitions below (`SessionTable.request_goes`, `session_goes`). docs/session-states.md draws them.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final, Generic, TypeVar

S = TypeVar("S", bound=StrEnum)


class RequestState(StrEnum):
    """The states of an admitted request."""

    NEW = "new"
    """Admitted in the event in hand."""
    WAITING = "waiting"
    """The request is in the queue of its model."""
    RESTING = "resting"
    """Out of the queue: it lost a session, and every chain failed one a moment ago."""
    RUNNING = "running"
    """A session generates for it."""
    ANSWERED = "answered"
    """Forgotten here: its gateway has everything, or was told why not."""


class SessionState(StrEnum):
    """The states of a session."""

    NEW = "new"
    """Not known before the event in hand."""
    UNCLAIMED = "unclaimed"
    """Found on agents or in the stored book; no gateway has claimed it yet."""
    STARTING = "starting"
    """The session has given its request no token yet: it is being opened, or runs the prompt."""
    DECODING = "decoding"
    """The session gave its request tokens, so that all its agents have it."""
    MIGRATING_OUT = "migrating out"
    """The session generates, and is about to become another one."""
    MIGRATING_IN = "migrating in"
    """Another session is about to become it."""
    DELIVERING = "delivering"
    """An agent said unasked that it is over; the word of its gateway is awaited."""
    CLOSING = "closing"
    """The agents were told to free its slots, which stay booked until they have."""
    CLOSED = "closed"
    """Forgotten here: no agent holds anything of it."""


# Bound once: Python 3.11 calls a function each time a member is read from its class, and these are
# read for every token and every end.
STARTING: Final = SessionState.STARTING
DECODING: Final = SessionState.DECODING
MIGRATING_OUT: Final = SessionState.MIGRATING_OUT
MIGRATING_IN: Final = SessionState.MIGRATING_IN
DELIVERING: Final = SessionState.DELIVERING


class Transition(Generic[S]):
    """A way from one of some states to another.

    Attributes:
        name: What happened, in words.
        sources: The states in which that may happen.
        target: The state that follows.
    """

    __slots__ = ("name", "sources", "target")

    def __init__(self, name: str, sources: tuple[S, ...], target: S) -> None:
        self.name = name
        self.sources = sources
        self.target = target


# Requests

_R = RequestState
NEW_REQUEST: Final = _R.NEW
_OPEN = (_R.WAITING, _R.RESTING, _R.RUNNING)

ARRIVED: Final = Transition("arrived", (_R.NEW,), _R.WAITING)
ADOPTED: Final = Transition("adopted with its session", (_R.NEW,), _R.RUNNING)
NOT_ADOPTED: Final = Transition("its session cannot go on", (_R.NEW, _R.RUNNING), _R.WAITING)
PLACED: Final = Transition("placed", (_R.WAITING,), _R.RUNNING)
PLACED_ANEW: Final = Transition("place taken back", (_R.RUNNING,), _R.WAITING)
LOST: Final = Transition("session lost", (_R.RUNNING,), _R.WAITING)
PREEMPTED: Final = Transition("preempted", (_R.RUNNING,), _R.WAITING)
SENT_AGAIN: Final = Transition("sent again without its session", (_R.RUNNING,), _R.WAITING)
SUSPENDED: Final = Transition("every chain failed lately", (_R.WAITING,), _R.RESTING)
RESUMED: Final = Transition("a chain may be used again", (_R.RESTING,), _R.WAITING)
COMPLETED: Final = Transition("completed", _OPEN, _R.ANSWERED)
CANCELLED: Final = Transition("cancelled", _OPEN, _R.ANSWERED)
REJECTED: Final = Transition("rejected", _OPEN, _R.ANSWERED)

REQUEST_TRANSITIONS: Final = (
    ARRIVED,
    ADOPTED,
    NOT_ADOPTED,
    PLACED,
    PLACED_ANEW,
    LOST,
    PREEMPTED,
    SENT_AGAIN,
    SUSPENDED,
    RESUMED,
    COMPLETED,
    CANCELLED,
    REJECTED,
)

# Sessions

_S = SessionState
NEW_SESSION: Final = _S.NEW
OWNED: Final = (_S.STARTING, _S.DECODING, _S.MIGRATING_OUT, _S.DELIVERING)
"""The states of the session of a request."""

STARTED: Final = Transition("started", (_S.NEW,), _S.STARTING)
FOUND: Final = Transition("found", (_S.NEW,), _S.UNCLAIMED)
CLAIMED: Final = Transition("claimed", (_S.NEW, _S.UNCLAIMED), _S.STARTING)
FIRST_TOKEN: Final = Transition("first token", (_S.STARTING,), _S.DECODING)
MOVE_BEGAN: Final = Transition("move began", (_S.DECODING,), _S.MIGRATING_OUT)
MOVE_FAILED: Final = Transition("move failed", (_S.MIGRATING_OUT,), _S.DECODING)
RESERVED: Final = Transition("reserved for a move", (_S.NEW,), _S.MIGRATING_IN)
TOOK_OVER: Final = Transition("took over", (_S.MIGRATING_IN, _S.UNCLAIMED), _S.STARTING)
ENDED: Final = Transition("ended", (_S.STARTING, _S.DECODING, _S.MIGRATING_OUT), _S.DELIVERING)
REQUEST_ENDED: Final = Transition("request answered", OWNED, _S.CLOSING)
GIVEN_UP: Final = Transition("given up", OWNED, _S.CLOSING)
MOVED_AWAY: Final = Transition("moved away", OWNED, _S.CLOSING)
NOT_TAKEN: Final = Transition("move given up", (_S.MIGRATING_IN,), _S.CLOSING)
UNWANTED: Final = Transition("unwanted", (_S.NEW, _S.UNCLAIMED), _S.CLOSING)
TAKEN_BACK: Final = Transition("taken back", (_S.STARTING,), _S.CLOSED)
RELEASED: Final = Transition("released", (_S.UNCLAIMED, _S.CLOSING), _S.CLOSED)

SESSION_TRANSITIONS: Final = (
    STARTED,
    FOUND,
    CLAIMED,
    FIRST_TOKEN,
    MOVE_BEGAN,
    MOVE_FAILED,
    RESERVED,
    TOOK_OVER,
    ENDED,
    REQUEST_ENDED,
    GIVEN_UP,
    MOVED_AWAY,
    NOT_TAKEN,
    UNWANTED,
    TAKEN_BACK,
    RELEASED,
)
