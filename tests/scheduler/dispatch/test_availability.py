"""Whatever speaks against whom: a stage that somebody can serve is never empty.

Checked on the view alone, and through the real dispatchers of pipelines and of chains: a request
submitted while every stage has an agent that is there and has it loaded is dispatched, to agents
that can serve it, and to none that is more impaired than it has to be.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from catenary_scheduler.book import Book
from catenary_scheduler.dispatch import ChainedDispatcher, CombinedDispatcher, PooledDispatcher
from catenary_scheduler.dispatch.availability import Availability, Impairment
from catenary_scheduler.dispatch.chained import ChainedConfig
from catenary_scheduler.dispatch.events import (
    AgentJoined,
    AgentLost,
    Command,
    DispatchBatch,
    PlanActivated,
    Reject,
    RequestArrived,
    RequestCompleted,
    SessionFailed,
    SessionRequested,
    SessionsClosed,
    SessionsHeld,
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
    ServerId,
)
from catenary_services.domain.plan import (
    Agent,
    CacheCapacity,
    Chain,
    ChainHop,
    ModelPlan,
    Pipeline,
    Plan,
    Stage,
)

MS = 1_000_000
A, B, C, D = (AgentId(name) for name in "abcd")
AGENTS = (A, B, C, D)
CATS, LLM = ModelKey("cats", "1"), ModelKey("llm", "1")
IMPAIRMENTS = tuple(Impairment)
agents = st.sampled_from(AGENTS)
ROOMY = 100_000


def part(model: ModelKey, first: int, last: int) -> PartitionKey:
    return PartitionKey(model, first, last)


def stages(*pools: Iterable[AgentId]) -> Pipeline:
    cut = len(pools)
    return Pipeline(
        f"cats/{cut}",
        4,
        tuple(
            Stage(part(CATS, at * 6 // cut, (at + 1) * 6 // cut), tuple(pool), (MS,) * 4, 10)
            for at, pool in enumerate(pools)
        ),
    )


def chain(name: str, *hosts: AgentId) -> Chain:
    cut = len(hosts)
    hops = tuple(
        ChainHop(
            agent, part(LLM, at * 6 // cut, (at + 1) * 6 // cut), at * 6 // cut, (at + 1) * 6 // cut
        )
        for at, agent in enumerate(hosts)
    )
    return Chain(name, hops, ROOMY, MS * (1 + cut))


def plan_of(pipelines: tuple[Pipeline, ...], chains: tuple[Chain, ...]) -> Plan:
    caches = tuple(
        CacheCapacity(hop.agent, hop.partition, 8 * ROOMY)
        for hop in dict.fromkeys(hop for each in chains for hop in each.hops)
    )
    return Plan(
        PlanId("p"),
        (
            ModelPlan(CATS, 1000 * MS, pipelines),
            ModelPlan(LLM, 1000 * MS, (), True, chains, caches, 100),
        ),
    )


PLANS = (
    plan_of((stages((A, B)),), (chain("ab", A, B), chain("c", C))),
    plan_of((stages((A, B), (C, D)), stages((D,))), (chain("a", A), chain("b", B), chain("d", D))),
    plan_of((stages((A,), (B,), (C,)),), (chain("abc", A, B, C),)),
)


class Events(RuleBasedStateMachine):
    """What can happen to agents, told to a view the way a leader does."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.view = Availability()
        self.plan = PLANS[0]
        self.there: set[AgentId] = set()
        self.loaded: dict[AgentId, set[PartitionKey]] = {agent: set() for agent in AGENTS}

    def partitions(self) -> list[PartitionKey]:
        of_plan = [s.partition for p in self.plan.models[0].pipelines for s in p.stages]
        of_chains = [hop.partition for each in self.plan.models[1].chains for hop in each.hops]
        return list(dict.fromkeys([*of_plan, *of_chains]))

    def hosts(self, agent: AgentId, partition: PartitionKey) -> bool:
        return agent in self.there and partition in self.loaded[agent]

    def happened(self) -> None:
        """Somebody may want to look."""

    @rule(agent=agents)
    def connects(self, agent: AgentId) -> None:
        if agent not in self.there:
            self.there.add(agent)
            self.view.connected(agent)
            self.joined(agent)
            self.happened()

    def joined(self, agent: AgentId) -> None:
        """A dispatcher is told."""

    @rule(agent=agents)
    def disconnects(self, agent: AgentId) -> None:
        if agent in self.there:
            self.there.discard(agent)
            self.loaded[agent].clear()
            self.view.disconnected(agent)
            self.lost(agent)
            self.happened()

    def lost(self, agent: AgentId) -> None:
        """A dispatcher is told."""

    @rule(agent=agents, data=st.data())
    def loads(self, agent: AgentId, data: st.DataObject) -> None:
        if agent in self.there:
            partition = data.draw(st.sampled_from(self.partitions()))
            self.loaded[agent].add(partition)
            self.view.may_load(agent, partition)
            self.view.loaded(agent, partition)
            self.happened()

    @rule(agent=agents)
    def loads_everything(self, agent: AgentId) -> None:
        if agent in self.there:
            self.loaded[agent].update(self.partitions())
            self.view.hosts(agent, self.loaded[agent])
            self.happened()

    @rule(agent=agents, data=st.data())
    def unloads(self, agent: AgentId, data: st.DataObject) -> None:
        if self.loaded[agent]:
            partition = data.draw(st.sampled_from(sorted(self.loaded[agent])))
            self.loaded[agent].discard(partition)
            self.view.hosts(agent, self.loaded[agent])
            self.happened()

    @rule(agent=agents, data=st.data())
    def cannot_load(self, agent: AgentId, data: st.DataObject) -> None:
        partition = data.draw(st.sampled_from(self.partitions()))
        self.view.cannot_load(agent, partition, "no such file", self.now + MS)
        self.happened()

    @rule(
        agent=agents,
        impairment=st.sampled_from(IMPAIRMENTS),
        lasts_ms=st.none() | st.integers(1, 50),
        data=st.data(),
    )
    def impairs(
        self, agent: AgentId, impairment: Impairment, lasts_ms: int | None, data: st.DataObject
    ) -> None:
        partition = data.draw(st.none() | st.sampled_from(self.partitions()))
        until = None if lasts_ms is None else self.now + lasts_ms * MS
        self.view.impair(agent, impairment, until=until, partition=partition, why="says the test")
        self.happened()

    @rule(agent=agents, impairment=st.sampled_from(IMPAIRMENTS), data=st.data())
    def clears(self, agent: AgentId, impairment: Impairment, data: st.DataObject) -> None:
        partition = data.draw(st.none() | st.sampled_from(self.partitions()))
        self.view.clear(agent, impairment, partition=partition)
        self.happened()

    @rule(step_ms=st.integers(0, 60))
    def time_passes(self, step_ms: int) -> None:
        self.now += step_ms * MS
        self.view.expire(self.now)
        expiry = self.view.next_expiry()
        assert expiry is None or expiry > self.now
        self.happened()

    @rule(plan=st.sampled_from(PLANS))
    def plan_changes(self, plan: Plan) -> None:
        self.plan = plan
        self.happened()

    @invariant()
    def a_stage_that_somebody_can_serve_is_never_empty(self) -> None:
        for partition in self.partitions():
            able = [agent for agent in AGENTS if self.hosts(agent, partition)]
            members = self.view.members(partition, AGENTS)
            assert bool(members) == bool(able)
            assert set(members) <= set(able)
            ranks = {self.view.rank(agent, partition) for agent in able}
            assert {self.view.rank(agent, partition) for agent in members} == {
                min(ranks, default=0)
            } or not able

    @invariant()
    def somebody_is_planned_on_unless_all_are_to_go(self) -> None:
        draining = self.view.impaired_by(Impairment.DRAINING)
        plannable = self.view.plannable(self.there)
        assert plannable <= self.there - draining
        assert bool(plannable) == bool(self.there - draining)


class Dispatching(Events):
    """The same, with the dispatchers of a leader at work."""

    def __init__(self) -> None:
        super().__init__()
        book = Book()
        # A suspicion that lasts keeps a request that failed, but never one that comes anew.
        config = ChainedConfig(suspicion_ns=50 * MS, longest_suspicion_ns=100 * MS, checked=True)
        self.dispatcher = CombinedDispatcher(
            PooledDispatcher(book=book, availability=self.view),
            ChainedDispatcher(config, book, availability=self.view),
            book,
        )
        self.numbers = itertools.count(1)
        self.sessions: dict[RequestId, StartSession] = {}

    @initialize()
    def begins(self) -> None:
        self.tell(PlanActivated(self.plan))

    def tell(self, event: object) -> list[Command]:
        commands = self.dispatcher.handle(event, self.now)  # type: ignore[arg-type]
        for command in commands:
            if isinstance(command, StartSession):
                self.sessions[command.request] = command
            elif isinstance(command, Reject):
                self.sessions.pop(command.request, None)
        return commands

    def happened(self) -> None:
        self.tell(Tick())

    def joined(self, agent: AgentId) -> None:
        self.tell(SessionsHeld(agent, ()))
        self.tell(AgentJoined(Agent(agent, "x", ServerId(agent), 1, 10**9)))

    def lost(self, agent: AgentId) -> None:
        self.tell(AgentLost(agent))

    def plan_changes(self, plan: Plan) -> None:
        self.plan = plan
        self.tell(PlanActivated(plan))

    plan_changes = rule(plan=st.sampled_from(PLANS))(plan_changes)

    @rule()
    def a_photograph_arrives(self) -> None:
        whole = [
            each
            for each in self.plan.models[0].pipelines
            if all(any(self.hosts(a, s.partition) for a in s.agents) for s in each.stages)
        ]
        request = RequestId(GatewayId("g"), next(self.numbers))
        commands = self.tell(RequestArrived(request, CATS, 1, self.now + 10_000 * MS))
        for _ in range(100):
            if any(isinstance(each, DispatchBatch) for each in commands):
                break
            self.now += MS
            commands += self.tell(Tick())
        batches = [each for each in commands if isinstance(each, DispatchBatch)]
        rejected = [each for each in commands if isinstance(each, Reject)]
        assert not rejected
        assert bool(batches) == bool(whole)
        for batch in batches:
            used = max(self.view.rank(hop.agent, hop.partition) for hop in batch.path)
            assert all(self.hosts(hop.agent, hop.partition) for hop in batch.path)
            assert used == min(self.worst(each) for each in whole)
        self.tell(RequestCompleted(request))

    def worst(self, pipeline: Pipeline) -> int:
        return max(
            min(
                self.view.rank(agent, stage.partition)
                for agent in stage.agents
                if self.hosts(agent, stage.partition)
            )
            for stage in pipeline.stages
        )

    @rule()
    def a_chat_begins(self) -> None:
        whole = [
            each
            for each in self.plan.models[1].chains
            if all(self.hosts(hop.agent, hop.partition) for hop in each.hops)
        ]
        request = RequestId(GatewayId("g"), next(self.numbers))
        event = SessionRequested(request, LLM, 5, 10, self.now + 10_000 * MS)
        commands = self.tell(event)
        started = [each for each in commands if isinstance(each, StartSession)]
        mine = [each for each in started if each.request == request]
        assert not any(isinstance(each, Reject) for each in commands)
        assert bool(mine) == bool(whole)
        for each in mine:
            used = max(self.view.rank(hop.agent, hop.partition) for hop in each.hops)
            best = min(
                max(self.view.rank(hop.agent, hop.partition) for hop in other.hops)
                for other in whole
            )
            assert used == best

    @rule(data=st.data())
    def a_session_fails(self, data: st.DataObject) -> None:
        if self.sessions:
            request = data.draw(st.sampled_from(sorted(self.sessions)))
            failed = self.sessions.pop(request)
            blamed = failed.hops[0].agent
            self.tell(SessionFailed(failed.session, blamed, "PARTITION_LOST", "no", True))

    @rule(data=st.data())
    def a_chat_ends(self, data: st.DataObject) -> None:
        if self.sessions:
            request = data.draw(st.sampled_from(sorted(self.sessions)))
            ended = self.sessions.pop(request)
            self.tell(RequestCompleted(request))
            for agent in {hop.agent for hop in ended.hops}:
                self.tell(SessionsClosed(agent, (ended.session,)))


EventsTest = Events.TestCase
EventsTest.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
DispatchingTest = Dispatching.TestCase
DispatchingTest.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)


def test_the_filter_of_a_straggler_and_the_loss_of_its_pool_mate_are_no_outage() -> None:
    """What an afternoon of chaos found: a hold of sixty seconds without anybody."""
    view, key = Availability(), part(CATS, 0, 6)
    for agent in (A, B):
        view.connected(agent)
        view.loaded(agent, key)
    view.impair(A, Impairment.STRAGGLING, until=60_000 * MS)
    assert view.members(key, (A, B)) == (B,)
    view.disconnected(B)
    assert view.members(key, (A, B)) == (A,)
    view.impair(A, Impairment.QUARANTINED)
    assert view.members(key, (A, B)) == (A,)


def test_impairments_survive_a_disconnection_and_failed_loads_do_not() -> None:
    view, key = Availability(), part(CATS, 0, 6)
    view.connected(A)
    view.impair(A, Impairment.QUARANTINED, why="it said an epoch that cannot be")
    view.cannot_load(A, key, "no such file", until=5)
    assert [(each.kind, each.why) for each in view.impairments(A)] == [
        ("quarantined", "it said an epoch that cannot be"),
        ("cannot_load", "no such file"),
    ]
    assert view.unable() == {CATS: frozenset({A})}
    view.disconnected(A)
    view.connected(A)
    assert [each.kind for each in view.impairments(A)] == ["quarantined"]


def test_nothing_is_kept_of_agents_that_are_gone() -> None:
    view, key = Availability(), part(CATS, 0, 6)
    for number in range(100):  # whoever says nonsense under ever new names
        name = AgentId(f"stranger-{number}")
        view.impair(name, Impairment.QUARANTINED, until=number)
        view.clear(name, Impairment.SILENT)
        view.may_load(name, key)
    for agent in (A, B):
        view.connected(agent)
        view.loaded(agent, key)
        view.cannot_load(agent, key, "no such file")
    view.impair(A, Impairment.DRAINING)
    view.disconnected(A)
    view.disconnected(B)
    view.expire(10**18)
    assert set(view._agents) == {A}
    view.clear(A, Impairment.DRAINING)
    assert not view._agents


def test_who_is_unfit_is_planned_on_only_where_nobody_else_is_left() -> None:
    view = Availability()
    view.impair(A, Impairment.BROKEN)
    view.impair(B, Impairment.STRAGGLING)
    assert view.plannable((A, B, C)) == {B, C}
    assert view.plannable((A,)) == {A}
    view.impair(C, Impairment.DRAINING)
    assert view.plannable((A, C)) == {A}
    assert view.plannable((C,)) == frozenset()


def test_versions_grow_only_with_changes() -> None:
    view, key = Availability(), part(CATS, 0, 6)
    view.connected(A)
    view.hosts(A, [key])
    before = view.version
    view.hosts(A, [key])
    view.loaded(A, key)
    view.clear(A, Impairment.SILENT)
    view.may_load(A, key)
    view.expire(10**18)
    assert view.version == before
