"""Re-balancing in the dispatcher: a start nobody was told of yet may be taken back."""

from __future__ import annotations

import random

from catenary_scheduler.dispatch.chained import ChainedConfig
from catenary_scheduler.dispatch.chained.placement.slo_placer import SloPlacer
from catenary_scheduler.dispatch.events import (
    Command,
    PlanActivated,
    RequestCompleted,
    SessionProgress,
    SessionRequested,
    SessionsProgressed,
    StartSession,
)
from catenary_scheduler.dispatch.placing.lengths import LengthPredictor
from catenary_services.domain.ids import GatewayId, PlanId, RequestId, SessionId
from catenary_services.domain.latency import LatencyLines, TokenObjectives
from catenary_services.domain.plan import CacheCapacity, Chain, ModelPlan, Plan
from scheduling_cases.chain_bench import LLAMA, MS, ChainBench, hop, only, rejects

LINES = LatencyLines(0.1 * MS, 5 * MS, 0.001 * MS, 0.1 * MS, 10 * MS)
OBJECTIVES = TokenObjectives(2_000 * MS, 40 * MS)
ON = ChainedConfig(rebalance=True)


def worker(name: str, capacity: int, *hops: str) -> Chain:
    parts = [
        hop(agent, 6 * at // len(hops), 6 * (at + 1) // len(hops)) for at, agent in enumerate(hops)
    ]
    return Chain(name, tuple(parts) or (hop(name, 0, 6),), capacity, 100 * MS, lines=LINES)


def plan_of(*chains: Chain, slots: dict[str, int] | None = None) -> Plan:
    caches = tuple(
        CacheCapacity(each.agent, each.partition, (slots or {})[each.agent])
        for each in dict.fromkeys(h for chain in chains for h in chain.hops)
        if each.agent in (slots or {})
    )
    model = ModelPlan(LLAMA, 10**9, (), True, chains, caches, objectives=OBJECTIVES)
    return Plan(PlanId("p"), (model,))


def bench(active: Plan, config: ChainedConfig = ON) -> ChainBench:
    made = ChainBench(active, config, policy="slo")
    known = LengthPredictor()
    for _ in range(300):
        known.learn(100, 200)
    made.dispatcher.restore_lengths(LLAMA, known)
    return made


def placer_of(each: ChainBench) -> SloPlacer:
    placer = each.dispatcher._table.model_queues[LLAMA].placer
    assert placer is not None
    return placer


def ask(each: ChainBench, at_ms: float, prompt: int = 100) -> list[Command]:
    each.number += 1
    request = RequestId(GatewayId("g"), each.number)
    event = SessionRequested(request, LLAMA, prompt, 400, round((at_ms + 60_000) * MS))
    return each.tell(at_ms, event)


def tell_errors(each: ChainBench, over: str, under: str) -> None:
    """Has one worker turn out to have more left than was thought, and another less."""
    placer = placer_of(each)
    assert placer.loads.rebalancer is not None
    workers = {route.chain_id: found for route, found in placer.workers.mixed()}
    placer.loads.rebalancer.outgrew(workers[over], 900.0)
    placer.loads.rebalancer.ended_early(workers[under], 900.0, 10)


def test_a_session_begins_where_others_ended_early() -> None:
    usual = bench(plan_of(worker("a", 4), worker("b", 4)))
    first = only(ask(usual, 0), StartSession).chain_id
    other = {"a": "b", "b": "a"}[first]
    each = bench(plan_of(worker("a", 4), worker("b", 4)))
    tell_errors(each, over=first, under=other)
    start = only(ask(each, 0), StartSession)
    assert (start.chain_id, start.hops[0].agent) == (other, other)
    assert each.booked() == {other: 6}
    assert each.figure("rebalanced_sessions") == 1
    assert each.figure("started_sessions") == each.figure("sessions_in_flight") == 1
    running = {route.chain_id: route.running for route, _ in placer_of(each).workers.mixed()}
    assert running == {first: 0, other: 1}
    assert each.end(100, start) == []
    assert each.booked() == {}


def test_nothing_moves_if_it_is_not_asked_for() -> None:
    each = bench(plan_of(worker("a", 4), worker("b", 4)), ChainedConfig())
    assert placer_of(each).loads.rebalancer is None
    only(ask(each, 0), StartSession)
    assert each.figure("rebalanced_sessions") == 0


def test_a_worker_without_a_free_slot_gains_nobody() -> None:
    each = bench(plan_of(worker("a", 1), worker("b", 4)))
    taken = only(ask(each, 0), StartSession).chain_id
    if taken != "a":
        taken = only(ask(each, 0), StartSession).chain_id
    assert taken == "a"
    tell_errors(each, over="b", under="a")
    assert only(ask(each, 500), StartSession).chain_id == "b"
    assert each.figure("rebalanced_sessions") == 0


def test_a_move_that_breaks_a_constraint_is_not_made() -> None:
    active = plan_of(worker("a", 4), worker("b", 4))
    probe = bench(active)
    first = only(ask(probe, 0), StartSession).chain_id
    other = {"a": "b", "b": "a"}[first]
    each = bench(active)
    (busy,) = [found for route, found in placer_of(each).workers.mixed() if route.chain_id == other]
    busy.limits = type(busy.limits)(0, 0, 150.0, 0.5)  # caches too small for prompt and answer
    tell_errors(each, over=first, under=other)
    assert only(ask(each, 0), StartSession).chain_id == first


def test_errors_come_from_what_gateways_report() -> None:
    each = bench(plan_of(worker("a", 4), worker("b", 4)))
    one, two = only(ask(each, 0), StartSession), only(ask(each, 500), StartSession)
    assert {one.chain_id, two.chain_id} == {"a", "b"}
    rebalancer = placer_of(each).loads.rebalancer
    assert rebalancer is not None
    grown = SessionProgress(one.request, 390, 20 * MS, 389 * 12 * MS)
    each.tell(5000, SessionsProgressed((grown,)))
    short = SessionProgress(two.request, 3, 20 * MS, 2 * 12 * MS)
    each.tell(5001, RequestCompleted(two.request, short))
    workers = {route.chain_id: found for route, found in placer_of(each).workers.mixed()}
    grown_errors = rebalancer._errors[workers[one.chain_id]]
    short_errors = rebalancer._errors[workers[two.chain_id]]
    assert (grown_errors.sessions, short_errors.sessions) == (1, -1)
    assert 390 < grown_errors.tokens <= 400
    assert -200 < short_errors.tokens < -190


def test_whatever_moves_nobody_is_lost_and_no_cache_is_overfull() -> None:
    chance = random.Random(5)
    active = plan_of(
        worker("ab", 3, "a", "b"),
        worker("cb", 3, "c", "b"),
        worker("d", 2),
        worker("e", 3),
        slots={"b": 3 * 4, "d": 12, "e": 15},
    )
    names = [chain.chain_id for model in active.models for chain in model.chains]
    each = bench(active)
    open_sessions: dict[SessionId, StartSession] = {}
    ended = at_ms = 0
    commands: list[Command] = []
    while each.number < 250 or open_sessions:
        at_ms += 40
        tell_errors(each, *chance.sample(names, 2))
        if each.number < 250 and chance.random() < 0.7:
            commands += ask(each, at_ms, chance.choice((20, 100, 600)))
        elif chance.random() < 0.05:
            commands += each.tell(at_ms, PlanActivated(active))
        else:
            for start in chance.sample(
                sorted(open_sessions.values(), key=lambda s: s.session), min(4, len(open_sessions))
            ):
                del open_sessions[start.session]
                ended += 1
                commands += each.end(at_ms, start)
        commands += each.tick(at_ms)
        assert not rejects(commands)
        for command in commands:
            if isinstance(command, StartSession):
                assert command.session not in open_sessions
                open_sessions[command.session] = command
        commands = []
        held: dict[str, int] = {}
        for start in open_sessions.values():
            for part in start.hops:
                held[part.agent] = held.get(part.agent, 0) + part.blocks
        assert each.booked() == held
        assert all(cache.used <= cache.capacity for cache in each.book.slots.caches())
        assert each.figure("sessions_in_flight") == len(open_sessions)
    assert ended == 250
    assert each.figure("rebalanced_sessions") > 10
    assert all(route.running == 0 for route, _ in placer_of(each).workers.mixed())
