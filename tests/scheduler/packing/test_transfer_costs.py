"""What moves take, on chains that are cut alike and otherwise."""

import pytest

from catenary_scheduler.packing.transfers.transfer_costs import (
    ChainActivity,
    MoveTimes,
    move_cost,
    move_times,
)
from catenary_scheduler.packing.transfers.transfer_costs import tokens_per_epoch as tokens_in
from catenary_scheduler.packing.transfers.transfers import TransferMove
from catenary_services.domain.ids import AgentId, ModelKey, PartitionKey, ServerId
from catenary_services.domain.latency import LatencyLines
from catenary_services.domain.plan import ChainHop

MODEL = ModelKey("text", "1")
MS = 1_000_000
SECOND = 1_000_000_000
SERVERS = {AgentId(name): ServerId(name[0]) for name in ("a1", "a2", "b1", "c1")}
LINES = LatencyLines(
    prefill_token_ns=0.1 * MS,
    prefill_ns=5 * MS,
    decode_context_token_ns=0.01 * MS,
    decode_session_ns=1 * MS,
    decode_ns=20 * MS,
)


def chain(*cuts: tuple[str, int, int]) -> tuple[ChainHop, ...]:
    return tuple(
        ChainHop(AgentId(agent), PartitionKey(MODEL, first, last), first, last)
        for agent, first, last in cuts
    )


def test_blocks_travel_from_who_has_them_to_who_will() -> None:
    source = chain(("a1", 0, 6), ("b1", 6, 10))
    target = chain(("c1", 0, 4), ("b1", 4, 8), ("a2", 8, 10))
    cost = move_cost(source, target, tokens=10, cache_bytes_per_token=3, servers=SERVERS)
    # 4 blocks a1 -> c1, 2 blocks a1 -> b1, 2 of b1 stay, 2 blocks b1 -> a2; 30 bytes each
    assert cost.link_bytes == {
        "a1>c1": 120,
        "a1>b1": 60,
        "b1>a2": 60,
        "a:up": 180,
        "b:up": 60,
        "c:down": 120,
        "b:down": 60,
        "a:down": 60,
    }
    assert (cost.cache_bytes, cost.tokens) == (240, 10)


def test_within_a_server_no_network_card_is_passed() -> None:
    cost = move_cost(chain(("a1", 0, 2)), chain(("a2", 0, 2)), 5, 4, SERVERS)
    assert cost.link_bytes == {"a1>a2": 40}


def test_what_stays_on_its_agent_passes_nothing() -> None:
    cost = move_cost(chain(("a1", 0, 2)), chain(("a1", 0, 2)), 5, 4, SERVERS)
    assert cost.link_bytes == {}
    move = cost.move(1, "old", "new")
    assert move == TransferMove(1, "old", "new", kv=0, tokens=5, links=())


def test_an_agent_of_which_nothing_is_known_is_alone_on_its_server() -> None:
    cost = move_cost(chain(("a1", 0, 1)), chain(("x", 0, 1)), 1, 1, SERVERS)
    assert set(cost.link_bytes) == {"a1>x", "a:up", "x:down"}


def test_the_slowest_link_says_how_long_caches_travel() -> None:
    move = TransferMove(1, 0, 1, 300, 100, ("up", "pair"), (300, 100))
    rates = {"up": 1000, "pair": 200}
    assert move_times(move, rates.__getitem__, ChainActivity(None)).kv_ns == SECOND // 2
    assert move_times(move, lambda _: 0, ChainActivity(None)) == MoveTimes(None, None)


def test_tokens_are_read_between_the_steps_of_the_others() -> None:
    move = TransferMove(1, 0, 1, 300, 100, ())
    lone = move_times(move, lambda _: 1, ChainActivity(LINES))
    assert lone == MoveTimes(0, 15 * MS)
    chunked = LatencyLines(0.1 * MS, 5 * MS, 0.01 * MS, 1 * MS, 20 * MS, prefill_chunk_tokens=30)
    busy = move_times(move, lambda _: 1, ChainActivity(chunked, sessions=2, context_tokens=300))
    assert busy.tokens_ns == (15 + 4 * 25) * MS


@pytest.mark.parametrize(
    ("times", "kinds"),
    [
        (MoveTimes(5, 6), ["kv", "tokens"]),
        (MoveTimes(6, 5), ["tokens", "kv"]),
        (MoveTimes(5, 5), ["kv", "tokens"]),
        (MoveTimes(None, 5), ["tokens"]),
        (MoveTimes(5, None), ["kv"]),
        (MoveTimes(None, None), []),
    ],
)
def test_the_faster_way_comes_first(times: MoveTimes, kinds: list[str]) -> None:
    assert times.kinds() == kinds


def test_an_idle_chain_reads_all_the_time() -> None:
    tokens = tokens_in(ChainActivity(LINES), SECOND, slowdown=0.1)
    assert LINES.prefill(tokens) <= SECOND < LINES.prefill(tokens + 1)


def test_a_busy_chain_slows_down_no_more_than_it_may() -> None:
    load = ChainActivity(LINES, sessions=5, context_tokens=1000)  # a step takes 35 ms
    tokens = tokens_in(load, SECOND, slowdown=0.25)
    steps = (SECOND - LINES.prefill(tokens)) / LINES.decode(5, 1000)
    undisturbed = SECOND / LINES.decode(5, 1000)
    assert undisturbed / steps <= 1.25
    assert undisturbed * LINES.decode(5, 1000) / (steps * 35 * MS - 0.2 * MS) > 1.25


def test_nobody_misses_an_objective_because_others_are_read() -> None:
    def within(per_token_ns: int) -> int:
        return tokens_in(ChainActivity(LINES, 5, 1000, per_token_ns), SECOND, slowdown=0.25)

    assert within(30 * MS) == 0  # missed as it is
    assert 0 < within(38 * MS) < within(0) == within(100 * MS)


def test_chains_that_share_an_agent_share_its_time() -> None:
    alone = tokens_in(ChainActivity(LINES), SECOND, 0.1)
    shared = tokens_in(ChainActivity(LINES, sharing=2), SECOND, 0.1)
    assert LINES.prefill(shared) <= SECOND / 2 < LINES.prefill(shared + 1)
    assert shared < alone


def test_a_chain_of_which_nothing_is_known_reads_nothing() -> None:
    assert tokens_in(ChainActivity(None), SECOND, 0.1) == 0


def test_flat_lines_bound_nothing() -> None:
    assert tokens_in(ChainActivity(LatencyLines(0.0, 1.0, 0.0, 0.0, 1.0)), SECOND, 0.1) >= 1 << 40
