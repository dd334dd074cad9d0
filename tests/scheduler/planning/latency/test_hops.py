"""Lines of chains: hops add up, chunks follow each other, agents that measured nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from catenary_scheduler.planning.latency import ClusterLines, HopCost, cache_line, chain_lines
from catenary_scheduler.planning.live import GenerationCost
from catenary_services.domain.decoder import DecoderTable
from catenary_services.domain.ids import AgentId, ModelKey, PartitionKey, ServerId
from catenary_services.domain.plan import Agent, ChainHop

MS = 1_000_000
COST = GenerationCost(10 * MS, 2 * MS, 50 * MS, 6 * MS, 4_000.0, 52 * MS, 30 * MS, 64)
SLOW = GenerationCost(20 * MS, 3 * MS, 70 * MS, 9 * MS, 6_000.0, 75 * MS, 40 * MS, 64)
LLM = ModelKey("llm", "1")
TABLE = DecoderTable(
    "hash",
    30,
    576,
    9,
    3,
    64,
    49_152,
    2048,
    (2,),
    block_bytes=100,
    embedding_bytes=800,
    head_bytes=200,
    cache_bytes_per_token=1536,
)
WAY = 1_000.0


def agent(name: str, device_class: str = "cpu", rate: int = 0) -> Agent:
    return Agent(AgentId(name), device_class, ServerId("s"), 0, rate)


def hop(name: str, first: int, last: int, entry: int | None = None) -> ChainHop:
    key = PartitionKey(LLM, first, last)
    return ChainHop(AgentId(name), key, first if entry is None else entry, last)


def test_one_agent_is_its_own_line() -> None:
    lines = chain_lines([HopCost(COST)], hop_ns=0.0)
    assert lines.prefill(1) == 30 * MS  # the floor
    assert lines.prefill(64) == COST.prefill(64) == 138 * MS
    assert lines.prefill(128) == 2 * COST.prefill(64)  # two chunks
    assert lines.decode(1, 100) == 52 * MS
    assert lines.decode(3, 1000) == 50 * MS + 18 * MS + 4 * MS
    assert lines.cache(7) == 7


def test_hops_add_up_with_the_ways_between() -> None:
    lines = chain_lines([HopCost(COST), HopCost(SLOW)], hop_ns=WAY)
    assert lines.decode(4, 900) == COST.decode(4, 900) + SLOW.decode(4, 900) + 2 * WAY
    assert lines.decode(1, 0) == COST.decode(1) + SLOW.decode(1) + 2 * WAY
    assert lines.prefill(50) == COST.prefill(50) + SLOW.prefill(50) + 3 * WAY
    assert lines.prefill(1) == 70 * MS + 3 * WAY


def test_behind_the_first_chunk_the_slowest_hop_counts() -> None:
    """While it computes a chunk the others compute theirs."""
    lines = chain_lines([HopCost(COST), HopCost(SLOW)], hop_ns=0.0)
    first = COST.prefill(64) + SLOW.prefill(64)
    assert lines.prefill(64) == first
    assert lines.prefill(64 * 5) == pytest.approx(first + 4 * SLOW.prefill(64))


def test_whole_prompts_are_a_single_line() -> None:
    whole = replace(COST, prefill_chunk_tokens=0)
    lines = chain_lines([HopCost(whole)], hop_ns=0.0)
    assert lines.prefill(1000) == 10 * MS + 2000 * MS
    assert lines.prefill_later_token_ns == 0.0


def test_a_hop_counts_by_the_blocks_it_computes_and_its_link() -> None:
    lines = chain_lines([HopCost(COST), HopCost(COST, share=0.5, row_ns=7.0)], hop_ns=0.0)
    assert lines.decode(2, 0) == 1.5 * COST.decode(2) + 2 * 7.0
    assert lines.prefill_token_ns == 3 * MS + 7.0


def test_no_lone_step_where_one_hop_says_nothing() -> None:
    nothing = GenerationCost(0, 0, 0, 0)
    assert chain_lines([HopCost(COST), HopCost(nothing)]).decode_lone_ns == 0.0


def test_a_cache_takes_keys_and_values_of_every_block() -> None:
    assert cache_line(TABLE) == (30 * 1536.0, 0.0)


def lines_of(costs: dict[tuple[str, int, int], GenerationCost], *agents: Agent) -> ClusterLines:
    measured = {
        (AgentId(name), PartitionKey(LLM, first, last)): cost
        for (name, first, last), cost in costs.items()
    }
    return ClusterLines(TABLE, agents, measured, LLM, hop_ns=0.0)


def test_the_very_partition_speaks_first() -> None:
    known = lines_of({("a", 0, 15): SLOW, ("a", 0, 10): COST, ("b", 10, 30): SLOW})
    lines = known.lines([hop("a", 0, 10), hop("b", 10, 30)])
    assert lines is not None
    assert lines.decode(1, 0) == COST.decode(1) + SLOW.decode(1)


def test_a_late_entry_takes_its_share_and_the_head_counts_as_blocks() -> None:
    """20 blocks and a head worth 2; 10 of these blocks and the head are 12 / 22."""
    known = lines_of({("a", 0, 20): COST, ("b", 10, 30): COST})
    lines = known.lines([hop("a", 0, 20), hop("b", 10, 30, entry=20)])
    assert lines is not None
    assert lines.decode(2, 0) == pytest.approx(COST.decode(2) * (1 + 12 / 22))


def test_of_who_measured_nothing_the_slowest_of_its_class_speaks() -> None:
    costs = {("a", 0, 30): COST, ("b", 0, 30): SLOW, ("c", 0, 30): replace(COST, decode_ns=1)}
    known = lines_of(costs, agent("a"), agent("b", "gpu"), agent("c"), agent("new"))
    lines = known.lines([hop("new", 0, 30)])
    assert lines is not None
    assert lines.decode(2, 0) == COST.decode(2)
    stranger = lines_of(costs, agent("other", "tpu")).lines([hop("other", 0, 30)])
    assert stranger is not None
    assert stranger.decode(2, 0) == SLOW.decode(2)


def test_nothing_measured_is_nothing_known() -> None:
    assert lines_of({}).lines([hop("a", 0, 30)]) is None
    # An agent without room for a session says 0.
    assert lines_of({("a", 0, 30): GenerationCost(0, 0, 0, 0)}).lines([hop("a", 0, 30)]) is None


def test_rows_travel_over_the_link() -> None:
    costs = {("a", 0, 15): COST, ("b", 15, 30): COST}
    known = lines_of(costs, agent("a"), agent("b", rate=576 * 4 * 1000))
    lines = known.lines([hop("a", 0, 15), hop("b", 15, 30)])
    assert lines is not None
    assert lines.decode_session_ns == 2 * COST.decode_session_ns + 1 * MS
