"""Records of every open request and every session, so that none is ever lost."""

from __future__ import annotations

from enum import StrEnum
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Any, Final

from catenary_scheduler.dispatch.chained.chain_state import ChainState
from catenary_scheduler.dispatch.chained.states import (
    DECODING,
    DELIVERING,
    MIGRATING_OUT,
    NEW_REQUEST,
    NEW_SESSION,
    RequestState,
    SessionState,
    Transition,
)
from catenary_scheduler.dispatch.events import (
    Event,
    MoveMode,
    RequestCompleted,
    SessionFailed,
    SessionMoved,
    SessionRequested,
    SessionsClosed,
    SessionsProgressed,
)
from catenary_scheduler.dispatch.placing.prefix_directory import (
    NOTHING,
    CachedTokens,
    PrefixDirectory,
)
from catenary_services.domain.ids import AgentId, ModelKey, Nanoseconds, RequestId, SessionId
from catenary_services.domain.plan import ChainHop

if TYPE_CHECKING:
    from catenary_scheduler.dispatch.placing.best_fit import PlacementRequest

_ANSWERS: Final = (
    RequestCompleted,
    SessionFailed,
    SessionMoved,
    SessionsClosed,
    SessionsProgressed,
)
"""Events by which gateways and agents say what became of orders."""
_FEWEST_STALE = 64


class CauseEvent:
    """An event that caused changes of states."""

    __slots__ = ("at_ns", "event_type", "number")

    def __init__(self, number: int, at_ns: Nanoseconds, event_type: type[Event]) -> None:
        self.number = number
        """Number of the event, counted since the scheduler leads."""
        self.at_ns = at_ns
        self.event_type = event_type

    @property
    def kind(self) -> str:
        return self.event_type.__name__

    @property
    def is_answer(self) -> bool:
        """True if agents or gateways say by it what became of an order."""
        return issubclass(self.event_type, _ANSWERS)


class StoryStep:
    """A change of the state of a request or session."""

    __slots__ = ("before", "cause", "ordered", "session", "way", "why")

    def __init__(
        self,
        cause: CauseEvent,
        ordered: int,
        session: SessionId,
        before: StrEnum,
        way: Transition[Any],
        why: str,
    ) -> None:
        self.cause = cause
        self.ordered = ordered
        """`Session.ordered` at that moment."""
        self.session = session
        """The session that changed; 0: the request did."""
        self.before = before
        self.way = way
        self.why = why
        """Particulars in words."""

    @property
    def answers(self) -> int:
        """Number of the earlier event that caused the order which the cause answers; 0: none."""
        cause = self.cause
        return self.ordered if cause.is_answer and self.ordered < cause.number else 0


class SequenceRequest:
    """An admitted request, until it is answered."""

    __slots__ = (
        "again",
        "arrival_number",
        "arrived",
        "check_later",
        "deadline",
        "event",
        "failures",
        "forced",
        "generated_tokens",
        "heard",
        "model",
        "must_start",
        "placement_request",
        "preempted",
        "prefixes",
        "priority",
        "request",
        "restarts",
        "route",
        "session",
        "state",
        "story",
        "timer",
        "token_ns",
        "turn",
    )

    def __init__(
        self, event: SessionRequested, arrival_number: int, arrived: Nanoseconds = 0
    ) -> None:
        self.state: RequestState = NEW_REQUEST
        self.story: list[StoryStep] = []
        """Changes of its state and of those of its sessions."""
        self.event = event
        self.request: RequestId = event.request
        self.model: ModelKey = event.model
        self.deadline: Nanoseconds = event.deadline_ns
        self.priority = event.priority
        self.arrival_number = arrival_number
        """Rank of the request in the order of arrival."""
        self.arrived = arrived
        """Moment at which its gateway got the request."""
        self.generated_tokens = 0
        """Tokens of its answer, as far as reported."""
        self.placement_request: PlacementRequest | None = None
        """Needs of the request towards a worker; set while it waits, and kept after it was
        placed."""
        self.must_start: Nanoseconds = 0
        """Moment from which on it is placed wherever there is room."""
        self.forced = False
        """True if it was placed although no worker met all constraints."""
        self.restarts = 0
        """Number of sessions it has lost."""
        self.failures: tuple[tuple[AgentId, SessionId], ...] = ()
        """The devices that failed to compute it, each with the session that failed."""
        self.heard: Nanoseconds = 0
        """Moment at which it last got a token, or was started."""
        self.token_ns: Nanoseconds = 0
        """Duration of one of its tokens so far; 0 if it is not known."""
        self.preempted = 0
        """Number of sessions it had to give up because others grew, which was nobody's fault."""
        self.again = False
        """True if it had a session before, which puts it ahead of requests that had none."""
        self.session: Session | None = None
        """The session that generates for it; None unless it runs."""
        self.route: ChainState | None = None
        """The route at which it waits, if it is bound to one."""
        self.prefixes: PrefixDirectory | None = None
        """Beliefs about what chains have of its prompt; set when it waits."""
        self.turn = 0
        """Number of its entry in the central queue; 0 if it does not wait there."""
        self.check_later: Nanoseconds | None = None
        """Moment at which its session counts as lost unless something is heard; None: no such
        moment."""
        self.timer: Nanoseconds = 0
        """Moment at which it must be looked at even without an event."""

    @property
    def tokens(self) -> int:
        """Tokens that its session has cached, from its prompt and its answer, as reported."""
        return self.event.prompt_tokens + self.generated_tokens

    def common_tokens(self) -> int:
        """Returns how many of its first tokens are those of many requests."""
        if self.prefixes is None:
            return 0
        return self.prefixes.common_tokens(self.event.prefix_hashes)

    def cached(self) -> CachedTokens:
        """Returns how many of its first tokens chains should have cached, by their hops.

        Chains that have none are left out. At least one token is left to be computed.
        """
        if self.prefixes is None or not self.event.prefix_hashes:
            return NOTHING
        return self.prefixes.tokens_on(self.event.prefix_hashes, self.tokens - 1)


class Session:
    """A session that holds slots, whichever scheduler started it."""

    __slots__ = (
        "attempts",
        "believed_tokens",
        "carried_tokens",
        "closed_move",
        "failed_moves",
        "hops",
        "move_after",
        "moving",
        "ordered",
        "prefill",
        "prefill_agents",
        "route",
        "sequence",
        "session_id",
        "state",
        "story",
        "was",
    )

    def __init__(
        self, session_id: SessionId, route: ChainState | None, story: list[StoryStep]
    ) -> None:
        self.session_id = session_id
        self.state: SessionState = NEW_SESSION
        self.story = story
        """Changes of its state: the story of its request, or its own if it has none."""
        self.sequence: SequenceRequest | None = None
        """The request it generates for, in the states `states.OWNED`; else None."""
        self.prefill: ChainState | None = None
        """The chain of the prompt (split phase), where it also counts until its caches are handed
        over."""
        self.hops: tuple[ChainHop, ...] = route.hops if route is not None else ()
        if route is not None and route.halves is not None:
            self.prefill, route = route.halves
        self.prefill_agents: tuple[AgentId, ...] = ()
        """Agents of the prompt's chain. They report unasked that they are done with it, and it goes
        on."""
        if self.prefill is not None:
            self.prefill_agents = tuple(hop.agent for hop in self.prefill.hops)
        self.route = route
        """The route on which it counts; None if it holds nothing any more, or its hops are not
        known."""
        self.ordered = 0
        """Number of the event that caused the latest order about it; 0: this dispatcher gave
        none."""
        self.attempts = 0
        """Number of times that its agents were told to close it."""
        self.carried_tokens = 0
        """Tokens of the answer that were known when it began: of sessions that were lost, or of
        the one that became this one."""
        self.believed_tokens = 0
        """Tokens that its chain was taken to have cached when it began."""
        self.moving: Move | None = None
        """The move that takes it to another chain while it generates; None if it does not move. The
        move that ends in a session is found in `MoveTable`."""
        self.was: SessionId | None = None
        """The session that became this one by a move; None if none did."""
        self.closed_move: SessionId | None = None
        """The successor it was to have when an agent said unasked that it is over."""
        self.failed_moves = 0
        """Number of failed moves in a row."""
        self.move_after: Nanoseconds = 0
        """Moment before which it is not moved again as a misplaced session."""

    @property
    def runs(self) -> bool:
        """True if it got tokens, so that its prompt is done."""
        sequence = self.sequence
        if self.state is DELIVERING and sequence is not None:
            return sequence.generated_tokens > self.carried_tokens
        return self.state is DECODING or self.state is MIGRATING_OUT

    def ends_at(self, agent: AgentId) -> bool:
        """True if its end on this agent is its end everywhere."""
        if agent in self.prefill_agents:
            return False
        # Of an adopted session only the ring that generates is known.
        return not self.hops or any(hop.agent == agent for hop in self.hops)


class Move:
    """A session on its way from one chain to another.

    Invariant: `source` is the session of `sequence`, until the move is over either way.
    """

    __slots__ = ("agents", "deadline", "mode", "reason", "sequence", "source", "target")

    def __init__(
        self,
        sequence: SequenceRequest,
        source: Session,
        target: Session,
        mode: MoveMode,
        reason: str,
        deadline: Nanoseconds,
    ) -> None:
        self.sequence = sequence
        self.source = source
        """The session that moves, and that goes on if it cannot be moved."""
        self.target = target
        """The session that it becomes, which holds its slots from the beginning."""
        self.mode: MoveMode = mode
        self.reason = reason
        """The purpose of the move, e.g. "packing"."""
        self.deadline = deadline
        """Moment at which the move counts as failed."""
        hops = source.hops + target.hops
        self.agents: tuple[AgentId, ...] = tuple(dict.fromkeys([hop.agent for hop in hops]))
        """The agents of both chains, each once."""


class RequestTimers:
    """Moments at which requests must be looked at even without an event."""

    def __init__(self) -> None:
        self._heap: list[tuple[Nanoseconds, int, SequenceRequest]] = []
        self._count = 0

    def set(self, sequence: SequenceRequest, moment: Nanoseconds, open_sequences: int) -> None:
        """Makes `due` return this request at `moment`, and not before."""
        sequence.timer = moment
        self._count += 1
        heappush(self._heap, (moment, self._count, sequence))
        # Requests end long before their deadlines: their entries must be swept or they pile up.
        if len(self._heap) > 2 * open_sequences + _FEWEST_STALE:
            self._heap = [entry for entry in self._heap if entry[2].timer == entry[0]]
            heapify(self._heap)

    def next(self) -> Nanoseconds | None:
        """Returns the next moment at which `due` has something to return; None: there is none."""
        heap = self._heap
        while heap:
            moment, _, sequence = heap[0]
            if sequence.timer == moment:
                return moment
            heappop(heap)
        return None

    def due(self, now: Nanoseconds) -> list[SequenceRequest]:
        """Removes and returns the requests whose moment has come."""
        found = []
        while (moment := self.next()) is not None and moment <= now:
            sequence = heappop(self._heap)[2]
            sequence.timer = -1
            found.append(sequence)
        return found
