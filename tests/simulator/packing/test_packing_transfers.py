"""How moves are divided by boundaries, epoch after epoch."""

from __future__ import annotations

from catenary_lab.packing.policies import PolicyChoice
from catenary_simulator.packing.serve import GpuKind, PackingRun, serve_packing
from catenary_simulator.packing.transfers import (
    EpochTransfers,
    MachineSlots,
    RequestedMove,
    TransferNetwork,
    TransferTally,
)
from catenary_simulator.placement.workload import RequestWorkload

# Two GPUs in a machine; per epoch 1000 bytes inside, 300 between machines, 20 tokens read again.
NETWORK = TransferNetwork(gpus_per_machine=2, bus_bytes=1000, link_bytes=300, prefill_tokens=20)


def divided(*epochs: list[RequestedMove], held: dict[object, int] | None = None) -> TransferTally:
    transfers = EpochTransfers(NETWORK, token_bytes=10)
    for moves in epochs:
        there = {move.item: move.held for move in moves} if held is None else held
        transfers.epoch(moves, there, counted=True)
    return transfers.tally


def test_a_cache_inside_a_machine_passes_the_bus() -> None:
    assert divided([RequestedMove("a", 0, 1, 100)]) == TransferTally(kv=1, kv_bytes=1000)


def test_a_cache_between_machines_passes_both_links() -> None:
    found = divided([RequestedMove("a", 0, 2, 30), RequestedMove("b", 4, 3, 20)])
    # Both come down to machine 1; the larger goes first, the other is read again.
    assert found == TransferTally(kv=1, tokens=1, kv_bytes=300, tokens_read=20)


def test_what_does_not_fit_comes_up_again() -> None:
    first = [RequestedMove("a", 0, 2, 30), RequestedMove("b", 4, 3, 25)]
    found = divided(first, [], held={"a": 30, "b": 26})
    assert (found.kv, found.deferred, found.kv_bytes) == (2, 1, 300 + 260)


def test_a_cache_larger_than_its_link_goes_in_portions() -> None:
    found = divided([RequestedMove("a", 0, 2, 70)], [], [], held={"a": 75})
    # 300 and 300 bytes of 750, while it grows, and the rest.
    assert found == TransferTally(kv=1, carried=2, kv_bytes=750)


def test_a_portion_is_lost_when_its_session_moves_on() -> None:
    on = divided([RequestedMove("a", 0, 2, 70)], [RequestedMove("a", 2, 1, 70)])
    assert on == TransferTally(kv=1, carried=1, dropped=1, kv_bytes=300 + 700)


def test_who_ends_while_its_move_waits_needs_it_no_more() -> None:
    first = [RequestedMove("a", 0, 2, 30), RequestedMove("b", 4, 3, 25)]
    found = divided(first, [], held={"a": 30})
    assert (found.kv, found.deferred, found.dropped) == (1, 1, 1)


def test_who_moves_on_while_its_move_waits_moves_once() -> None:
    first = [RequestedMove("a", 0, 2, 30), RequestedMove("b", 4, 3, 25)]
    on = divided(first, [RequestedMove("b", 3, 5, 25)])
    assert (on.kv, on.deferred, on.dropped) == (2, 1, 1)  # within machine 2, where it still is
    back = divided(first, [RequestedMove("b", 3, 4, 25)])
    assert (back.kv, back.dropped) == (1, 1)


def test_epochs_of_the_warm_up_are_not_counted() -> None:
    transfers = EpochTransfers(NETWORK, token_bytes=10)
    transfers.epoch([RequestedMove("a", 0, 1, 10)], {"a": 10}, counted=False)
    assert transfers.tally == TransferTally()


def test_active_gpus_have_the_lowest_free_places() -> None:
    slots = MachineSlots()
    assert [slots.of(gpu) for gpu in (7, 3, 9)] == [0, 1, 2]
    slots.keep([7, 9])
    assert [slots.of(gpu) for gpu in (9, 4, 5)] == [2, 1, 3]


def test_shares_of_a_run_add_up_to_its_moves() -> None:
    count = 40
    work = RequestWorkload(
        [0] * count, [100 + 7 * number for number in range(count)], [200] * count
    )
    network = TransferNetwork(2, 10_000, 1_000, 400)
    run = PackingRun(GpuKind(1600, 10), PolicyChoice("load-balancing"), 0, 20, network=network)
    found = serve_packing(run, work)
    tally = found.transfers
    assert tally is not None
    assert tally.kv > 0
    assert tally.tokens > 0
    assert tally.kv + tally.tokens + tally.dropped == round(found.migrations_per_s * 20)
