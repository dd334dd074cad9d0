"""What is known of every open request and every session, so that none is ever lost."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from catenary_scheduler.dispatch.chained.chain_state import ChainState
from catenary_scheduler.dispatch.events import MoveMode, SessionRequested
from catenary_services.domain.ids import AgentId, ModelKey, Nanoseconds, RequestId, SessionId
from catenary_services.domain.plan import ChainHop

if TYPE_CHECKING:
    from catenary_scheduler.dispatch.placing.best_fit import PlacementRequest

_FEWEST_STALE = 64


class SequenceRequest:
    """An admitted request, until it is answered.

    Invariant: it waits (in the line of its model) or it has a session, never both.
    """

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
        "priority",
        "request",
        "restarts",
        "route",
        "session",
        "timer",
        "token_ns",
        "turn",
    )

    def __init__(
        self, event: SessionRequested, arrival_number: int, arrived: Nanoseconds = 0
    ) -> None:
        self.event = event
        self.request: RequestId = event.request
        self.model: ModelKey = event.model
        self.deadline: Nanoseconds = event.deadline_ns
        self.priority = event.priority
        self.arrival_number = arrival_number
        """Order of arrival."""
        self.arrived = arrived
        """When its gateway got it."""
        self.generated_tokens = 0
        """Of its answer, as far as reported."""
        self.placement_request: PlacementRequest | None = None
        """What it needs of a worker while it waits, and since it was placed."""
        self.must_start: Nanoseconds = 0
        """From then on it is placed wherever there is room."""
        self.forced = False
        """It was placed although no worker met all constraints."""
        self.restarts = 0
        """Sessions it has lost."""
        self.failures: tuple[tuple[AgentId, SessionId], ...] = ()
        """Devices that failed to compute it, and in which session."""
        self.heard: Nanoseconds = 0
        """When it got a token last, or was started."""
        self.token_ns: Nanoseconds = 0
        """How long one of its tokens took so far; 0 if that is not known."""
        self.preempted = 0
        """Sessions it had to give up because others grew; no fault of anybody's."""
        self.again = False
        """It had a session before, so it is ahead of those that have not."""
        self.session: Session | None = None
        self.route: ChainState | None = None
        """Where it waits, if it is bound to a route."""
        self.turn = 0
        """Its entry in the central queue; 0 if it does not wait there."""
        self.check_later: Nanoseconds | None = None
        """When its session is lost, unless something is heard."""
        self.timer: Nanoseconds = 0
        """When it must be looked at although nothing happened."""

    @property
    def tokens(self) -> int:
        """Of its prompt and its answer so far, as reported: what its session has cached."""
        return self.event.prompt_tokens + self.generated_tokens


class Session:
    """A session that holds slots, whoever started it."""

    __slots__ = (
        "arriving",
        "attempts",
        "carried_tokens",
        "closed_move",
        "closing",
        "failed_moves",
        "hops",
        "left",
        "move_after",
        "moving",
        "prefill",
        "prefill_agents",
        "route",
        "runs",
        "sequence",
        "session_id",
        "was",
    )

    def __init__(
        self, session_id: SessionId, sequence: SequenceRequest | None, route: ChainState | None
    ) -> None:
        self.session_id = session_id
        self.sequence = sequence
        """None if nobody waits for it, or nobody has claimed it yet."""
        self.prefill: ChainState | None = None
        """Split phase: where it counts, too, until its caches are handed over."""
        self.hops: tuple[ChainHop, ...] = route.hops if route is not None else ()
        if route is not None and route.halves is not None:
            self.prefill, route = route.halves
        self.prefill_agents: tuple[AgentId, ...] = ()
        """They say unasked that they are done with it, and it goes on."""
        if self.prefill is not None:
            self.prefill_agents = tuple(hop.agent for hop in self.prefill.hops)
        self.route = route
        """Where it counts; None if it holds nothing any more, or its hops are not known."""
        self.closing = False
        """Its agents were told to close it."""
        self.attempts = 0
        """How often they were told."""
        self.left = False
        """An agent said unasked that it is over there."""
        self.runs = False
        """It got tokens: its prompt is done."""
        self.carried_tokens = 0
        """Of its answer, those that were known when it began, from sessions that were lost."""
        self.moving: Move | None = None
        """It generates, and is on its way to another chain."""
        self.arriving: Move | None = None
        """It does not generate yet: another session is on its way here. `sequence` is None then."""
        self.was: SessionId | None = None
        """What it was before it moved here."""
        self.closed_move: SessionId | None = None
        """What it was to become when an agent said unasked that this is over."""
        self.failed_moves = 0
        """How often in a row it could not be moved."""
        self.move_after: Nanoseconds = 0
        """As a misplaced session it is not moved before."""

    def ends_at(self, agent: AgentId) -> bool:
        """True if it is over everywhere once it is over on this agent."""
        if agent in self.prefill_agents:
            return False
        # Of one that was adopted only the ring that generates is known.
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
        """What it is, and goes on to be if it cannot be moved."""
        self.target = target
        """What it becomes; it holds its slots from the beginning."""
        self.mode: MoveMode = mode
        self.reason = reason
        """What it is moved for."""
        self.deadline = deadline
        """When it counts as failed."""
        hops = source.hops + target.hops
        self.agents: tuple[AgentId, ...] = tuple(dict.fromkeys([hop.agent for hop in hops]))
        """Of both chains, each once."""


class RequestTimers:
    """Moments at which requests must be looked at."""

    def __init__(self) -> None:
        self._heap: list[tuple[Nanoseconds, int, SequenceRequest]] = []
        self._count = 0

    def set(self, sequence: SequenceRequest, moment: Nanoseconds, open_sequences: int) -> None:
        """Has `due` return this request at `moment`, and not before."""
        sequence.timer = moment
        self._count += 1
        heappush(self._heap, (moment, self._count, sequence))
        # Requests end long before their deadlines: without a sweep their entries would pile up.
        if len(self._heap) > 2 * open_sequences + _FEWEST_STALE:
            self._heap = [entry for entry in self._heap if entry[2].timer == entry[0]]
            heapify(self._heap)

    def next(self) -> Nanoseconds | None:
        """When `due` has something to return."""
        heap = self._heap
        while heap:
            moment, _, sequence = heap[0]
            if sequence.timer == moment:
                return moment
            heappop(heap)
        return None

    def due(self, now: Nanoseconds) -> list[SequenceRequest]:
        """Returns the requests whose moment has come, and forgets these moments."""
        found = []
        while (moment := self.next()) is not None and moment <= now:
            sequence = heappop(self._heap)[2]
            sequence.timer = -1
            found.append(sequence)
        return found
