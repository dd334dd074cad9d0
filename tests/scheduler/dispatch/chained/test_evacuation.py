"""Sessions on agents that are to go and on partitions that no plan has: where they go, and when."""

from __future__ import annotations

from dataclasses import replace

from catenary_scheduler.dispatch.chained import ChainedConfig
from catenary_scheduler.dispatch.events import (
    AgentJoined,
    CloseSessions,
    Command,
    MoveCostsMeasured,
    MoveMode,
    PlanActivated,
    SessionMoved,
    SessionProgress,
    SessionsClosed,
    SessionsProgressed,
    StartSession,
)
from catenary_services.domain.ids import AgentId, ServerId
from catenary_services.domain.latency import LatencyLines, TokenObjectives
from catenary_services.domain.plan import Agent, Plan
from scheduling_cases.chain_bench import ChainBench, chain, closes, hop, only, plan, started
from scheduling_cases.move_bench import MoveBench

A, B, C = AgentId("a"), AgentId("b"), AgentId("c")
EIGHT = plan(chain("a", 8, 40), chain("b", 8, 50), chain("c", 8, 60))


def draining(bench: ChainBench, at_ms: float, agent: AgentId) -> list[StartSession]:
    commands = bench.drain(at_ms, agent)
    assert all(isinstance(each, StartSession) for each in commands)
    return [each for each in commands if isinstance(each, StartSession)]


def moves(commands: list[Command]) -> list[StartSession]:
    return [each for each in commands if isinstance(each, StartSession) and each.moves]


def test_the_sessions_of_an_agent_that_is_to_go_move_a_few_at_a_time_until_none_is_left() -> None:
    bench = MoveBench(EIGHT, ChainedConfig(max_moves_per_agent=4))
    sessions = [bench.running(tokens=1 + number) for number in range(8)]
    under_way = draining(bench, 1, A)
    # The largest first; as many at a time as one agent may have.
    assert [each.moves for each in under_way] == [each.session for each in sessions[:3:-1]]
    assert {each.chain_id for each in under_way} == {"b", "c"}
    assert bench.figure("misplaced_sessions") == 8
    at_ms, done = 2.0, []
    while under_way:
        new = under_way.pop(0)
        commands = bench.moved(at_ms, new)
        assert new.moves is not None
        assert closes(commands) == {"a": (new.moves,)}
        commands += bench.tell(at_ms, SessionsClosed(A, (new.moves,)))
        under_way += moves(commands)
        assert bench.figure("moving_sessions") <= 4
        done.append(new.moves)
        at_ms += 1
    assert sorted(done) == [each.session for each in sessions]
    assert bench.booked() == {"b": 24, "c": 24}
    assert bench.figure("misplaced_sessions") == bench.figure("restarted_sessions") == 0
    assert bench.figure("kv_moves") == 8


def test_nothing_begins_on_an_agent_that_is_to_go_unless_nobody_else_serves_the_model() -> None:
    bench = MoveBench(plan(chain("a", 2, 40), chain("b", 2, 50)))
    draining(bench, 0, A)
    assert [started(bench.ask(1))[0][1] for _ in range(2)] == ["b", "b"]
    assert bench.ask(1) == []  # full is not gone: it waits
    draining(bench, 2, B)
    assert bench.figure("usable_chains") == 2
    assert bench.figure("queued_requests") == 0 or started(bench.tick(2))


def test_misplaced_sessions_take_free_slots_before_requests_that_wait() -> None:
    bench = MoveBench(plan(chain("a", 2, 40), chain("b", 1, 50)))
    misplaced = [bench.running(), bench.running()]
    other = bench.running()
    assert other.chain_id == "b"
    assert bench.ask(1, 100_000) == []
    assert draining(bench, 2, A) == []  # b is full
    (new,) = [each for each in bench.end(3, other) if isinstance(each, StartSession)]
    assert (new.moves, new.chain_id) == (misplaced[0].session, "b")
    # It stays until it ends where nobody has room for it, and is not started again.
    assert not started(bench.tick(9_000))
    assert bench.figure("restarted_sessions") == 0


def test_a_misplaced_session_that_could_not_be_moved_is_tried_again_after_a_pause_that_doubles() -> (
    None
):
    bench = MoveBench(EIGHT)
    old = bench.running()
    (new,) = draining(bench, 1, A)
    assert not moves(bench.fail(2, new, "b"))
    assert bench.dispatcher.next_wakeup() is not None
    assert not moves(bench.tick(201))
    (new,) = moves(bench.tick(203))
    assert new.moves == old.session
    bench.fail(203, new, "b")
    assert not moves(bench.tick(600))
    assert moves(bench.tick(604))


def test_a_misplaced_session_whose_prompt_runs_moves_when_it_has_its_first_token() -> None:
    bench = MoveBench(EIGHT)
    old = bench.start(0)
    assert draining(bench, 1, A) == []
    (new,) = moves(bench.progress(2, old, 1))
    assert new.moves == old.session


def test_an_agent_that_is_taken_back_keeps_the_sessions_it_still_has() -> None:
    bench = MoveBench(EIGHT, ChainedConfig(max_moves=1))
    first, second = bench.running(tokens=9), bench.running()
    (new,) = draining(bench, 1, A)
    assert new.moves == first.session
    bench.take_back(2, "a")
    assert not moves(bench.moved(3, new))
    assert bench.current(second) == second.session
    assert started(bench.ask(4))[0][1] == "a"


def test_sessions_leave_partitions_that_a_new_plan_does_not_have() -> None:
    bench = MoveBench(EIGHT)
    old = bench.running()
    without = plan(chain("b", 8, 50), chain("c", 8, 60))
    (new,) = moves(bench.tell(1, PlanActivated(without)))
    assert (new.moves, new.chain_id) == (old.session, "b")


def test_sessions_stay_where_a_new_plan_has_the_partitions_but_not_the_chain() -> None:
    one = plan(chain("one", 2, 40, hop("a", 0, 2), hop("b", 2, 6)), chain("c", 2, 60))
    other = plan(
        chain("two", 2, 40, hop("a", 0, 2), hop("d", 2, 6)),
        chain("three", 2, 50, hop("e", 0, 2), hop("b", 2, 6)),
        chain("c", 2, 60),
    )
    bench = MoveBench(one)
    bench.running()
    assert bench.tell(1, PlanActivated(other)) == []
    assert bench.figure("misplaced_sessions") == 0


def test_sessions_that_move_may_be_switched_off() -> None:
    bench = MoveBench(EIGHT, ChainedConfig(max_moves=0))
    bench.running()
    assert draining(bench, 1, A) == []


# ---- where to, and how ----


def lined(active: Plan, *, cache_tokens: float = 0.0, packed: bool = False) -> Plan:
    """Returns a plan whose chains have lines: 10 ms a step, 0.1 ms for each cached token."""
    lines = LatencyLines(1e6, 5e6, 1e5, 0.0, 10e6)
    model = active.models[0]
    chains = tuple(replace(each, lines=lines, cache_tokens=cache_tokens) for each in model.chains)
    goal = "pack" if packed else "off"
    return replace(active, models=(replace(model, chains=chains, packing=goal),))


def test_packed_models_have_their_misplaced_sessions_go_to_the_fullest_chain_with_room() -> None:
    for packed, expected in ((False, "c"), (True, "b")):
        bench = MoveBench(lined(EIGHT, packed=packed))
        old = bench.running()
        bench.move(1, bench.running(), "b")
        (new,) = [each for each in draining(bench, 2, A) if each.moves == old.session]
        assert new.chain_id == expected


def test_a_misplaced_session_goes_where_nobody_misses_an_objective_if_it_can() -> None:
    pace = TokenObjectives(0, 16_000_000)
    bench = MoveBench(
        lined(plan(chain("a", 4, 40), chain("b", 9, 50), chain("c", 2, 60))), policy="slo"
    )
    model = bench.dispatcher._table.model_queues[next(iter(bench.dispatcher._table.model_queues))]
    assert model.placer is not None
    model.placer.requests.objectives = pace
    sessions = [bench.start(0, 100_000) for _ in range(3)]
    for session in sessions:
        bench.progress(1, session, 1)
    by_chain = {each.chain_id: each for each in sessions}
    assert set(by_chain) == {"a", "b", "c"}
    # Answers on b were predicted short; they are long by now.
    bench.progress(2, by_chain["b"], 120)
    (new,) = draining(bench, 3, A)
    assert new.chain_id == "c"  # by slots, b is the emptier


def test_misplaced_sessions_travel_as_caches_or_as_tokens_whichever_is_faster() -> None:
    def way(bytes_per_second: int) -> MoveMode:
        bench = MoveBench(
            lined(plan(chain("a", 4, 40), chain("b", 4, 50))), policy="slo", agents=""
        )
        for name in (A, B):
            agent = Agent(name, "x", ServerId(name), 1, bytes_per_second)
            bench.tell(0, AgentJoined(agent))
        bench.tell(0, PlanActivated(lined(plan(chain("a", 4, 40), chain("b", 4, 50)))))
        cache_bytes = ((bench.dispatcher._table.plan.models[0].model, 100_000),)
        bench.tell(0, MoveCostsMeasured((), cache_bytes))
        old = bench.start(0, 100_000)
        bench.progress(1, old, 2)
        mine = old.chain_id
        (new,) = draining(bench, 2, AgentId(mine))
        return new.move_mode

    assert way(10**10) == "kv"
    assert way(10**3) == "tokens"


def test_a_session_runs_at_both_workers_until_it_has_moved() -> None:
    bench = MoveBench(lined(plan(chain("a", 4, 40), chain("b", 4, 50))), policy="slo")
    old = bench.start(0, 100_000)
    bench.progress(1, old, 2)
    placer = next(iter(bench.dispatcher._table.model_queues.values())).placer
    assert placer is not None

    def loads() -> list[tuple[int, int]]:
        return [
            (len(worker.running_sequences), worker.now_tokens)
            for _, worker in placer.workers.mixed()
        ]

    here = ["a", "b"].index(old.chain_id)
    assert loads()[here] == (1, 7)
    new = only(bench.want(2, old), StartSession)
    assert loads() == [(1, 7), (1, 7)]
    bench.progress(3, old, 4)
    assert loads() == [(1, 9), (1, 9)]
    bench.tell(4, SessionMoved(new.session, old.session))
    assert loads()[here] == (0, 0)
    assert loads()[1 - here] == (1, 9)
    bench.progress(5, old, 5)
    assert loads()[1 - here] == (1, 10)
    back = bench.move(6, new)
    bench.fail(7, back)
    assert loads()[here] == (0, 0)
    bench.tell(8, SessionsProgressed((SessionProgress(old.request, 6, 1, 2),)))
    assert loads()[1 - here] == (1, 11)
    assert [each.agent for each in bench.finished(9, old) if isinstance(each, CloseSessions)]
    assert loads() == [(0, 0), (0, 0)]
