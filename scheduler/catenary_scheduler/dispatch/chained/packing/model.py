"""The sessions of one model in one epoch: the chain of each, and what it will hold."""

from __future__ import annotations

from collections.abc import Mapping

from catenary_scheduler.dispatch.chained.chain_state import ChainState
from catenary_scheduler.dispatch.chained.packing.kinds import pools_of
from catenary_scheduler.dispatch.chained.packing.pool import ChainPool, ProposedMove
from catenary_scheduler.dispatch.chained.packing.view import (
    PackedChain,
    SessionSnapshot,
    blocks_of,
    size_of,
)
from catenary_scheduler.dispatch.chained.packing_rules import PackingRules
from catenary_scheduler.dispatch.chained.placement.workers import GAMMA, UNKNOWN
from catenary_scheduler.dispatch.chained.queues.model_queue import ModelQueue
from catenary_scheduler.dispatch.chained.tracking import SequenceRequest, Session
from catenary_services.domain.ids import AgentId, Nanoseconds, RequestId
from catenary_services.domain.latency import LatencyLines
from catenary_services.domain.packing import PackingGoal
from catenary_services.domain.plan import ChainHop, ModelPlan

_FIRST_GROWTH = 32
"""Tokens that a session is taken to get in an epoch, before any was watched for one."""
_SMOOTHING = 0.2
_NO_SHARE = 0.0


class _Watched:
    """Facts of a session that are remembered from one epoch to the next."""

    __slots__ = ("generated", "growth", "moved_ns", "moves")

    def __init__(self, generated: int) -> None:
        self.generated = generated
        self.growth = 0
        """Tokens it got in the previous epoch; 0: it was not watched for a whole one."""
        self.moves = 0
        self.moved_ns: Nanoseconds = 0


class ModelPacking:
    """Packing of one model that has a goal.

    Attributes:
        goal: The goal for which its sessions are moved.
        lines: Latency lines of its chains in the plan, by name.
    """

    def __init__(self, rules: PackingRules) -> None:
        self.goal: PackingGoal = "off"
        self.lines: dict[str, LatencyLines | None] = {}
        self._rules = rules
        self._blocks: dict[tuple[ChainHop, ...], int] = {}
        self._offered: list[ChainState] = []
        self._model_queue: ModelQueue | None = None
        self._chains: dict[ChainState, PackedChain] = {}
        self._pools: list[ChainPool] = []
        self._sharing: dict[AgentId, int] = {}
        self._watched: dict[RequestId, _Watched] = {}
        self._growth = 0.0
        """Tokens that a session gets in an epoch, smoothed over all sessions; 0: not known."""
        self._is_stale = True

    def activate(self, plan: ModelPlan) -> None:
        """Takes goal and capacities of a plan."""
        self.goal = plan.packing
        self._blocks = {
            chain.hops: blocks_of(chain, plan.session_tokens)
            for chain in plan.chains
            if chain.role != "prefill"
        }
        self.lines = {chain.chain_id: chain.lines for chain in plan.chains}
        self._is_stale = True

    @property
    def chains(self) -> int:
        """Number of chains that sessions can be on."""
        return len(self._chains)

    @property
    def in_use(self) -> int:
        """Number of chains that held sessions when they were last looked at."""
        return sum(pool.in_use for pool in self._pools)

    @property
    def needed(self) -> int:
        """Number of chains that the sessions would need if they were packed anew."""
        return sum(pool.needed for pool in self._pools)

    def sharing(self, chain: PackedChain) -> int:
        """Returns how many chains share an agent with this one, itself included."""
        return max((self._sharing.get(hop.agent, 1) for hop in chain.route.hops), default=1)

    # An epoch

    def begin(self, model_queue: ModelQueue, classes: Mapping[AgentId, str]) -> None:
        """Begins an epoch; its sessions are added by `see`.

        Args:
            model_queue: The queue of the model.
            classes: Device classes of the agents.
        """
        self._model_queue = model_queue
        if model_queue.placer is not None:
            model_queue.placer.preferred = self.preferred if self.goal == "pack" else None
        if self._is_stale or model_queue.offered != self._offered:
            self._is_stale = False
            self._offered = list(model_queue.offered)
            self._make_pools(classes)
        for chain in self._chains.values():
            chain.held = chain.sessions = chain.tokens = 0
        for pool in self._pools:
            pool.seen = {}

    def see(self, sequence: SequenceRequest, session: Session, now: Nanoseconds) -> None:
        """Adds the session of a request; one on a chain that may not be used is ignored."""
        move = session.moving
        source = self._chains.get(session.route) if session.route is not None else None
        chain = source
        if move is not None:
            goes_to = move.target.route
            chain = self._chains.get(goes_to) if goes_to is not None else None
        watched = self._watched.get(sequence.request)
        if watched is None:
            watched = self._watched[sequence.request] = _Watched(sequence.generated_tokens)
        else:
            self._grown(watched, sequence.generated_tokens)
        if chain is None:
            if source is not None:
                source.holds(sequence.tokens, source.least)
            return
        growth = watched.growth or self._usual_growth
        tokens = self._expected(sequence, growth)
        size = size_of(chain, tokens, self._share(sequence, chain))
        rests = move is not None or now - watched.moved_ns < self._rules.rest_after(watched.moves)
        seen = SessionSnapshot(sequence, session, chain, growth, size, rests)
        self._pools[chain.pool].seen[sequence.request] = seen
        chain.holds(sequence.tokens, size)
        if move is not None and source is not None:
            source.holds(sequence.tokens, size)

    def wanted(self) -> list[ProposedMove]:
        """Returns the wanted moves."""
        if len(self._watched) > 2 * sum(len(pool.seen) for pool in self._pools) + 64:
            self._forget()
        return [each for pool in self._pools for each in pool.wanted()]

    def preferred(self, tokens: int) -> ChainState | None:
        """Returns the chain for a new session with so many tokens; None if any will do."""
        for pool in self._pools:
            chain = pool.preferred(tokens + self._rules.ahead * self._usual_growth)
            if chain is not None:
                return chain.route
        return None

    def started(self, sequence: SequenceRequest, session: Session) -> None:
        """Notes that a session has begun between two epochs."""
        chain = self._chains.get(session.route) if session.route is not None else None
        if chain is not None:
            tokens = self._expected(sequence, self._usual_growth)
            self._pools[chain.pool].started(sequence.request, chain, tokens)

    def moved(self, seen: SessionSnapshot, now: Nanoseconds) -> None:
        """Notes that a session begins to move."""
        watched = self._watched[seen.sequence.request]
        watched.moves += 1
        watched.moved_ns = now

    def take_faults(self) -> int:
        """Returns how often a packer was made anew since the last call."""
        faults = 0
        for pool in self._pools:
            faults, pool.faults = faults + pool.faults, 0
        return faults

    # Inside

    @property
    def _usual_growth(self) -> int:
        """Returns the tokens that a session of unknown growth is taken to get in an epoch."""
        return round(self._growth) or _FIRST_GROWTH

    def _expected(self, sequence: SequenceRequest, growth: int) -> int:
        """Returns the tokens a session will have cached when it counts (G14), within its limit."""
        most = sequence.event.prompt_tokens + sequence.event.max_tokens
        return min(sequence.tokens + self._rules.ahead * growth, most)

    def _make_pools(self, classes: Mapping[AgentId, str]) -> None:
        chains = []
        self._chains, self._sharing = {}, {}
        for route in self._offered:
            blocks = self._blocks.get(route.hops)
            if blocks is None:
                continue
            chain = PackedChain(route, blocks)
            chain.number = len(self._chains)
            self._chains[route] = chain
            devices = {classes.get(hop.agent, "") for hop in route.hops}
            kind = (route.role, *sorted(devices))
            chains.append((chain, kind))
            for agent in {hop.agent for hop in route.hops}:
                self._sharing[agent] = self._sharing.get(agent, 0) + 1
        rules = self._rules
        self._pools = pools_of(self.goal, chains, rules.similar, rules.balance_threshold)

    def _grown(self, watched: _Watched, generated: int) -> None:
        growth = generated - watched.generated
        watched.generated = generated
        if growth > 0:
            watched.growth = growth
            if self._growth:
                self._growth += _SMOOTHING * (growth - self._growth)
            else:
                self._growth = float(growth)

    def _share(self, sequence: SequenceRequest, chain: PackedChain) -> float:
        """Returns a session's share of the steps of a chain; 0 if their time is not known."""
        placer = self._model_queue.placer if self._model_queue is not None else None
        held = placer.loads.running_of(sequence.request) if placer is not None else None
        if placer is None or held is None:
            return _NO_SHARE
        worker, running = held
        if worker.lines is UNKNOWN:
            return _NO_SHARE
        return chain.share_of_step(running, worker.lines, GAMMA, placer.adaptation.theta)

    def _forget(self) -> None:
        """Drops what is remembered of sessions that are over."""
        here = {item for pool in self._pools for item in pool.seen}
        self._watched = {item: each for item, each in self._watched.items() if item in here}
