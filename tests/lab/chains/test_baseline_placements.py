"""The placements of PETALS and BPRR on cases small enough to do by hand."""

from __future__ import annotations

from fractions import Fraction

import pytest

from catenary_lab.chains.bprr_placement import (
    BprrServer,
    BprrTask,
    bprr_placement,
    target_concurrency,
)
from catenary_lab.chains.petals_placement import (
    PetalsModel,
    PetalsServer,
    petals_placement,
)
from catenary_lab.chains.windows import Window, complete, least_sorted, window_sums
from catenary_services.errors import InvalidInput

BLOOM = PetalsModel(70, 14336, 2466437120, 112, 112)
LLAMA = PetalsModel(32, 4096, 202383360, 32, 32)
BIG = PetalsServer(40 * 10**9, 20829, 3020)
SMALL = PetalsServer(20 * 10**9, 5515, 6276)


def test_petals_counts_blocks_sessions_and_slots_as_the_specification_says() -> None:
    assert [server.hosted(BLOOM) for server in (BIG, SMALL)] == [24, 11]
    assert BLOOM.cache_bytes == 2 * 14336 * 4096 * 2
    assert BLOOM.sessions(110_000_000) == 2
    assert LLAMA.sessions(33_554_432) == 2  # exactly: 2,048 of 4,096 tokens
    assert BLOOM.slots(24, 110_000_000) == 51
    assert [server.hosted(LLAMA) for server in (BIG, SMALL)] == [32, 32]
    assert PetalsServer(10**9, 1, 1).hosted(BLOOM) == 0


def test_grouped_and_multi_query_models_need_less_cache() -> None:
    plain, grouped = PetalsModel(8, 1024, 1, 16, 16), PetalsModel(8, 1024, 1, 16, 4)
    assert grouped.cache_bytes * 4 == plain.cache_bytes
    single = PetalsModel(8, 1024, 1, 16, 1)
    assert single.cache_bytes * 16 == plain.cache_bytes * 4  # for four times the tokens


def test_petals_throughput_is_the_lesser_of_computing_and_network() -> None:
    assert BIG.throughput(24) == Fraction(20829 * 2, 25)
    assert BIG.throughput(1) == 3020


def sized(blocks: int, forward: int) -> PetalsServer:
    """A server for exactly so many blocks of TINY."""
    return PetalsServer(
        TINY.reserve_bytes + blocks * (TINY.block_bytes + TINY.cache_bytes), forward, 10**9
    )


TINY = PetalsModel(5, 1024, 10**6)


def test_petals_takes_the_blocks_that_are_served_worst() -> None:
    servers = [sized(3, 200), sized(2, 300), sized(2, 30), sized(5, 1)]
    placed = petals_placement(TINY, servers, [0, 1, 2, 3])
    # Loads: 100 on 0-2; then 3-4 have none; then 0-1 (100, 100) are less than any with 200.
    assert placed == [Window(0, 3), Window(3, 5), Window(0, 2), Window(0, 5)]
    assert petals_placement(TINY, servers, [1, 0, 2, 3])[:2] == [Window(2, 5), Window(0, 2)]


def test_the_order_must_name_every_server_once() -> None:
    with pytest.raises(InvalidInput, match="order"):
        petals_placement(TINY, [sized(1, 1), sized(1, 1)], [0, 0])


def task(*servers: BprrServer, blocks: int = 4, rate: float = 0.1) -> BprrTask:
    return BprrTask(servers, blocks, 1, 0.5, rate, output_tokens=10)


def test_bprr_places_servers_where_capacity_lacks_the_fastest_first() -> None:
    fast = BprrServer(memory=8, rtt_ms=10, block_ms=100)
    slow = BprrServer(memory=4, rtt_ms=10, block_ms=400)
    placed = bprr_placement(task(slow, fast, slow), concurrency=2)
    # Blocks at two sessions: 8 / (1 + 2 * 0.5) = 4 and 4 / 2 = 2. The fast one takes all with
    # floor((8 - 4) / (0.5 * 4)) = 2 sessions, so no block lacks any more: least capacity decides.
    assert placed.windows == (Window(0, 2), Window(0, 4), Window(2, 4))
    assert placed.slots == (4, 8, 4)


def test_bprr_prefers_blocks_with_the_most_missing_time() -> None:
    servers = [BprrServer(3, 1, 10), BprrServer(4, 1, 20), BprrServer(6, 1, 30)]
    placed = bprr_placement(task(*servers, blocks=4), concurrency=2)
    # Of 1, 2 and 3 blocks; times per block 2, 2.5 and 3.33: in this order. The second takes the
    # first window that leaves no block of the first server's out: all of it lack; most time at 1-2.
    assert placed.windows[0] == Window(0, 1)
    assert placed.windows[1] == Window(1, 3)
    assert placed.windows[2] == Window(1, 4)
    assert complete(placed.windows, 4)


def test_concurrency_is_a_square_root_rule_within_memory() -> None:
    server = BprrServer(memory=100, rtt_ms=100, block_ms=1000)
    # T = 2 * 10 * 0.1 + 1.0 * 4 / 2 = 4 s; at 2.25/s that is 9 jobs: 9 + 3.
    assert target_concurrency(task(server, server, rate=2.25)) == 12
    assert target_concurrency(task(server, server, rate=0.01)) == 2  # ceil(0.04 + 1)
    # Memory: (2 * 12 - 6) / (0.5 * 6) = 6.
    small = BprrServer(memory=12, rtt_ms=100, block_ms=1000)
    assert target_concurrency(task(small, small, rate=2.25)) == 6
    tiny = BprrServer(memory=1, rtt_ms=100, block_ms=1000)
    assert target_concurrency(task(tiny, tiny, rate=2.25)) == 1


def test_bprr_needs_a_server_and_leaves_out_those_without_room() -> None:
    with pytest.raises(InvalidInput, match="servers"):
        bprr_placement(task())
    placed = bprr_placement(task(BprrServer(1, 1, 1), BprrServer(6, 1, 1)), concurrency=1)
    assert placed.windows[0].blocks == 0
    assert placed.slots[0] == 0


def test_windows_tie_for_the_first() -> None:
    assert window_sums([1, 2, 3, 4], 2) == [3, 5, 7]
    assert least_sorted([5, 1, 5, 1, 5], 2) == 0
    assert least_sorted([5, 1, 0, 9], 2) == 1
