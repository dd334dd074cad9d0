"""Boundaries start from what agents say, follow what is measured, and are shared by all moves."""

from hypothesis import given, settings
from hypothesis import strategies as st

from catenary_scheduler.packing.transfers.migration_budget import (
    MigrationBudget,
    MigrationBudgetConfig,
)
from catenary_scheduler.packing.transfers.transfer_costs import ChainActivity
from catenary_scheduler.packing.transfers.transfers import TransferMove
from catenary_services.domain.ids import AgentId, ModelKey, PartitionKey, ServerId
from catenary_services.domain.latency import LatencyLines
from catenary_services.domain.plan import Agent, ChainHop

SECOND = 1_000_000_000
MODEL = ModelKey("text", "1")
A, B = AgentId("a1"), AgentId("b1")
IDLE = ChainActivity(LatencyLines(1e6, 0.0, 0.0, 0.0, 1e6))
"""Reads a thousand tokens in a second."""


def boundaries(*, link_share: float = 0.5) -> MigrationBudget:
    found = MigrationBudget(MigrationBudgetConfig(link_share=link_share))
    for name, rate in (("a1", 1000), ("a2", 400), ("b1", 800)):
        found.agent_joined(Agent(AgentId(name), "cpu", ServerId(name[0]), 1, rate))
    return found


def over(link: str, size: int, number: int = 1, tokens: int = 10_000) -> TransferMove:
    return TransferMove(number, "old", "new", size, tokens, (link,))


def test_links_are_as_fast_as_agents_said_until_somebody_measures() -> None:
    known = boundaries()
    assert known.rate("a1>b1") == 800
    assert known.rate("a1>a2") == 400
    assert known.rate("a:up") == 1000  # the fastest its agents know of
    assert known.rate("a1>nobody") == 0
    assert known.per_epoch("a1>b1") == 400
    known.measured(A, B, 300)
    assert (known.rate("a1>b1"), known.rate("a:up"), known.rate("b1>a1")) == (300, 1000, 800)
    known.measured(A, B, 1500)
    assert (known.rate("a:up"), known.rate("b:down"), known.rate("b:up")) == (1500, 1500, 800)


def test_an_agent_that_comes_back_with_another_card_is_believed() -> None:
    known = boundaries()
    known.agent_joined(Agent(A, "cpu", ServerId("a"), 1, 500))
    assert (known.rate("a:up"), known.rate("a1>b1")) == (500, 500)
    known.measured(A, B, 900)
    known.agent_joined(Agent(A, "cpu", ServerId("a"), 1, 500))
    assert (known.rate("a:up"), known.rate("a1>b1")) == (900, 900)  # it can do that


def test_a_measurement_within_a_server_says_nothing_of_its_network_card() -> None:
    known = boundaries()
    known.measured(A, AgentId("a2"), 9000)
    assert known.rate("a:up") == 1000


def test_a_move_costs_what_the_model_caches() -> None:
    known = boundaries()
    hop = ChainHop(A, PartitionKey(MODEL, 0, 2), 0, 2)
    there = ChainHop(B, PartitionKey(MODEL, 0, 2), 0, 2)
    assert known.cost([hop], [there], 10) is None
    known.model_has(MODEL, 4)
    cost = known.cost([hop], [there], 10)
    assert cost is not None
    assert cost.link_bytes == {"a:up": 80, "a1>b1": 80, "b:down": 80}


def test_epochs_and_single_moves_share_what_there_is() -> None:
    known = boundaries()
    division = known.divide(0, [over("a1>b1", 300)], {})
    assert division.kv == (1,)
    assert known.choose_mode(0, over("a1>b1", 300), ChainActivity(None)) is None
    assert known.choose_mode(0, over("a1>b1", 100), ChainActivity(None)) == "kv"
    assert known.divide(0, [over("a1>b1", 1)], {}).deferred == (1,)
    assert known.divide(SECOND, [over("a1>b1", 400)], {}).kv == (1,)


def test_a_session_that_is_too_large_for_an_epoch_moves_once_in_several() -> None:
    known = boundaries()
    large = over("a1>b1", 1000)
    moved_at = [epoch for epoch in range(8) if known.divide(epoch * SECOND, [large], {}).kv == (1,)]
    assert moved_at == [0, 3, 6]  # 1000 of 400 a second, asked every second


def test_tokens_go_where_links_are_full_and_only_as_many_as_are_read() -> None:
    known = boundaries()
    moves = [over("a1>b1", 400, 1), over("a1>b1", 390, 2, 600), over("a1>b1", 380, 3, 600)]
    division = known.divide(0, moves, {"new": IDLE})
    assert (division.kv, division.tokens, division.deferred) == ((1,), (2,), (3,))
    assert known.divide(0, moves[2:], {"new": IDLE}).deferred == (3,)
    assert known.divide(SECOND, moves[2:], {"other": IDLE}).kv == (3,)


def test_a_single_move_takes_the_faster_way() -> None:
    known = boundaries()
    assert known.choose_mode(0, over("a1>b1", 80, tokens=99), IDLE) == "tokens"
    assert known.choose_mode(0, over("a1>b1", 80, tokens=101), IDLE) == "kv"


def test_a_single_move_takes_the_other_way_where_the_faster_is_full() -> None:
    known = boundaries()
    assert known.choose_mode(0, over("a1>b1", 400), ChainActivity(None)) == "kv"
    assert known.choose_mode(0, over("a1>b1", 80, tokens=900), IDLE) == "tokens"


def test_who_must_go_goes_and_is_counted() -> None:
    known = boundaries()
    assert known.choose_mode(0, over("a1>b1", 400), ChainActivity(None)) == "kv"
    assert known.choose_mode(0, over("a1>b1", 400), ChainActivity(None)) is None
    assert known.choose_mode(0, over("a1>b1", 400), ChainActivity(None), must=True) == "kv"
    assert known.divide(SECOND, [over("a1>b1", 1)], {}).deferred == (1,)
    assert known.choose_mode(0, over("x>y", 400), ChainActivity(None), must=True) == "kv"


STEPS = st.lists(
    st.tuples(
        st.integers(0, 2 * SECOND),
        st.lists(st.tuples(st.integers(1, 900), st.integers(1, 1500)), max_size=5),
        st.booleans(),
    ),
    max_size=12,
)


@given(STEPS)
@settings(max_examples=20, deadline=None)
def test_no_more_moves_than_boundaries_say_however_it_is_asked_for(
    steps: list[tuple[int, list[tuple[int, int]], bool]],
) -> None:
    known, now, sent, read, largest = boundaries(), 0, 0, 0, [400, 1000]
    for wait, sizes, together in steps:
        now += wait
        moves = [over("a1>b1", size, n, tokens) for n, (size, tokens) in enumerate(sizes)]
        kinds = dict(known.divide(now, moves, {"new": IDLE}).kinds()) if together else {}
        for move in moves if not together else ():
            way = known.choose_mode(now, move, IDLE)
            if way is not None:
                kinds[move.id] = way
        for number, way in kinds.items():
            size, tokens = sizes[number]
            sent, read = sent + size * (way == "kv"), read + tokens * (way == "tokens")
            largest = [max(largest[0], size), max(largest[1], tokens)]
        # one epoch's worth, or one session, ahead of what there was until now
        assert sent <= 400 * now / SECOND + largest[0] + 1e-6
        assert read <= 1000 * now / SECOND + largest[1] + 1e-6


def test_caches_of_a_move_are_as_large_as_their_sender_keeps_them() -> None:
    known = boundaries()
    known.agent_joined(Agent(B, "cpu", ServerId("b"), 1, 800, runtime="torch-bfloat16"))
    for bytes_per_token, runtime in ((8, ""), (4, "torch-bfloat16"), (2, "of nobody")):
        known.model_has(MODEL, bytes_per_token, runtime)
    whole = PartitionKey(MODEL, 0, 4)
    plain, half = (ChainHop(at, whole, 0, 4) for at in (A, B))
    there, back = known.cost([plain], [half], 10), known.cost([half], [plain], 10)
    assert there is not None
    assert back is not None
    assert (there.cache_bytes, back.cache_bytes) == (4 * 10 * 8, 4 * 10 * 4)
    parts = [ChainHop(A, PartitionKey(MODEL, 0, 1), 0, 1), ChainHop(B, whole, 1, 4)]
    mixed = known.cost(parts, [ChainHop(AgentId("a2"), whole, 0, 4)], 10)
    assert mixed is not None
    assert mixed.cache_bytes == 10 * 8 + 3 * 10 * 4
    assert (
        known.cost([ChainHop(A, PartitionKey(ModelKey("x", "1"), 0, 1), 0, 1)], [half], 1) is None
    )
