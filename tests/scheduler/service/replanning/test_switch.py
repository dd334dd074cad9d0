"""The state machine of a switch alone, in a world of a few lines instead of processes."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from catenary_scheduler.agents.hosting import HostingGoal
from catenary_scheduler.planning import ModelPlacement, PipelinePlacement, Placement, StagePlacement
from catenary_scheduler.planning.requirements import (
    agents_of,
    can_go_back,
    changing,
    missing,
    required_by_agent,
)
from catenary_scheduler.rollout.report import RolloutReport
from catenary_scheduler.rollout.rollout import ClusterSnapshot, PlanRollout, RolloutPhase
from catenary_scheduler.storage.values.codec import (
    UnreadableRecord,
    decode_document,
    encode_document,
)
from catenary_scheduler.storage.values.stored import StoredProvenance, StoredRollout
from catenary_services.domain.ids import AgentId, ModelKey, PartitionKey, PlanId
from catenary_services.domain.plan import ModelPlan, Pipeline, Plan, Stage

TOY, OTHER = ModelKey("toy", "1"), ModelKey("other", "1")
A, B, C = (AgentId(name) for name in "abc")
SLO_NS = 100


def served(model: ModelKey, *stages: tuple[int, int, tuple[AgentId, ...]]) -> ModelPlacement:
    placed = tuple(StagePlacement(first, last, agents) for first, last, agents in stages)
    return ModelPlacement(model, SLO_NS, True, (PipelinePlacement(1, placed),))


@dataclass
class World:
    """Agents with room for so many blocks; loads succeed one at a time, when a test says so."""

    active: Placement
    target: Placement
    room: dict[AgentId, int]
    hosted: dict[AgentId, set[PartitionKey]] = field(default_factory=dict)
    gone: set[AgentId] = field(default_factory=set)
    failed: set[tuple[AgentId, PartitionKey]] = field(default_factory=set)
    busy: set[tuple[AgentId, PartitionKey]] = field(default_factory=set)
    unable: set[AgentId] = field(default_factory=set)
    """Agents the hosting takes from the dispatcher at the end: they could not load what they had."""
    now: int = 0

    def __post_init__(self) -> None:
        required = required_by_agent(self.active)
        self.hosted = {agent: set(required.get(agent, {})) for agent in self.room}
        named = agents_of(self.target)
        self.rollout = PlanRollout(
            self.target,
            changing(self.active, self.target),
            "a test",
            "plan-1",
            0,
            1_000,
            frozenset(named & set(self.room)),
        )

    def surplus(self, agent: AgentId, placement: Placement) -> list[PartitionKey]:
        required = required_by_agent(placement).get(agent, {})
        return sorted(key for key in self.hosted[agent] if key not in required)

    def used(self, agent: AgentId) -> int:
        return sum(key.last_block - key.first_block for key in self.hosted[agent])

    def fits(self, agent: AgentId, key: PartitionKey) -> bool:
        return self.used(agent) + key.last_block - key.first_block <= self.room[agent]

    def is_crowded(self, agent: AgentId) -> bool:
        required = required_by_agent(self.target).get(agent, {})
        lacking = [key for key in required if key not in self.hosted[agent]]
        no_room = any(not self.fits(agent, key) for key in lacking)
        return no_room and bool(self.surplus(agent, self.target))

    def snapshot(self) -> ClusterSnapshot:
        def hosts(agent: AgentId, key: PartitionKey, _: object) -> bool:
            return agent not in self.gone and key in self.hosted[agent]

        return ClusterSnapshot(
            now_ns=self.now,
            active=self.active,
            missing=lambda placement: missing(placement, hosts, lambda a: a in self.gone),
            is_present=lambda agent: agent not in self.gone,
            gave_up=lambda agent, key: "no" if (agent, key) in self.failed else "",
            is_crowded=lambda agent: agent not in self.gone and self.is_crowded(agent),
            is_ordered=lambda agent, key: False,
            in_use=lambda agent, key: (agent, key) in self.busy,
            surplus=self.surplus,
            objection=lambda placement: "",
        )

    def advance(self) -> RolloutPhase:
        while not self.rollout.is_over and self.rollout.advance(self.snapshot()):
            pass
        if self.rollout.phase is RolloutPhase.DONE:
            self.active = self.target
        elif not self.rollout.is_over:
            self.drop()
        elif self.rollout.has_moved:
            self.unable |= {agent for agent, _ in self.failed}
        return self.rollout.phase

    def drop(self) -> None:
        """Unloads what is not wanted, as the hosting does."""
        required = HostingGoal(self.active, self.target, self.rollout).required()
        for agent, keys in self.hosted.items():
            for key in [
                k for k in keys if k not in required(agent) and (agent, k) not in self.busy
            ]:
                keys.remove(key)

    def loadable(self) -> list[tuple[AgentId, PartitionKey]]:
        required = HostingGoal(self.active, self.target, self.rollout).required()
        return [
            (agent, key)
            for agent in sorted(self.hosted)
            for key in sorted(required(agent))
            if agent not in self.gone
            and key not in self.hosted[agent]
            and self.fits(agent, key)
            and (agent, key) not in self.failed
        ]

    def load_all(self) -> RolloutPhase:
        while not self.rollout.is_over and (found := self.loadable()):
            self.hosted[found[0][0]].add(found[0][1])
            self.advance()
        return self.advance()


OLD = Placement((served(TOY, (0, 4, (A,))),))
NEW = Placement((served(TOY, (0, 2, (A,)), (2, 4, (B,))),))
WHOLE = PartitionKey(TOY, 0, 4)


def test_batches_that_never_end_bring_the_old_plan_back() -> None:
    world = World(OLD, NEW, {A: 4, B: 6}, busy={(A, WHOLE)})
    world.rollout.timeout_ns = 10**18
    assert world.load_all() is RolloutPhase.FLUSHING
    world.now = 2 * SLO_NS + 6 * 10**9
    assert world.advance() is RolloutPhase.ROLLED_BACK
    assert "did not come to an end" in world.rollout.problem


def test_an_agent_lost_while_batches_are_waited_for_brings_the_old_plan_back() -> None:
    world = World(OLD, NEW, {A: 4, B: 6}, busy={(A, WHOLE)})
    assert world.load_all() is RolloutPhase.FLUSHING
    world.gone.add(B)
    assert world.advance() is RolloutPhase.ROLLED_BACK
    assert world.hosted[A] == {WHOLE}


def test_a_new_plan_has_its_whole_time_while_its_agents_fetch_files() -> None:
    world = World(OLD, NEW, {A: 9, B: 9})
    world.rollout.timeout_ns = 10**9
    world.now, world.rollout.progressed_ns = 15 * 10**8, 10**9
    assert world.advance() is RolloutPhase.LOADING
    world.now = 20 * 10**8 + 1
    assert world.advance() is RolloutPhase.ROLLED_BACK
    assert "not ready within 1 s" in world.rollout.problem


def test_what_was_given_up_is_loaded_again_before_it_is_rolled_back() -> None:
    world = World(OLD, NEW, {A: 4, B: 6})
    world.hosted[B].add(PartitionKey(TOY, 2, 4))
    assert world.advance() is RolloutPhase.MOVING
    world.failed.add((A, PartitionKey(TOY, 0, 2)))
    assert world.advance() is RolloutPhase.RETURNING
    assert world.rollout.problem == "a cannot load toy:1[0,2): no"
    assert world.load_all() is RolloutPhase.ROLLED_BACK
    assert world.hosted[A] == {WHOLE}


def test_a_lost_agent_is_not_waited_for_on_the_way_back() -> None:
    world = World(OLD, NEW, {A: 4, B: 6})
    world.hosted[B].add(PartitionKey(TOY, 2, 4))
    assert world.advance() is RolloutPhase.MOVING
    world.gone.add(B)
    assert world.advance() is RolloutPhase.RETURNING
    world.gone.add(A)
    assert world.advance() is RolloutPhase.ROLLED_BACK


def test_without_a_way_back_it_goes_on() -> None:
    world = World(OLD, Placement((served(TOY, (0, 4, (B,))),)), {A: 4, B: 4})
    world.gone.add(A)
    world.now = 10**6  # long after the timeout
    assert world.advance() is RolloutPhase.LOADING
    assert world.load_all() is RolloutPhase.DONE


def test_what_is_left_of_a_plan_is_dispatched_by() -> None:
    plan = Plan(
        PlanId("p"),
        tuple(
            ModelPlan(
                model,
                SLO_NS,
                (
                    Pipeline("one", 1, (Stage(PartitionKey(model, 0, 4), (A, B), (1,), 0),)),
                    Pipeline("two", 1, (Stage(PartitionKey(model, 0, 4), (A,), (1,), 0),)),
                ),
            )
            for model in (TOY, OTHER)
        ),
    )
    rollout = PlanRollout(NEW, frozenset({TOY}), "", "", 0, 0)
    assert rollout.reduced(plan) is plan
    rollout.phase, rollout.crowded, rollout.affected = (
        RolloutPhase.FLUSHING,
        frozenset({A}),
        frozenset({TOY}),
    )
    toy, other = rollout.reduced(plan).models
    assert [(p.pipeline_id, p.stages[0].agents) for p in toy.pipelines] == [("one", (B,))]
    assert other == plan.models[1]


def test_only_models_served_before_and_after_change() -> None:
    before = Placement((*OLD.models, served(OTHER, (0, 4, (A,)))))
    assert changing(before, NEW) == {TOY}
    assert changing(Placement(()), NEW) == frozenset()
    assert changing(OLD, OLD) == frozenset()


def test_there_is_a_way_back_while_every_model_has_a_whole_pipeline() -> None:
    old = Placement((served(TOY, (0, 2, (A, B)), (2, 4, (C,))),))
    assert can_go_back(old, NEW, lambda agent: agent != A)
    assert not can_go_back(old, NEW, lambda agent: agent != C)


def test_downtime_counts_from_the_pause_to_the_resumption_and_adds_up() -> None:
    rollout = PlanRollout(NEW, frozenset({TOY}), "why", "plan-1", 100, 0)
    rollout.pause([TOY], 150)
    assert RolloutReport.of(rollout, 170).downtime_ns == ((TOY, 20),)
    rollout.resume(180)
    rollout.pause([TOY], 200)
    rollout.resume(205)
    rollout.phase, rollout.ended_ns, rollout.to_plan = RolloutPhase.DONE, 300, "plan-2"
    report = RolloutReport.of(rollout, 999)
    assert (report.duration_ns, report.downtime_ns) == (200, ((TOY, 35),))
    assert RolloutReport.of_stored(reread(report.stored())) == report
    assert "toy:1 was not dispatched for" in report.in_words()


def reread(stored: StoredRollout) -> StoredRollout:
    return decode_document(encode_document(stored), StoredRollout)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"phase": "dreaming"}', "null"])
def test_records_nobody_understands_are_refused(text: str) -> None:
    for kind in (StoredRollout, StoredProvenance):
        with pytest.raises(UnreadableRecord):
            decode_document(text, kind)


def placements() -> st.SearchStrategy[Placement]:
    pool = st.lists(st.sampled_from([A, B, C]), min_size=1, unique=True).map(tuple)
    cut = st.integers(1, 3)
    return st.builds(
        lambda at, first, second: Placement((served(TOY, (0, at, first), (at, 4, second)),)),
        cut,
        pool,
        pool,
    )


@settings(max_examples=200, deadline=None)
@given(placements(), placements(), st.integers(4, 9), st.data())
def test_whatever_happens_it_ends_and_dispatch_never_goes_to_what_is_not_there(
    old: Placement, new: Placement, room: int, data: st.DataObject
) -> None:
    world = World(old, new, dict.fromkeys((A, B, C), room))
    if not world.rollout.models:
        return
    for _ in range(data.draw(st.integers(0, 12))):
        if world.rollout.is_over:
            break
        action = data.draw(
            st.sampled_from(["load", "load", "load", "fail", "lose", "busy", "idle"])
        )
        loadable = world.loadable()
        if action in ("load", "fail") and loadable:
            agent, key = data.draw(st.sampled_from(loadable))
            if action == "load":
                world.hosted[agent].add(key)
            else:
                world.failed.add((agent, key))
        elif action == "lose" and len(world.gone) < 1:
            lost = data.draw(st.sampled_from([A, B, C]))
            world.gone.add(lost)
            world.hosted[lost].clear()
        elif action == "busy" and not world.rollout.is_holding:
            world.busy |= {(a, k) for a, w in required_by_agent(world.active).items() for k in w}
        else:
            world.busy.clear()
        world.advance()
        dispatchable(world)
    world.busy.clear()
    world.failed.clear()
    world.now = 10**18  # every patience is over
    world.advance()
    world.load_all()
    dispatchable(world)
    if not world.rollout.is_over:  # then neither plan can be whole: an agent it needs is gone
        lacking = {agent for agent, _ in world.snapshot().missing(world.rollout.part)}
        assert lacking & world.gone or room < 4 + 3
        assert not can_go_back(world.active, new, lambda a: a not in world.gone)


def dispatchable(world: World) -> None:
    """What the dispatcher may use of agents that are there is loaded."""
    rollout = world.rollout
    for agent, required in required_by_agent(world.active).items():
        held = rollout.is_holding and agent in rollout.crowded
        if agent not in world.gone | world.unable and not held:
            assert set(required) <= world.hosted[agent], (agent, rollout.phase)
