"""The small parts of the shell, each alone."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from catenary_protos.catenary.v1 import common_pb2
from catenary_scheduler.agents.directory import PeerDirectory
from catenary_scheduler.agents.load_orders import LoadOrders
from catenary_scheduler.book import Reservation
from catenary_scheduler.dispatch import events
from catenary_scheduler.inflight.batches import InFlightBatches
from catenary_scheduler.inflight.not_ready_queue import NotReadyQueue
from catenary_scheduler.observed.profiles import MeasuredProfiles
from catenary_scheduler.observed.utilisation import Utilisation
from catenary_scheduler.planning import ModelPlacement, PipelinePlacement, Placement, StagePlacement
from catenary_scheduler.planning.latency import WorkTotals
from catenary_scheduler.planning.live import GenerationCost
from catenary_scheduler.planning.requirements import agents_of, missing, required_by_agent, without
from catenary_scheduler.runtime.dispatch_loop import DispatchLoop
from catenary_scheduler.runtime.dispatch_metrics import DispatchMetrics
from catenary_scheduler.storage.journal import Journal
from catenary_scheduler.storage.keys import RedisTable
from catenary_scheduler.storage.values.records import measurements_of
from catenary_scheduler.storage.values.stored import StoredMeasurements
from catenary_services.domain.ids import (
    AgentId,
    BatchId,
    GatewayId,
    ModelKey,
    PartitionKey,
    RequestId,
)
from catenary_services.errors import Overloaded
from catenary_services.telemetry.metrics import Metrics
from scheduler_harness import until
from scheduling_cases.stored_tables import stored_of

MODEL = ModelKey("toy", "1")
A, B, C = AgentId("a"), AgentId("b"), AgentId("c")


def batch(number: int, *agents: AgentId, finish: int = 100) -> events.DispatchBatch:
    path = tuple(
        events.PlannedHop(agent, PartitionKey(MODEL, i, i + 1), i, 1)
        for i, agent in enumerate(agents)
    )
    return events.DispatchBatch(BatchId(number), 1, (), path, finish)


def test_a_batch_is_in_flight_until_its_last_hop_reported() -> None:
    in_flight = InFlightBatches()
    in_flight.dispatched(batch(1, A, B))
    assert in_flight.uses_partition(A, PartitionKey(MODEL, 0, 1))
    in_flight.stage_done(BatchId(1), 0)
    assert not in_flight.uses_agent(A)
    assert in_flight.uses_agent(B)
    in_flight.stage_done(BatchId(1), 1)
    assert len(in_flight) == 0


def test_a_lost_agent_takes_only_what_was_ahead_of_it() -> None:
    in_flight = InFlightBatches()
    for number in (1, 2):
        in_flight.dispatched(batch(number, A, B))
    in_flight.stage_done(BatchId(1), 0)
    in_flight.lost(A)
    assert in_flight.uses_agent(B)
    assert len(in_flight) == 1


def test_a_batch_over_before_the_flush_costs_nothing_and_a_written_one_is_deleted() -> None:
    in_flight, journal = InFlightBatches(), Journal()
    in_flight.dispatched(batch(1, A))
    in_flight.over(BatchId(1))
    in_flight.collect(journal)
    assert not journal.take().tables
    in_flight.dispatched(batch(1, A))
    in_flight.collect(journal)
    assert list(journal.take().tables[RedisTable.BATCHES]) == ["1"]
    in_flight.over(BatchId(1))
    in_flight.collect(journal)
    assert journal.take().tables == {RedisTable.BATCHES: {"1": None}}
    in_flight.dispatched(batch(1, A))
    assert list(in_flight.records()) == ["1"]
    in_flight.over(BatchId(1))
    in_flight.collect(journal)
    assert journal.take().tables == {RedisTable.BATCHES: {"1": None}}
    in_flight.dispatched(batch(2, A, finish=5))
    in_flight.tick(10**12)
    assert in_flight.records() == {}


SECOND = 1_000_000_000


def arrival(number: int, deadline: int = 100 * SECOND) -> events.RequestArrived:
    return events.RequestArrived(RequestId(GatewayId("g"), number), MODEL, 1, deadline)


def test_the_waiting_room_is_bounded_in_number_and_time() -> None:
    room = NotReadyQueue(capacity=2, longest_ns=50 * SECOND)
    room.add(arrival(1), now=0)
    room.add(arrival(2, deadline=20 * SECOND), now=0)
    with pytest.raises(Overloaded):
        room.add(arrival(3), now=0)
    assert not room.expire(19 * SECOND)
    # A little before its deadline, so that the reason is heard and not just that it was too late.
    assert [event.request.number for event in room.expire(20 * SECOND - SECOND // 10)] == [2]
    assert [event.request.number for event in room.expire(50 * SECOND)] == [1]
    assert not room.requests


def test_waiting_requests_leave_in_order_when_their_model_is_ready() -> None:
    room = NotReadyQueue(capacity=9, longest_ns=50)
    for number in (3, 1, 2):
        room.add(arrival(number), now=0)
    room.remove(RequestId(GatewayId("g"), 1))
    assert [request.number for request in room.requests] == [3, 2]
    assert room.release(lambda model: False) == []
    assert [event.request.number for event in room.release(lambda model: True)] == [3, 2]


def test_a_failed_load_is_asked_for_again_ever_more_rarely() -> None:
    orders, key = LoadOrders(timeout_s=10.0), PartitionKey(MODEL, 0, 1)
    assert orders.is_due(A, key, 0.0)
    assert not orders.is_due(A, key, 9.0)
    assert orders.is_due(A, key, 10.0)
    orders.failed(A, key, "no memory", 20.0)
    assert not orders.is_due(A, key, 20.4)
    assert orders.is_due(A, key, 20.5)
    orders.failed(A, key, "no memory", 30.0)
    assert not orders.is_due(A, key, 30.9)
    assert orders.problems(MODEL) == ["agent a cannot load toy:1 blocks 0 to 1: no memory"]
    orders.loaded(A, key)
    assert orders.problems(MODEL) == []
    assert orders.is_due(A, key, 31.0)


def placement(*pools: tuple[AgentId, ...]) -> Placement:
    stages = tuple(StagePlacement(i, i + 1, pool) for i, pool in enumerate(pools))
    return Placement((ModelPlacement(MODEL, 10**9, True, (PipelinePlacement(4, stages),)),))


def test_a_placement_without_an_agent_loses_what_only_it_hosted() -> None:
    full = placement((A,), (B, C))
    assert agents_of(without(full, {C})) == {A, B}
    assert without(full, {A}) == Placement(())
    assert required_by_agent(full)[B] == {PartitionKey(MODEL, 1, 2): (4, True, None)}


def test_an_excused_agent_is_not_waited_for_unless_its_pool_is_empty() -> None:
    full = placement((A,), (B, C))
    hosted = {(A, 0), (B, 1)}

    def hosts(agent: AgentId, key: PartitionKey, _: object) -> bool:
        return (agent, key.first_block) in hosted

    assert missing(full, hosts, lambda agent: True) == []
    assert missing(full, hosts, lambda agent: False) == [(C, PartitionKey(MODEL, 1, 2))]
    hosted.remove((A, 0))
    assert missing(full, hosts, lambda agent: True) == [(A, PartitionKey(MODEL, 0, 1))]


def read_back(
    measured: MeasuredProfiles, odd: Mapping[str, str] | None = None
) -> StoredMeasurements:
    return measurements_of(stored_of(RedisTable.MEASURED, {**measured.records(), **(odd or {})}))


def test_measurements_survive_redis_and_fill_in_for_the_absent() -> None:
    measured, key = MeasuredProfiles(), PartitionKey(MODEL, 1, 2)
    measured.put(B, key, (5, 6))
    measured.put(B, key, ())
    again = MeasuredProfiles()
    again.restore(read_back(measured, {"nonsense": "1", "x|toy:1[0,1)": "five"}))
    assert again.records() == measured.records()
    times = again.for_placement(placement((A,), (B, C)))
    assert times[C, key] == times[B, key] == (5, 6)
    assert times[A, PartitionKey(MODEL, 0, 1)] == ()


def test_costs_of_generation_survive_redis_beside_compute_times() -> None:
    measured, key = MeasuredProfiles(), PartitionKey(MODEL, 1, 2)
    measured.put(A, key, (5, 6))
    measured.put_generation(B, key, GenerationCost(1, 2, 3, 4))
    odd = {"c|toy:1[0,1)": "generation 1 2", "d|toy:1[0,1)": "generation x"}
    again = MeasuredProfiles()
    again.restore(read_back(measured, odd))
    assert again.generation() == {(B, key): GenerationCost(1, 2, 3, 4)}
    assert again.everything() == {(A, key): (5, 6)}


def test_what_generation_costs_by_now_survives_redis_too() -> None:
    measured, key = MeasuredProfiles(), PartitionKey(MODEL, 0, 2)
    at_load = GenerationCost(10_000, 2_000, 50_000, 6_000, 4.5, 52_000, 11_000, 64)
    measured.put_generation(A, key, at_load)
    assert not measured.observe(B, key, WorkTotals(prefill_chunks=1))
    told = [
        measured.observe(
            A,
            key,
            WorkTotals(
                50,
                50,
                5_000,
                50 * 80_000,
                lone_steps=50,
                lone_context_tokens=5_000,
                lone_ns=50 * 80_000,
            ),
        )
        for _ in range(80)
    ]
    assert any(told)
    assert not told[-1]
    now = measured.generation()[A, key]
    assert now.decode_lone_ns == pytest.approx(80_000, rel=0.03)
    again = MeasuredProfiles()
    again.restore(read_back(measured))
    assert again.records() == measured.records()
    assert again.generation()[A, key].decode(1) == pytest.approx(now.decode(1), rel=0.03)
    # An agent that says hello with the same measurement changes nothing, a new one begins anew.
    again.put_generation(A, key, at_load)
    assert again.records() == measured.records()
    newer = GenerationCost(1, 2, 3, 4)
    again.put_generation(A, key, newer)
    assert again.generation()[A, key] == newer
    again.restore(read_back(MeasuredProfiles(), {"c|toy:1[0,2)": "generation 1 2 3 4 nan 6 7 8"}))
    assert (AgentId("c"), key) not in again.generation()


def test_a_peer_stays_in_the_directory_for_a_moment() -> None:
    peers = PeerDirectory(linger_s=3.0)
    peers.joined("a", common_pb2.Peer(peer_id="a", incarnation=4))
    peers.left("a", 10.0)
    assert not peers.sweep(12.0)
    assert [peer.peer_id for peer in peers.directory(1).peers] == ["a"]
    again = PeerDirectory(linger_s=3.0, clock_s=lambda: 0.0)
    again.restore(stored_of(RedisTable.PEERS, {**peers.records(), "bad": "?"}))
    assert again.directory(1) == peers.directory(1)
    assert peers.sweep(14.0)
    assert not peers.directory(1).peers


def test_utilisation_is_the_busy_share_of_the_last_rounds() -> None:
    busy = Utilisation()
    assert busy.ratio(A) == 0.0
    busy.next_round(0.0)
    busy.add(A, 500_000_000)
    busy.next_round(1.0)
    busy.next_round(2.0)
    assert busy.ratio(A) == pytest.approx(0.25)


class Scripted:
    """A dispatcher that wants to be woken and answers each event as told."""

    def __init__(self) -> None:
        self.wakeup: int | None = None
        self.wakeup_after_next: int | None = None
        """When it asks to be woken once it has handled the next event."""
        self.events: list[events.Event] = []
        self.failing = False

    def handle(self, event: events.Event, now: int) -> list[events.Command]:
        if self.failing:
            raise ZeroDivisionError
        self.events.append(event)
        self.wakeup, self.wakeup_after_next = self.wakeup_after_next, None
        return []

    def next_wakeup(self) -> int | None:
        return self.wakeup


async def test_the_engine_wakes_its_dispatcher_in_time() -> None:
    from catenary_scheduler.storage.clock import now_ns

    dispatcher = Scripted()
    engine = DispatchLoop(dispatcher, lambda command, now: None, Metrics())
    dispatcher.wakeup_after_next = now_ns() + 20_000_000
    engine.feed(arrival(1), now_ns())
    await until(lambda: events.Tick() in dispatcher.events, "the tick")
    engine.close()
    engine.feed(arrival(2), now_ns())
    assert len(dispatcher.events) == 2


async def test_a_bug_in_the_dispatcher_refuses_one_request_and_no_more() -> None:
    refused: list[events.Command] = []
    dispatcher = Scripted()
    dispatcher.failing = True
    engine = DispatchLoop(dispatcher, lambda command, now: refused.append(command), Metrics())
    engine.feed(arrival(1), 0)
    assert [(c.request.number, c.reason) for c in refused if isinstance(c, events.Reject)] == [
        (1, "INTERNAL")
    ]
    dispatcher.failing = False
    engine.feed(arrival(2), 0)
    assert dispatcher.events == [arrival(2)]
    await asyncio.sleep(0)
    engine.close()


class Counting:
    """A dispatcher that booked nothing."""

    def __init__(self, counted: dict[str, int]) -> None:
        self.counted = counted

    def statistics(self) -> dict[str, int]:
        return self.counted

    def snapshot(self) -> list[Reservation]:
        return []


def test_what_the_dispatcher_counted_is_added_once() -> None:
    metrics = Metrics()
    counting = Counting({"drift_ns_sum": 2 * SECOND, "corrections": 4, "displaced_batches": 1})
    counted = DispatchMetrics(counting)
    counted.export(metrics)
    counted.export(metrics)
    counting.counted = {**counting.counted, "corrections": 9}
    counted.export(metrics)
    value = metrics.registry.get_sample_value
    assert value("catenary_reservation_drift_seconds_total") == 2.0
    assert value("catenary_reservation_corrections_total") == 9
    assert value("catenary_reservation_conflicts_total") == 1
