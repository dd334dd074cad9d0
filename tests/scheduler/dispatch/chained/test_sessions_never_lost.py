"""Whatever happens in whatever order: every request is answered once, no agent is ever overfull."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from catenary_lab.policies import policy_named
from catenary_scheduler.book import Reservation
from catenary_scheduler.dispatch.availability import Availability, Impairment
from catenary_scheduler.dispatch.breaker import BreakerConfig
from catenary_scheduler.dispatch.chained import ChainedConfig, ChainedDispatcher
from catenary_scheduler.dispatch.chained.placement.least_time_placer import LeastTimePlacer
from catenary_scheduler.dispatch.chained.states import SessionState
from catenary_scheduler.dispatch.events import (
    AdoptedSession,
    AgentJoined,
    AgentLost,
    CloseSessions,
    Command,
    Event,
    LatencyRefitted,
    MoveMode,
    MoveRequested,
    PlanActivated,
    Reject,
    RequestCancelled,
    RequestCompleted,
    SessionFailed,
    SessionMoved,
    SessionProgress,
    SessionRequested,
    SessionsClosed,
    SessionsHeld,
    SessionsProgressed,
    StartSession,
    Tick,
)
from catenary_services.domain.ids import (
    AgentId,
    GatewayId,
    ModelKey,
    PartitionKey,
    PlanId,
    RequestId,
    ResourceId,
    ServerId,
    SessionId,
)
from catenary_services.domain.latency import LatencyLines, TokenObjectives
from catenary_services.domain.plan import Agent, CacheCapacity, Chain, ChainHop, ModelPlan, Plan

CATS, DOGS = MODELS = (ModelKey("cats", "1"), ModelKey("dogs", "1"))
AGENTS = {AgentId(f"a{i}"): Agent(AgentId(f"a{i}"), "x", ServerId("s"), 1, 1) for i in range(5)}
CONFIG = ChainedConfig(
    checked=True,
    max_queued=6,
    max_requests=16,
    max_restarts=3,
    deadline_grace_ns=40,
    delivery_grace_ns=60,
    claim_grace_ns=90,
    close_patience_ns=50,
    close_attempts=10**6,  # agents here always answer in the end
    suspicion_ns=20,
    longest_suspicion_ns=80,
    breaker=BreakerConfig(first_pause_ns=30, longest_pause_ns=100),
    stall_ns=100,
    retry_after_ns=10,
    max_moves=3,
    max_moves_per_agent=2,
    move_deadline_ns=70,
    move_pause_ns=10,
    longest_move_pause_ns=40,
)


def hop(agent: int, model: ModelKey, hosted: tuple[int, int], entry: int | None = None) -> ChainHop:
    first = hosted[0] if entry is None else entry
    return ChainHop(AgentId(f"a{agent}"), PartitionKey(model, *hosted), first, hosted[1])


def served(model: ModelKey, *chains: Chain, fewer: int = 0) -> ModelPlan:
    slots: dict[tuple[AgentId, PartitionKey], int] = defaultdict(int)
    for chain in chains:
        for each in chain.hops:
            slots[each.agent, each.partition] += each.blocks * chain.capacity
    caches = tuple(CacheCapacity(*key, max(0, count - fewer)) for key, count in slots.items())
    return ModelPlan(model, 10**9, (), chains=chains, caches=caches, session_tokens=100)


def plan(*models: ModelPlan) -> Plan:
    return Plan(PlanId("p"), models)


SPLIT = (
    Chain("fast", (hop(0, CATS, (0, 3)), hop(1, CATS, (3, 6))), 2, 50),
    Chain("whole", (hop(2, CATS, (0, 6)),), 1, 80),
    Chain("middle", (hop(3, CATS, (0, 4)), hop(1, CATS, (3, 6), 4)), 2, 80),
)
OTHER = (
    Chain("new", (hop(0, CATS, (0, 6)),), 1, 40),
    Chain("kept", (hop(2, CATS, (0, 6)),), 2, 60),
    Chain("longer", (hop(0, CATS, (0, 3)), hop(4, CATS, (3, 6))), 1, 90),
)
HANDING_OVER = (
    Chain("p", (hop(0, CATS, (0, 3)), hop(4, CATS, (3, 6))), 2, 50, "prefill"),
    Chain("d1", (hop(2, CATS, (0, 6)),), 1, 80, "decode"),
    Chain("d2", (hop(3, CATS, (0, 4)), hop(1, CATS, (3, 6), 4)), 2, 80, "decode"),
)
BARK = (Chain("bark", (hop(1, DOGS, (0, 2)), hop(4, DOGS, (2, 4))), 2, 30),)
PLANS = (
    plan(served(CATS, *SPLIT), served(DOGS, *BARK)),
    plan(served(CATS, *OTHER)),
    plan(served(CATS, *SPLIT, fewer=2), served(DOGS, *BARK)),
    plan(served(DOGS, *BARK)),
    plan(),
    plan(served(CATS, *HANDING_OVER), served(DOGS, *BARK)),
)


CHAINS = ("fast", "whole", "middle", "new", "d1")


def every_hop(command: StartSession) -> tuple[ChainHop, ...]:
    return command.hops + command.decode_hops


class Cluster(RuleBasedStateMachine):
    policy = "jffc"

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000
        self.number = 0
        self.generated = 0
        """Of any answer at most: each time somebody gets tokens, more than anybody had."""
        self.epoch = 0
        self.plan = PLANS[0]
        self.alive: set[AgentId] = set(AGENTS)
        self.open: dict[RequestId, SessionRequested] = {}
        self.current: dict[RequestId, StartSession] = {}
        """The session each open request was told of last."""
        self.successors: dict[RequestId, StartSession] = {}
        """What it was told the session is to become."""
        self.untold: dict[AgentId, list[Event]] = {each: [] for each in AGENTS}
        """What agents are about to say of sessions they handed over, in this order."""
        self.failed_on: set[tuple[RequestId, AgentId]] = set()
        """Requests, and agents whose devices failed on them."""
        self.fresh: dict[RequestId, int] = {}
        """Requests that never had a session, by arrival."""
        self.held: dict[AgentId, dict[SessionId, ChainHop]] = {each: {} for each in AGENTS}
        """What agents really hold."""
        self.known: dict[SessionId, StartSession] = {}
        self.closing: dict[AgentId, set[SessionId]] = {each: set() for each in AGENTS}
        self.journal: dict[tuple[SessionId, ResourceId], Reservation] = {}
        self.start([])

    # ---- the scheduler ----

    def start(self, before: list[Reservation], later: Iterable[Event] = ()) -> None:
        self.epoch += 1
        self.availability = Availability(everything_loaded=True)
        self.dispatcher = ChainedDispatcher(
            CONFIG,
            availability=self.availability,
            first_session=self.epoch << 40,
            policy=policy_named(self.policy, random.Random(self.epoch).randrange),
        )
        self.journal = {(r.session, r.resource): r for r in before}
        self.dispatcher.restore(before)
        for event in later:
            self.tell(event)

    def tell(self, event: Event) -> None:
        for command in self.dispatcher.handle(event, self.now):
            self.obey(command)

    def obey(self, command: Command) -> None:
        if isinstance(command, Reject):
            if command.reason == "COMPUTE_FAILED":
                assert len([1 for request, _ in self.failed_on if request == command.request]) >= 2
            self.answered(command.request)  # raises if it was answered before
        elif isinstance(command, StartSession):
            self.opens(command)
        else:
            assert isinstance(command, CloseSessions)
            self.closing[command.agent] |= set(command.sessions)

    def opens(self, command: StartSession) -> None:
        event = self.open[command.request]
        chains = {chain.chain_id: chain for m in self.plan.models for chain in m.chains}
        names = command.chain_id.split("+")
        assert [chains[name].hops for name in names] == [
            hops for hops in (command.hops, command.decode_hops) if hops
        ]
        assert [chains[name].role for name in names] == ["prefill", "decode"] or len(names) == 1
        assert command.session not in self.known
        assert self.now < event.deadline_ns or command.moves is not None
        limits = {(c.agent, c.partition): c.block_slots for m in self.plan.models for c in m.caches}
        for each in every_hop(command):
            assert each.agent in self.alive
            there = [
                other.blocks
                for other in self.held[each.agent].values()
                if other.partition == each.partition
            ]
            assert sum(there) + each.blocks <= limits[each.agent, each.partition]
            self.held[each.agent][command.session] = each
        if self.policy == "jffc" and command.request in self.fresh:
            mine = (-event.priority, self.fresh[command.request])
            for other, arrived in self.fresh.items():
                if self.open[other].model == event.model:
                    assert mine <= (-self.open[other].priority, arrived)
        self.fresh.pop(command.request, None)
        self.known[command.session] = command
        if command.moves is None:
            self.current[command.request] = command
            self.successors.pop(command.request, None)
        else:
            successor = self.successors.get(command.request)
            if successor is not None and successor.session == command.moves:
                self.current[command.request] = successor  # it has taken over, without a token yet
            current = self.current[command.request]
            if current.session == command.moves:
                self.successors[command.request] = command
            else:  # an earlier move is done, and the scheduler has not been told
                assert current.moves == command.moves

    def answered(self, request: RequestId) -> None:
        del self.open[request]
        self.current.pop(request, None)
        self.successors.pop(request, None)
        self.fresh.pop(request, None)

    # ---- requests ----

    @rule(
        model=st.sampled_from([CATS, CATS, DOGS]),
        budget=st.integers(0, 700),
        priority=st.sampled_from([0, 0, 0, 1]),
        tokens=st.sampled_from([1, 2, 2, 2, 101]),
    )
    def arrive(self, model: ModelKey, budget: int, priority: int, tokens: int) -> None:
        self.number += 1
        request = RequestId(GatewayId("g"), self.number)
        event = SessionRequested(request, model, 1, tokens, self.now + budget, priority)
        self.open[request] = event
        self.fresh[request] = self.number
        self.tell(event)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.open)))
        self.answered(request)
        self.tell(RequestCancelled(request))

    # ---- sessions ----

    def some_session(self, data: st.DataObject) -> StartSession:
        return self.current[data.draw(st.sampled_from(sorted(self.current)))]

    @precondition(lambda self: self.current)
    @rule(data=st.data(), delivered=st.sampled_from([True, True, False]), seed=st.integers(0, 99))
    def end(self, data: st.DataObject, delivered: bool, seed: int) -> None:
        command = self.some_session(data)
        steps: list[AgentId | None] = [each.agent for each in every_hop(command)]
        steps += [None] if delivered else []
        random.Random(seed).shuffle(steps)
        for agent in steps:
            if agent is not None:
                self.let_go(agent, command.session)
            elif command.request in self.open:
                self.answered(command.request)
                self.tell(RequestCompleted(command.request))

    @precondition(lambda self: any(each.decode_hops for each in self.current.values()))
    @rule(data=st.data())
    def hand_over(self, data: st.DataObject) -> None:
        command = self.some_session(data)
        for each in command.hops if command.decode_hops else ():
            if command.session in self.held[each.agent]:
                self.let_go(each.agent, command.session)
        if command.request in self.current and command.decode_hops:
            # Nobody lost a session by that: it goes on, and nothing doubts it.
            table = self.dispatcher._table
            if self.current[command.request] is command and command.session in table.slots:
                assert table.sessions[command.session].state is not SessionState.DELIVERING

    def is_handed_over(self, command: StartSession) -> bool:
        return all(command.session not in self.held[each.agent] for each in command.hops)

    def let_go(self, agent: AgentId, session: SessionId) -> None:
        if agent in self.alive:
            self.held[agent].pop(session, None)
            self.closing[agent].discard(session)
            self.tell(SessionsClosed(agent, (session,)))

    @precondition(lambda self: any(self.closing.values()))
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        agent = data.draw(st.sampled_from(sorted(a for a, each in self.closing.items() if each)))
        self.close_all(agent)

    def close_all(self, agent: AgentId) -> None:
        sessions, self.closing[agent] = sorted(self.closing[agent]), set()
        if sessions and agent in self.alive:
            for session in sessions:
                self.held[agent].pop(session, None)
            self.tell(SessionsClosed(agent, tuple(sessions)))

    @precondition(lambda self: self.known)
    @rule(data=st.data(), retryable=st.sampled_from([True, True, False]), at=st.integers(-1, 1))
    def fail(self, data: st.DataObject, retryable: bool, at: int) -> None:
        command = self.known[data.draw(st.sampled_from(sorted(self.known)))]
        agent = command.hops[at].agent if 0 <= at < len(command.hops) else None
        if agent is not None and command.session in self.held[agent]:
            self.let_go(agent, command.session)
        self.tell(SessionFailed(command.session, agent, "INTERNAL", "no", retryable))

    @precondition(lambda self: self.current)
    @rule(data=st.data(), at=st.integers(0, 1), lost=st.booleans())
    def device_fails(self, data: st.DataObject, at: int, lost: bool) -> None:
        command = self.some_session(data)
        agent = command.hops[min(at, len(command.hops) - 1)].agent
        if command.session in self.held[agent]:
            self.let_go(agent, command.session)
        self.failed_on.add((command.request, agent))
        reason = "DEVICE_LOST" if lost else "DEVICE_FAILED"
        self.tell(SessionFailed(command.session, agent, reason, "no", True))

    @precondition(lambda self: self.current)
    @rule()
    def nobody_gets_tokens(self) -> None:
        self.now += CONFIG.stall_ns
        self.tell(Tick())

    # ---- moves ----

    @precondition(lambda self: self.current)
    @rule(data=st.data())
    def generates(self, data: st.DataObject) -> None:
        self.gets_a_token(data.draw(st.sampled_from(sorted(self.current))))

    def gets_a_token(self, request: RequestId) -> None:
        self.generated += 1
        self.tell(SessionsProgressed((SessionProgress(request, self.generated, 5, 7),)))

    @precondition(lambda self: self.current)
    @rule(
        data=st.data(),
        where=st.sampled_from(["", "", *CHAINS]),
        mode=st.sampled_from(["kv", "tokens"]),
    )
    def wants_a_move(self, data: st.DataObject, where: str, mode: MoveMode) -> None:
        command = self.some_session(data)
        self.gets_a_token(command.request)
        session = data.draw(st.sampled_from([command.session, command.session, SessionId(1)]))
        self.tell(MoveRequested(session, where, mode))

    @precondition(lambda self: self.successors)
    @rule(data=st.data(), known=st.booleans(), at_once=st.booleans(), closed=st.booleans())
    def moves(self, data: st.DataObject, known: bool, at_once: bool, closed: bool) -> None:
        request = data.draw(st.sampled_from(sorted(self.successors)))
        old, new = self.current.get(request), self.successors[request]
        if old is None or old.session != new.moves:
            return
        leads = (old.decode_hops or old.hops)[0].agent
        if old.session not in self.held[leads]:
            return
        if not all(new.session in self.held[each.agent] for each in new.hops):
            return
        del self.held[leads][old.session]
        if known:  # the gateway has a token from there
            self.current[request] = self.successors.pop(request)
        self.untold[leads].append(SessionMoved(new.session, old.session))
        self.untold[leads] += [SessionsClosed(leads, (old.session,))] if closed else []
        if not closed:
            self.closing[leads].add(old.session)
        if at_once:
            self.tells_of_moves(leads)

    @rule(agent=st.sampled_from(sorted(AGENTS)))
    def tells_of_moves(self, agent: AgentId) -> None:
        events, self.untold[agent] = self.untold[agent], []
        for event in events:
            self.tell(event)

    @rule(agent=st.sampled_from(sorted(AGENTS)))
    def drains(self, agent: AgentId) -> None:
        self.availability.impair(agent, Impairment.DRAINING)
        self.tell(Tick())

    # ---- the cluster ----

    def adopted(self, sessions: Iterable[SessionId]) -> tuple[AdoptedSession, ...]:
        return tuple(AdoptedSession(each, every_hop(self.known[each])) for each in sorted(sessions))

    @rule(agent=st.sampled_from(sorted(AGENTS)))
    def lose_or_join(self, agent: AgentId) -> None:
        if agent in self.alive:
            self.alive.remove(agent)
            self.held[agent].clear()
            self.untold[agent].clear()
            self.tell(AgentLost(agent))
            self.closing[agent].clear()
        else:
            self.alive.add(agent)
            self.tell(SessionsHeld(agent, ()))
            self.availability.clear(agent, Impairment.DRAINING)
            self.tell(AgentJoined(AGENTS[agent]))

    @rule(agent=st.sampled_from(sorted(AGENTS)), forgets=st.integers(0, 2))
    def stream_breaks(self, agent: AgentId, forgets: int) -> None:
        if agent not in self.alive:
            return
        for session in sorted(self.held[agent])[:forgets]:
            del self.held[agent][session]
        self.alive.remove(agent)
        self.untold[agent].clear()
        self.tell(AgentLost(agent))
        self.alive.add(agent)
        self.closing[agent].clear()  # orders of the broken stream are lost
        self.tell(SessionsHeld(agent, self.adopted(self.held[agent])))
        self.tell(AgentJoined(AGENTS[agent]))

    @rule(which=st.sampled_from([0, 0, 1, 2, 3, 4, 5, 5]))
    def activate(self, which: int) -> None:
        self.plan = PLANS[which]
        self.tell(PlanActivated(self.plan))

    @rule(step=st.integers(0, 60))
    def time_passes(self, step: int) -> None:
        self.now += step
        self.tell(Tick())

    @rule()
    def wake_up(self) -> None:
        moment = self.dispatcher.next_wakeup()
        if moment is not None:
            self.now = max(self.now, moment)
            self.tell(Tick())

    # ---- fail-over ----

    def resubmissions(self, known: bool) -> list[Event]:
        events: list[Event] = []
        for request, event in self.open.items():
            session = self.current.get(request) if known else None
            adopted = None
            if session is not None and not session.decode_hops:
                adopted = AdoptedSession(session.session, session.hops)
            elif session is not None and self.is_handed_over(session):
                adopted = AdoptedSession(session.session, session.decode_hops)
            events.append(
                SessionRequested(
                    request,
                    event.model,
                    event.prompt_tokens,
                    event.max_tokens,
                    event.deadline_ns,
                    event.priority,
                    adopted,
                )
            )
        return events

    def resubmit(self, events: list[Event], *, anew: bool = False) -> None:
        for at, event in enumerate(events):
            assert isinstance(event, SessionRequested)
            if event.request in self.open:  # not answered while others were resubmitted
                if anew and event.in_flight is None:
                    self.fresh[event.request] = at
                self.tell(event)

    @rule(known=st.booleans())
    def gateway_comes_back(self, known: bool) -> None:
        events = self.resubmissions(known)
        if not known:
            self.current.clear()
            self.successors.clear()
        self.resubmit(events)

    @rule(
        known=st.booleans(),
        restored=st.booleans(),
        gateways_first=st.booleans(),
        forgetful=st.none() | st.sampled_from(sorted(AGENTS)),
    )
    def scheduler_changes(
        self, known: bool, restored: bool, gateways_first: bool, forgetful: AgentId | None
    ) -> None:
        events = self.resubmissions(known)
        if not known:
            self.current.clear()
            self.successors.clear()
        for said in self.untold.values():
            said.clear()
        snapshot = self.dispatcher.snapshot() if restored else []
        for each in self.closing.values():
            each.clear()
        if forgetful is not None:  # restarted at the same moment
            self.held[forgetful].clear()
        self.fresh.clear()
        self.start(snapshot, [PlanActivated(self.plan)])
        if gateways_first:
            self.resubmit(events, anew=True)
        for agent in sorted(self.alive):
            self.tell(SessionsHeld(agent, self.adopted(self.held[agent])))
            self.availability.clear(agent, Impairment.DRAINING)
            self.tell(AgentJoined(AGENTS[agent]))
        if not gateways_first:
            self.resubmit(events, anew=True)

    # ---- what always holds ----

    @rule()
    def write_behind(self) -> None:
        for change in self.dispatcher.take_changes():
            record = change.reservation
            if change.op == "put":
                self.journal[record.session, record.resource] = record
            else:
                del self.journal[record.session, record.resource]
        assert self.journal == {(r.session, r.resource): r for r in self.dispatcher.snapshot()}
        assert not self.dispatcher.take_changes()

    @invariant()
    def whatever_an_agent_holds_is_booked(self) -> None:
        booked = {(r.session, r.resource): r.slots for r in self.dispatcher.snapshot()}
        for agent in self.alive:
            for session, each in self.held[agent].items():
                assert booked[session, ResourceId(f"cache/{agent}/{each.partition}")] == each.blocks

    @invariant()
    def what_is_open_here_is_open_there(self) -> None:
        figures = self.dispatcher.statistics()
        assert figures["open_requests"] == len(self.open)
        assert figures["queued_requests"] <= len(self.open)
        if self.open or figures["booked_sessions"]:
            assert self.dispatcher.next_wakeup() is not None

    def teardown(self) -> None:
        for _ in range(2000):
            for agent in AGENTS:
                self.tells_of_moves(agent)
                self.close_all(agent)
            moment = self.dispatcher.next_wakeup()
            if moment is None:
                break
            self.now = max(self.now, moment)
            self.tell(Tick())
        assert not self.open
        assert self.dispatcher.next_wakeup() is None
        assert self.dispatcher.snapshot() == []
        assert not any(self.held[agent] for agent in self.alive)
        figures = self.dispatcher.statistics()
        gauges = (
            "queued_requests",
            "open_requests",
            "sessions_in_flight",
            "booked_slots",
            "moving_sessions",
            "misplaced_sessions",
        )
        assert [figures[name] for name in gauges] == [0] * len(gauges)
        assert not figures["illegal_transitions"]
        ended = figures["kv_moves"] + figures["tokens_moves"] + figures["failed_moves"]
        assert figures["started_moves"] == ended


class ClusterWithShortestQueues(Cluster):
    policy = "jsq"


class ClusterWithIdleQueues(Cluster):
    policy = "jiq"


class ClusterWithExpectedDelays(Cluster):
    policy = "sed"


class ClusterWithObjectives(Cluster):
    """Some requests are held to objectives, and most chains have latency lines."""

    policy = "slo"
    wanted = (None, TokenObjectives(60, 6), TokenObjectives(0, 6), TokenObjectives(40, 0))
    lines = LatencyLines(1.0, 2.0, 0.01, 1.0, 3.0, 4.0)

    def tell(self, event: Event) -> None:
        if isinstance(event, SessionRequested):
            number = event.request.number
            event = replace(
                event, objectives=self.wanted[number % 4], arrived_ns=self.now - number % 7
            )
        elif isinstance(event, PlanActivated):
            models = tuple(
                replace(model, chains=tuple(map(self.lined, model.chains)))
                for model in event.plan.models
            )
            event = PlanActivated(replace(event.plan, models=models))
        super().tell(event)
        started = [request for request in self.current if request in self.open]
        if self.now % 2 and started:
            progress = [SessionProgress(each, 1 + self.now % 4, 5, 7) for each in started[:3]]
            super().tell(SessionsProgressed(tuple(progress)))

    def lined(self, chain: Chain) -> Chain:
        known = chain.chain_id != "d2"
        return replace(chain, lines=self.lines if known else None, cache_tokens=40.0)

    @rule(slower=st.floats(0.5, 4.0))
    def fit_anew(self, slower: float) -> None:
        lines = replace(self.lines, decode_ns=self.lines.decode_ns * slower)
        for model in self.plan.models:
            fitted = tuple((chain.hops, lines) for chain in model.chains)
            self.tell(LatencyRefitted(model.model, fitted))


class ClusterByLeastTime(ClusterWithObjectives):
    policy = "least-time"

    def tell(self, event: Event) -> None:
        super().tell(event)
        for model_queue in self.dispatcher._table.model_queues.values():
            placer = model_queue.placer
            assert isinstance(placer, LeastTimePlacer)
            blocked = [each for one in placer.ranking.blocked.values() for each in one]
            for route in placer.workers.routes:
                # A free chain that is in no order would not be chosen again.
                assert route.listed or route.running >= route.capacity or route in blocked


class Walk(ClusterWithObjectives):
    """A cluster that serves from the beginning, and mostly moves sessions."""

    def start(self, before: list[Reservation], later: Iterable[Event] = ()) -> None:
        super().start(before, later)
        if self.epoch == 1:
            self.activate(0)
            for agent in AGENTS.values():
                self.tell(SessionsHeld(agent.agent_id, ()))
                self.tell(AgentJoined(agent))

    def obey(self, command: Command) -> None:
        self.moved += isinstance(command, StartSession) and command.moves is not None
        super().obey(command)

    moved = 0

    def walk(self, draw: random.Random, steps: int) -> None:
        data: Any = Drawn(draw)
        agents = sorted(AGENTS)
        steps_by_weight: dict[Callable[[], None], int] = {
            lambda: self.arrive(
                draw.choice(MODELS), draw.randrange(100, 900), draw.choice([0, 0, 1]), 2
            ): 14,
            lambda: self.generates(data): 10,
            lambda: self.wants_a_move(
                data, draw.choice(["", "", "", *CHAINS]), draw.choice(["kv", "tokens"])
            ): 14,
            lambda: self.moves(data, *(draw.random() < 0.5 for _ in range(3))): 14,
            lambda: self.tells_of_moves(draw.choice(agents)): 14,
            lambda: self.drains(draw.choice(agents)): 1,
            lambda: self.end(data, draw.random() < 0.8, draw.randrange(99)): 4,
            lambda: self.cancel(data): 1,
            lambda: self.fail(data, draw.random() < 0.8, draw.choice([-1, 0, 1])): 2,
            lambda: self.close(data): 13,
            self.wake_up: 2,
            lambda: self.time_passes(draw.randrange(30)): 4,
            lambda: self.stream_breaks(draw.choice(agents), draw.randrange(3)): 2,
            lambda: self.lose_or_join(draw.choice(agents)): 1,
            lambda: self.activate(draw.choice([0, 0, 0, 1, 1, 2, 3, 4, 5, 5])): 1,
            lambda: self.gateway_comes_back(draw.random() < 0.9): 1,
            lambda: self.scheduler_changes(
                draw.random() < 0.9,
                draw.random() < 0.7,
                draw.random() < 0.5,
                draw.choice([None, None, None, *agents]),
            ): 1,
            self.write_behind: 1,
            lambda: self.hand_over(data): 1,
        }
        for _ in range(steps):
            dead = sorted(AGENTS.keys() - self.alive)
            if dead and draw.random() < 0.25:
                self.lose_or_join(draw.choice(dead))
            if not any(model.model == CATS for model in self.plan.models) and draw.random() < 0.3:
                self.activate(0)
            (step,) = draw.choices([*steps_by_weight], [*steps_by_weight.values()])
            with suppress(NothingToDrawError):
                step()
            self.whatever_an_agent_holds_is_booked()
            self.what_is_open_here_is_open_there()
        self.teardown()


class Drawn:
    """Draws as Hypothesis does, from a seed."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw

    def draw(self, strategy: Any) -> Any:
        found = list(getattr(strategy, "elements", ()))
        if not found:
            raise NothingToDrawError
        return self._draw.choice(found)


class NothingToDrawError(Exception):
    """A rule does not apply: there is nothing it could apply to."""


@pytest.mark.parametrize("policy", ["jffc", "slo", "least-time", "jsq", "sed", "jiq"])
def test_nothing_is_lost_by_moves_at_any_moment(policy: str) -> None:
    moved = 0
    for seed in range(3):
        walk = type("Walk", (Walk,), {"policy": policy})()
        walk.walk(random.Random(seed), 150)
        moved += walk.moved
    assert moved > 5


@pytest.mark.system
@pytest.mark.parametrize("policy", ["jffc", "slo", "least-time", "jsq", "sed", "jiq"])
def test_nothing_is_lost_by_moves_at_any_moment_at_length(policy: str) -> None:
    for seed in range(3, 100):
        type("Walk", (Walk,), {"policy": policy})().walk(random.Random(seed), 150)


TestCluster = Cluster.TestCase
TestCluster.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestClusterWithShortestQueues = ClusterWithShortestQueues.TestCase
TestClusterWithIdleQueues = ClusterWithIdleQueues.TestCase
TestClusterWithExpectedDelays = ClusterWithExpectedDelays.TestCase
_SHORTER = settings(max_examples=25, stateful_step_count=30, deadline=None)
TestClusterWithShortestQueues.settings = _SHORTER
TestClusterWithIdleQueues.settings = _SHORTER
TestClusterWithExpectedDelays.settings = _SHORTER
TestClusterWithObjectives = ClusterWithObjectives.TestCase
TestClusterWithObjectives.settings = _SHORTER
TestClusterByLeastTime = ClusterByLeastTime.TestCase
TestClusterByLeastTime.settings = _SHORTER
