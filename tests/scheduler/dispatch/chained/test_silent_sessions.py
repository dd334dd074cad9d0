"""Sessions that get no tokens, though every agent of theirs seems well, are started again."""

from __future__ import annotations

from catenary_scheduler.dispatch.chained import ChainedConfig
from catenary_scheduler.dispatch.events import (
    Command,
    SessionProgress,
    SessionsProgressed,
    StartSession,
)
from scheduling_cases.chain_bench import MS, ChainBench, chain, plan, started

BUDGET_MS = 10**9
CONFIG = ChainedConfig(stall_ns=1000 * MS)


def bench_of(service_ms: float, config: ChainedConfig = CONFIG) -> ChainBench:
    return ChainBench(plan(chain("a", 1, service_ms), chain("b", 1, service_ms + 1)), config)


def token(bench: ChainBench, at_ms: float, session: StartSession, number: int) -> list[Command]:
    decode_ns = round(at_ms * MS)
    progress = SessionProgress(session.request, number, 0, decode_ns)
    return bench.tell(at_ms, SessionsProgressed((progress,)))


def restarted_ms(bench: ChainBench, since_ms: int, until_ms: int) -> int | None:
    """Returns when a session was started again, to the next eighth of the patience."""
    for now in range(since_ms, until_ms, 125):
        if started(bench.tick(now)):
            return now
    return None


def test_one_that_stops_to_generate_has_the_plain_patience() -> None:
    bench = bench_of(50)
    session = bench.start(0, BUDGET_MS)
    token(bench, 100, session, 1)
    found = restarted_ms(bench, 100, 5000)
    assert found is not None
    assert 1100 < found <= 1100 + 250


def test_one_without_a_token_has_four_times_as_long_for_its_prompt() -> None:
    bench = bench_of(50)
    bench.start(0, BUDGET_MS)
    found = restarted_ms(bench, 0, 20_000)
    assert found is not None
    assert 4000 < found <= 4250


def test_a_chain_that_is_slow_by_plan_has_longer_for_a_prompt() -> None:
    bench = bench_of(2000)
    bench.start(0, BUDGET_MS)
    found = restarted_ms(bench, 0, 60_000)
    assert found is not None
    assert 20_000 < found <= 20_250


def test_one_that_generates_slowly_but_steadily_is_left_alone() -> None:
    bench = bench_of(50)
    session = bench.start(0, BUDGET_MS)
    for number in range(1, 30):
        assert started(token(bench, 900 * number, session, number)) == []
    assert bench.figure("stalled_sessions") == 0
