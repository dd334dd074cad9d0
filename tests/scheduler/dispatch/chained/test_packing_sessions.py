"""Packing of running sessions at the dispatcher: who moves, who stays, and what never breaks."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.packing.packing_cluster import PackedCluster, Served
from benchmarks.packing.packing_setup import MODEL, MS, S, Setup
from catenary_scheduler.dispatch.chained.packing.pool import bins_needed
from catenary_scheduler.dispatch.chained.packing_rules import PackingRules
from catenary_scheduler.dispatch.events import AgentJoined
from catenary_scheduler.packing.lower_bound import lower_bound
from catenary_services.domain.ids import AgentId, ServerId
from catenary_services.domain.latency import LatencyLines, TokenObjectives
from catenary_services.domain.packing import PACKING_GOALS, PackingGoal
from catenary_services.domain.plan import Agent

LINES = LatencyLines(0.02e6, 5e6, 200.0, 1e6, 10e6)
"""A step of n sessions takes 10 ms and 1 ms for each."""


def spread(cluster: PackedCluster, sessions: int, prompt: int = 200, answer: int = 3000) -> None:
    """Has sessions begin, evenly over the chains as long as nothing is packed."""
    for _ in range(sessions):
        cluster.arrive(prompt, answer)
    cluster.run(cluster.now + 500 * MS)


def counted(cluster: PackedCluster, name: str) -> int:
    return cluster.dispatcher.statistics()[f"packing_{name}"]


def busy(setup: Setup, rate_per_s: float, seconds: float, seed: int = 1) -> PackedCluster:
    """Lets sessions come and go for a while."""
    draw = random.Random(seed)
    cluster = PackedCluster(setup)
    while cluster.now < seconds * S:
        cluster.run(cluster.now + int(draw.expovariate(rate_per_s) * S))
        prompt = min(1500, max(8, int(draw.lognormvariate(4.5, 1.0))))
        answer = min(1500, max(8, int(draw.lognormvariate(5.5, 0.8))))
        cluster.arrive(prompt, answer)
    return cluster


def most_moves(served: Served, now: int, rules: PackingRules) -> int:
    """Returns how often a session may have moved at most: it rests twice as long every time."""
    life = now - served.arrived
    return 1 + math.floor(math.log2(1 + life / rules.rest_ns))


def test_without_a_goal_nobody_moves_and_nobody_looks() -> None:
    cluster = busy(Setup(checked=True, chains=4, goal="off"), 2.0, 20)
    assert not cluster.moves
    assert counted(cluster, "epochs") == 0


def test_sessions_on_many_chains_come_together_and_then_stay() -> None:
    cluster = PackedCluster(Setup(checked=True, chains=6, goal="off"))
    spread(cluster, 6)
    assert len(cluster.in_use()) == 6
    cluster.activate("pack")
    cluster.run(cluster.now + 10 * S)
    assert len(cluster.in_use()) == 1
    moves = len(cluster.moves)
    assert 5 <= moves <= 8
    cluster.run(cluster.now + 20 * S)
    assert len(cluster.moves) == moves
    assert cluster.dispatcher.chains_needed(MODEL) == 1


def test_packing_ends_with_its_goal() -> None:
    cluster = PackedCluster(Setup(checked=True, chains=6, goal="off"))
    spread(cluster, 6)
    cluster.activate("pack")
    cluster.activate("off")
    cluster.run(cluster.now + 5 * S)
    assert not cluster.moves
    assert cluster.dispatcher.chains_needed(MODEL) == 0


@pytest.mark.parametrize("policy", ["slo", "jffc"])
def test_new_sessions_join_those_that_are_there(policy: str) -> None:
    cluster = PackedCluster(Setup(checked=True, chains=4, policy=policy))
    spread(cluster, 8)
    assert len(cluster.in_use()) == 1
    assert not cluster.moves


def test_what_outgrows_a_chain_moves_before_it_is_full() -> None:
    cluster = PackedCluster(Setup(checked=True, chains=4, cache_tokens=8000))
    spread(cluster, 4, prompt=1000)
    assert len(cluster.in_use()) == 1
    for _ in range(600):  # they grow by 40 tokens a second
        cluster.run(cluster.now + 100 * MS)
        assert all(cluster.tokens(chain.chain_id) <= 8000 for chain in cluster.chains)
    assert len(cluster.in_use()) > 1


def test_loads_are_made_even() -> None:
    cluster = PackedCluster(Setup(checked=True, chains=4, goal="balance", policy="jffc"))
    spread(cluster, 12, prompt=400)
    assert len(cluster.on("c00")) == 12  # jffc fills the first chain first
    cluster.run(cluster.now + 10 * S)
    loads = [cluster.tokens(chain.chain_id) for chain in cluster.chains]
    assert max(loads) - min(loads) <= 0.1 * 16_000 + 16 * 12
    moves = len(cluster.moves)
    cluster.run(cluster.now + 10 * S)
    assert len(cluster.moves) == moves


def test_few_sessions_are_made_even_on_chains_that_are_far_from_full() -> None:
    cluster = PackedCluster(Setup(checked=True, chains=3, goal="balance", policy="jffc", slots=32))
    spread(cluster, 3, prompt=20)
    assert len(cluster.in_use()) == 1
    cluster.run(cluster.now + 3 * S)
    assert sorted(len(cluster.on(chain.chain_id)) for chain in cluster.chains) in (
        [0, 1, 2],
        [1, 1, 1],
    )


@pytest.mark.parametrize("goal", ["pack", "balance"])
def test_nobody_goes_back_and_forth(goal: PackingGoal) -> None:
    setup = Setup(checked=True, chains=6, goal=goal, cache_tokens=6000)
    cluster = busy(setup, 3.0, 40)
    assert cluster.moves
    for served in cluster.requests:
        assert served.moves <= most_moves(served, cluster.now, setup.rules)
    assert not cluster.rejected
    assert max(served.starts for served in cluster.requests) == 1


def test_packing_needs_far_fewer_chains_than_spreading() -> None:
    used = {
        goal: busy(Setup(checked=True, chains=12, goal=goal, cache_tokens=8000), 2.0, 40)
        for goal in PACKING_GOALS
    }
    mean = {goal: cluster.mean_in_use() for goal, cluster in used.items()}
    assert mean["pack"] < 0.4 * mean["off"]
    assert mean["balance"] > 0.8 * mean["off"]
    assert len(used["pack"].moves) / 40 < 2.0  # moves per second, one for each session or so


def test_nobody_moves_where_an_objective_would_be_missed() -> None:
    held = TokenObjectives(per_token_ns=round(16.4 * MS))  # six sessions at a time
    setup = Setup(
        checked=True, chains=2, goal="off", lines=LINES, objectives=held, cache_tokens=64_000
    )
    cluster = PackedCluster(setup)
    spread(cluster, 8)
    assert [len(cluster.on(chain)) for chain in ("c00", "c01")] == [4, 4]
    cluster.activate("pack")
    cluster.run(cluster.now + 20 * S)
    assert max(len(cluster.on(chain)) for chain in ("c00", "c01")) <= 6
    free = PackedCluster(
        Setup(checked=True, chains=2, goal="off", lines=LINES, cache_tokens=64_000)
    )
    spread(free, 8)
    free.activate("pack")
    free.run(free.now + 20 * S)
    assert sorted(len(free.on(chain)) for chain in ("c00", "c01")) == [0, 8]


def test_nobody_is_put_closer_together_while_objectives_are_missed() -> None:
    held = TokenObjectives(per_token_ns=100 * MS)
    cluster = PackedCluster(Setup(checked=True, chains=3, goal="off", lines=LINES, objectives=held))
    spread(cluster, 3)
    placer = cluster.dispatcher._table.model_queue(MODEL).placer
    assert placer is not None
    for attained in [True] * 30 + [False]:
        placer.adaptation.ended(attained=attained, forced=False)
    cluster.activate("pack")
    cluster.run(cluster.now + 5 * S)
    assert not cluster.moves
    for _ in range(100):
        placer.adaptation.ended(attained=True, forced=False)
    cluster.run(cluster.now + 8 * S)
    assert len(cluster.in_use()) == 1


def test_a_session_that_is_about_to_end_is_left_alone() -> None:
    cluster = PackedCluster(Setup(checked=True, chains=2, goal="off"))
    for _ in range(30):  # what is learned: answers are short
        cluster.arrive(100, 110)
    cluster.run(5 * S)
    spread(cluster, 2, prompt=100, answer=110)
    assert len(cluster.in_use()) == 2
    cluster.activate("pack")
    cluster.run(cluster.now + 2 * S)
    assert not cluster.moves
    assert counted(cluster, "worthless") > 0


def test_a_session_that_cannot_be_moved_goes_on_and_is_tried_ever_less_often() -> None:
    setup = Setup(checked=True, chains=2, goal="off", fails=lambda session: True)
    cluster = PackedCluster(setup)
    spread(cluster, 2)
    cluster.activate("pack")
    cluster.run(60 * S)
    assert len(cluster.in_use()) == 2
    assert 2 <= max(served.moves for served in cluster.requests) <= 4  # at 0, 5, 15 and 35 s
    cluster.run(90 * S)
    assert all(served.over for served in cluster.requests)


def test_devices_of_different_classes_are_packed_apart() -> None:
    cluster = PackedCluster(Setup(checked=True, chains=4, goal="off", classes=("x", "x", "y", "y")))
    spread(cluster, 4)
    cluster.activate("pack")
    cluster.run(10 * S)
    assert len(cluster.in_use()) == 2
    assert {(source, target) for _, _, source, target, _ in cluster.moves} <= {
        ("c00", "c01"),
        ("c01", "c00"),
        ("c02", "c03"),
        ("c03", "c02"),
    }


def test_chains_of_much_different_capacity_are_packed_apart() -> None:
    apart = PackedCluster(Setup(checked=True, chains=2, goal="off", capacities=(16_000, 8_000)))
    spread(apart, 2)
    apart.activate("pack")
    apart.run(10 * S)
    assert len(apart.in_use()) == 2
    near = PackedCluster(Setup(checked=True, chains=2, goal="off", capacities=(16_000, 14_000)))
    spread(near, 2)
    near.activate("pack")
    near.run(10 * S)
    assert len(near.in_use()) == 1


def test_a_further_chain_is_one_that_shares_agents_with_those_in_use() -> None:
    shared = ((0, 1), (2, 3), (0, 4))
    cluster = PackedCluster(
        Setup(checked=True, chains=3, cache_tokens=4000, shared=shared, policy="jffc")
    )
    spread(cluster, 3, prompt=900)
    assert cluster.in_use() == ["c00"]
    cluster.run(25 * S)
    assert cluster.in_use() == ["c00", "c02"]


def test_a_chain_that_is_to_go_is_emptied_and_not_filled_again() -> None:
    cluster = PackedCluster(Setup(checked=True, chains=3))
    spread(cluster, 4)
    (used,) = cluster.in_use()
    agent = cluster.chains[int(used[1:])].hops[0].agent
    cluster.drain(agent)
    cluster.run(cluster.now + 2 * S)
    assert used not in cluster.in_use()
    assert len(cluster.in_use()) == 1
    spread(cluster, 4)
    cluster.run(cluster.now + 5 * S)
    assert used not in cluster.in_use()


def test_an_agent_that_comes_later_is_packed_with_the_others() -> None:
    cluster = PackedCluster(Setup(checked=True, chains=2, goal="off"))
    spread(cluster, 2)
    cluster.activate("pack")
    cluster.tell(AgentJoined(Agent(AgentId("late"), "x", ServerId("late"), 1, 1)))
    cluster.run(5 * S)
    assert len(cluster.in_use()) == 1


def test_slots_are_kept_where_they_bind_before_memory_does() -> None:
    cluster = PackedCluster(Setup(checked=True, chains=4, slots=3, cache_tokens=64_000, goal="off"))
    spread(cluster, 8, prompt=50)
    cluster.activate("pack")
    for _ in range(100):
        cluster.run(cluster.now + 100 * MS)
        assert max(Counter(served.chain for served in cluster.requests).values()) <= 3
    assert len(cluster.in_use()) == 3


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 100), max_size=40))
def test_what_is_needed_is_no_less_than_it_takes_and_little_more(sizes: list[int]) -> None:
    least = lower_bound(sizes, 100)
    assert least <= bins_needed(sizes, 100) <= 3 * least // 2 + 1


def test_scale_in_is_told_what_sessions_need_whether_they_have_moved_or_not() -> None:
    cluster = PackedCluster(Setup(checked=True, chains=6, goal="off", fails=lambda session: True))
    spread(cluster, 6)
    cluster.activate("pack")
    cluster.run(cluster.now + 3 * S)
    assert len(cluster.in_use()) == 6
    assert cluster.dispatcher.chains_needed(MODEL) == 1
    tokens = cluster.dispatcher.tokens_by_agent()
    assert set(tokens) == set(cluster.agents)
    assert all(200 < each < 400 for each in tokens.values())


def test_an_epoch_is_a_second_and_none_is_held_without_sessions() -> None:
    cluster = PackedCluster(Setup(checked=True, chains=2))
    assert cluster.dispatcher.next_wakeup() is None
    cluster.arrive(100, 20)
    cluster.run(10 * S)
    assert cluster.dispatcher.next_wakeup() is None
    assert counted(cluster, "epochs") <= 2


@pytest.mark.parametrize("seed", range(3))
def test_agents_that_come_and_go_and_goals_that_change_lose_nothing(seed: int) -> None:
    draw = random.Random(seed)
    setup = Setup(
        checked=True,
        chains=5,
        goal="pack",
        cache_tokens=6000,
        shared=((0, 1), (1, 2), (3,), (4,), (5, 0)),
        fails=lambda session: session % 5 == 0,
    )
    cluster = PackedCluster(setup)
    for _ in range(60):
        cluster.run(cluster.now + draw.randint(1, S))
        agent = draw.choice(cluster.agents)
        kind = draw.randrange(12)
        if kind == 0:
            cluster.lose(agent)
            cluster.run(cluster.now + draw.randint(1, S))
            cluster.join(agent)
        elif kind == 1:
            cluster.drain(agent)
        elif kind == 2:
            cluster.join(agent)
        elif kind == 3:
            cluster.activate(draw.choice(PACKING_GOALS))
        else:
            cluster.arrive(draw.randint(8, 900), draw.randint(8, 900))
    for agent in cluster.agents:
        cluster.join(agent)
    cluster.run(cluster.now + 300 * S)
    assert all(served.over for served in cluster.requests)
    assert not cluster.rejected
    assert counted(cluster, "faults") == 0
    assert cluster.dispatcher.statistics()["booked_slots"] == 0


@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    chains=st.integers(2, 6),
    cache=st.integers(2048, 9000),
    slots=st.integers(2, 12),
    goal=st.sampled_from(["pack", "balance"]),
    policy=st.sampled_from(["slo", "jffc"]),
    fails=st.booleans(),
)
def test_moves_never_overfill_a_chain_and_nothing_is_lost(
    seed: int, chains: int, cache: int, slots: int, goal: PackingGoal, policy: str, fails: bool
) -> None:
    setup = Setup(
        checked=True,
        chains=chains,
        cache_tokens=cache,
        slots=slots,
        goal=goal,
        policy=policy,
        fails=lambda session: fails and session % 3 == 0,
    )
    cluster = busy(setup, 2.0, 8, seed)  # the cluster itself looks at every order
    cluster.run(cluster.now + 400 * S)
    assert all(served.over for served in cluster.requests)
    assert not cluster.rejected
    assert counted(cluster, "faults") == 0
    assert cluster.dispatcher.statistics()["booked_slots"] == 0
