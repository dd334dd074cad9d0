"""Scenarios small enough to be worked out by hand, with a dispatcher that follows a script."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from catenary_scheduler.dispatch.events import (
    BatchSlice,
    CancelBatch,
    Command,
    DispatchBatch,
    Event,
    PlannedHop,
    Reject,
    RequestArrived,
    RequestCompleted,
    StageReported,
    StageStarted,
)
from catenary_services.domain.ids import (
    AgentId,
    BatchId,
    GatewayId,
    ModelKey,
    PartitionKey,
    RequestId,
)
from catenary_services.errors import InternalError
from catenary_simulator.core.devices import SimulatedDevice, SimulatedLink, StageCost
from catenary_simulator.core.noise import Noise, NoiseFactors
from catenary_simulator.core.requests import DROPPED, FINISHED, LATE, SimulatedRequests
from catenary_simulator.core.world import SimulatedCluster

MS = 1_000_000
MODEL = ModelKey("m", "1")
HEAD, TAIL = PartitionKey(MODEL, 0, 1), PartitionKey(MODEL, 1, 2)
BYTES_PER_SECOND = 10**9
WHOLE = PartitionKey(MODEL, 0, 2)
COSTS = {
    HEAD: StageCost((4 * MS, 6 * MS), 0, True, False),
    TAIL: StageCost((2 * MS, 3 * MS), 10**6, False, True),
    WHOLE: StageCost((6 * MS,), 0, True, True),
}
EXACT = NoiseFactors(0.0, 0.0, 1.0, 1, 0)


class Script:
    """Answers the n-th arrival with the n-th list of commands, and keeps what it is told."""

    def __init__(self, answers: Sequence[Sequence[Command]]) -> None:
        self.answers = [list(answer) for answer in answers]
        self.heard: list[tuple[int, Event]] = []

    def handle(self, event: Event, now: int) -> list[Command]:
        if isinstance(event, RequestArrived):
            return self.answers[event.request.number]
        self.heard.append((now, event))
        return []

    def next_wakeup(self) -> int | None:
        return None

    @property
    def reports(self) -> dict[tuple[int, int], StageReported]:
        found = [event for _, event in self.heard if isinstance(event, StageReported)]
        return {(event.batch, event.position): event for event in found}

    @property
    def completed(self) -> dict[int, int]:
        return {
            event.request.number: now
            for now, event in self.heard
            if isinstance(event, RequestCompleted)
        }


def devices(*names: str) -> dict[AgentId, SimulatedDevice]:
    """ "a0" and "a1" are on server "a"."""
    ups: dict[str, SimulatedLink] = {}
    downs: dict[str, SimulatedLink] = {}
    found = {}
    for name in names:
        up, down = (
            ups.setdefault(name[0], SimulatedLink()),
            downs.setdefault(name[0], SimulatedLink()),
        )
        device = SimulatedDevice("gpu", 1.0, up, down, BYTES_PER_SECOND, 0)
        device.costs = dict(COSTS)
        found[AgentId(name)] = device
    return found


def batch(
    number: int, requests: Sequence[int], *path: tuple[str, PartitionKey, float]
) -> DispatchBatch:
    slices = tuple(
        BatchSlice(RequestId(GatewayId("simulated"), request), 0, 1, row)
        for row, request in enumerate(requests)
    )
    hops = tuple(PlannedHop(AgentId(name), part, round(at * MS), MS) for name, part, at in path)
    return DispatchBatch(BatchId(number), len(slices), slices, hops, 0)


def play(
    names: Sequence[str],
    arrivals_ms: Sequence[float],
    answers: Sequence[Sequence[Command]],
    *,
    delay_ms: float = 0.0,
    slo_ms: float = 100.0,
    script: Script | None = None,
) -> tuple[Script, SimulatedRequests, SimulatedCluster]:
    requests = SimulatedRequests(
        [MODEL],
        [round(at * MS) for at in arrivals_ms],
        [0] * len(arrivals_ms),
        [round(slo_ms * MS)],
    )
    script = script or Script(answers)
    noise = Noise(EXACT, EXACT, round(delay_ms * MS))
    world = SimulatedCluster(script, devices(*names), requests, noise, 10**12)
    world.run()
    return script, requests, world


def reject(number: int, reason: str = "SLO_UNATTAINABLE") -> Reject:
    return Reject(RequestId(GatewayId("simulated"), number), reason, "no")


def test_a_batch_computes_crosses_the_link_and_computes_again() -> None:
    order = batch(1, [0], ("a0", HEAD, 1), ("b0", TAIL, 6))
    script, requests, world = play(["a0", "b0"], [1], [[order]])
    assert script.reports[1, 0] == StageReported(BatchId(1), 0, 1 * MS, 5 * MS)
    assert script.reports[1, 1] == StageReported(BatchId(1), 1, 6 * MS, 8 * MS, 5 * MS, 6 * MS)
    assert script.completed == {0: 8 * MS}
    assert requests.state[0] == FINISHED
    assert world.devices[AgentId("a0")].busy_ns == 4 * MS


def test_two_transfers_to_one_server_go_one_after_the_other() -> None:
    orders = [
        [batch(1, [0], ("a0", HEAD, 0), ("c0", TAIL, 5))],
        [batch(2, [1], ("b0", HEAD, 0), ("c1", TAIL, 6))],
    ]
    script, _, _ = play(["a0", "b0", "c0", "c1"], [0, 0], orders)
    assert script.reports[1, 1].transfer_start_ns == 4 * MS
    assert script.reports[2, 1].transfer_start_ns == 5 * MS
    assert script.completed == {0: 7 * MS, 1: 8 * MS}


def test_two_transfers_from_one_server_go_one_after_the_other() -> None:
    orders = [
        [batch(1, [0], ("a0", HEAD, 0), ("b0", TAIL, 6))],
        [batch(2, [1], ("a1", HEAD, 0), ("c0", TAIL, 5))],
    ]
    script, _, _ = play(["a0", "a1", "b0", "c0"], [0, 0.5], orders)
    # Batch 1 is there first and the links are free: nothing is held back for batch 2.
    assert script.reports[1, 1].transfer_end_ns == 5 * MS
    assert script.reports[2, 1].transfer_start_ns == 5 * MS


def test_transfers_between_other_servers_run_at_the_same_time() -> None:
    orders = [
        [batch(1, [0], ("a0", HEAD, 0), ("c0", TAIL, 5))],
        [batch(2, [1], ("b0", HEAD, 0), ("d0", TAIL, 5))],
    ]
    script, _, _ = play(["a0", "b0", "c0", "d0"], [0, 0], orders)
    assert script.completed == {0: 7 * MS, 1: 7 * MS}


def test_of_the_transfers_that_wait_the_earliest_reservation_goes_first() -> None:
    orders = [
        [batch(1, [0, 1], ("a0", HEAD, 0), ("d0", TAIL, 5))],
        [],
        [batch(2, [2], ("b0", HEAD, 0), ("d1", TAIL, 9))],
        [batch(3, [3], ("c0", HEAD, 0), ("d1", TAIL, 8))],
    ]
    script, _, _ = play(["a0", "b0", "c0", "d0", "d1"], [0, 0, 2.2, 2.4], orders)
    # Two rows block the downlink from 6 to 8 ms; batches 2 and 3 are ready at 6.2 and 6.4 ms.
    assert script.reports[3, 1].transfer_start_ns == 8 * MS
    assert script.reports[2, 1].transfer_start_ns == 9 * MS


def test_a_device_takes_the_earliest_reservation_of_those_that_wait() -> None:
    orders = [
        [batch(1, [0], ("a0", WHOLE, 0))],
        [batch(2, [1], ("a0", WHOLE, 9))],
        [batch(3, [2], ("a0", WHOLE, 4))],
    ]
    script, _, world = play(["a0"], [0, 1, 2], orders)
    assert script.completed == {0: 6 * MS, 2: 12 * MS, 1: 18 * MS}
    assert world.devices[AgentId("a0")].busy_ns == 18 * MS


def test_a_batch_that_stays_on_its_device_is_not_sent() -> None:
    script, _, _ = play(["a0"], [0], [[batch(1, [0], ("a0", HEAD, 0), ("a0", TAIL, 4))]])
    assert script.reports[1, 1] == StageReported(BatchId(1), 1, 4 * MS, 6 * MS)


def test_a_cancelled_batch_is_not_computed() -> None:
    orders: list[list[Command]] = [
        [batch(1, [0], ("a0", WHOLE, 0))],
        [batch(2, [1], ("a0", WHOLE, 6))],
        [CancelBatch(BatchId(2), (AgentId("a0"),)), reject(1), batch(3, [2], ("a0", WHOLE, 12))],
    ]
    script, requests, _ = play(["a0"], [0, 1, 2], orders)
    assert script.completed == {0: 6 * MS, 2: 12 * MS}
    assert requests.state[1] == DROPPED


def test_rows_on_several_devices_are_gathered_before_they_are_computed() -> None:
    class TwoSteps(Script):
        def handle(self, event: Event, now: int) -> list[Command]:
            commands = super().handle(event, now)
            if isinstance(event, StageReported) and event.batch == 2:
                commands.append(batch(3, [0, 1], ("c0", TAIL, 8)))
            return commands

    orders = [[batch(1, [0], ("a0", HEAD, 0))], [batch(2, [1], ("b0", HEAD, 1))]]
    script, _, _ = play(["a0", "b0", "c0"], [0, 1], orders, script=TwoSteps(orders))
    # Both are sent at 5 ms, 1 ms each, over one downlink; then two rows take 3 ms.
    assert script.reports[3, 0] == StageReported(BatchId(3), 0, 7 * MS, 10 * MS, 5 * MS, 7 * MS)
    assert script.completed == {0: 10 * MS, 1: 10 * MS}


def test_reports_arrive_late_and_the_result_counts_when_it_is_there() -> None:
    order = batch(1, [0], ("a0", WHOLE, 0))
    script, requests, _ = play(["a0"], [0], [[order]], delay_ms=3)
    assert [now for now, _ in script.heard] == [9 * MS, 9 * MS]
    assert requests.finished_at[0] == 6 * MS


@pytest.mark.parametrize(("slo_ms", "state"), [(6.0, FINISHED), (5.999, LATE)])
def test_a_result_after_the_deadline_is_late(slo_ms: float, state: int) -> None:
    _, requests, _ = play(["a0"], [0], [[batch(1, [0], ("a0", WHOLE, 0))]], slo_ms=slo_ms)
    assert requests.state[0] == state


def test_a_request_refused_on_its_way_is_late_if_time_ran_out_and_dropped_otherwise() -> None:
    for reason, state in (("DEADLINE_EXCEEDED", LATE), ("SLO_UNATTAINABLE", DROPPED)):
        answers: list[list[Command]] = [
            [batch(1, [0], ("a0", WHOLE, 0))],
            [reject(0, reason), reject(1)],
        ]
        _, requests, _ = play(["a0"], [0, 1], answers)
        assert requests.state[0] == state
        assert requests.ended == 2


def test_a_request_nobody_answers_is_reported_as_our_bug() -> None:
    with pytest.raises(InternalError, match="1 requests are never answered"):
        play(["a0"], [0], [[]])


def test_a_request_rejected_twice_is_reported_as_our_bug() -> None:
    with pytest.raises(InternalError, match="rejected twice"):
        play(["a0"], [0], [[reject(0), reject(0)]])


def booked(number: int, request: int, *hops: PlannedHop) -> DispatchBatch:
    part = BatchSlice(RequestId(GatewayId("simulated"), request), 0, 1, 0)
    return DispatchBatch(BatchId(number), 1, (part,), hops, 0)


def hop(name: str, part: PartitionKey, at_ms: int, **windows: int) -> PlannedHop:
    known = {key: value * MS for key, value in windows.items() if key != "behind"}
    behind = BatchId(windows.get("behind", 0))
    return PlannedHop(AgentId(name), part, at_ms * MS, MS, behind=behind, **known)


def started(script: Script) -> list[tuple[int, int, int, bool]]:
    return [
        (event.batch, event.position, event.start_ns // MS, event.is_transfer)
        for _, event in script.heard
        if isinstance(event, StageStarted)
    ]


def test_a_device_is_kept_free_for_the_batch_that_is_booked_ahead() -> None:
    first = booked(1, 0, hop("a0", HEAD, 0), hop("c0", TAIL, 5, transfer_start_ns=4, transfer_ns=1))
    second = booked(2, 1, hop("c0", WHOLE, 7, earliest_ns=7, behind=1))
    script, _, _ = play(["a0", "c0"], [0, 0], [[first], [second]])
    assert script.reports[1, 1].compute_start_ns == 5 * MS
    assert script.reports[2, 0].compute_start_ns == 7 * MS
    assert started(script) == []


def test_a_batch_goes_once_the_one_ahead_is_over_and_its_early_start_is_reported() -> None:
    first = booked(1, 0, hop("a0", WHOLE, 0))
    second = booked(2, 1, hop("a0", WHOLE, 9, earliest_ns=9, behind=1))
    script, _, _ = play(["a0"], [0, 1], [[first], [second]])
    assert script.reports[2, 0].compute_start_ns == 6 * MS  # not 9: the first took less
    assert started(script) == [(2, 0, 6, False)]


def test_a_batch_does_not_wait_for_one_that_was_cancelled() -> None:
    first = booked(1, 0, hop("a0", HEAD, 0), hop("c0", TAIL, 5, transfer_start_ns=4, transfer_ns=1))
    second = booked(2, 1, hop("c0", WHOLE, 9, earliest_ns=9, behind=1))
    cancel = CancelBatch(BatchId(1), ())
    script, _, _ = play(["a0", "c0"], [0, 0], [[first, cancel, reject(0)], [second]])
    assert script.reports[2, 0].compute_start_ns == 0


def test_links_are_kept_free_for_the_transfer_that_is_booked_ahead() -> None:
    # Both cross the uplink of "a": the second is ready first, and booked behind the first.
    first = booked(1, 0, hop("a0", HEAD, 0), hop("b0", TAIL, 5, transfer_start_ns=4, transfer_ns=1))
    second = booked(
        2,
        1,
        hop("a1", PartitionKey(MODEL, 0, 3), 0),
        hop("c0", TAIL, 6, transfer_start_ns=5, transfer_ns=1, transfer_earliest_ns=5),
    )
    script = Script([[first], [second]])
    requests = SimulatedRequests([MODEL], [0, 0], [0, 0], [100 * MS])
    fleet = devices("a0", "a1", "b0", "c0")
    quick = StageCost((3 * MS + MS // 2,), 0, True, False)
    fleet[AgentId("a1")].costs[PartitionKey(MODEL, 0, 3)] = quick
    SimulatedCluster(script, fleet, requests, Noise(EXACT, EXACT), 10**12).run()
    assert script.reports[1, 1].transfer_start_ns == 4 * MS
    assert script.reports[2, 1].transfer_start_ns == 5 * MS
    assert started(script) == []
