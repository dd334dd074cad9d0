from __future__ import annotations

from redis.asyncio import Redis

from scheduler.book import Reservation
from scheduler.dispatch.events import AgentJoined, PlanActivated, RequestArrived
from scheduler.dispatch.pooled import PooledDispatcher
from scheduler.state.journal import Changes, Journal
from scheduler.state.keys import Keys
from scheduler.state.lease import Lease
from scheduler.state.records import reservations_of, tables_of, write_reservations
from scheduler.state.store import Store
from services.domain.ids import (
    AgentId,
    BatchId,
    GatewayId,
    ModelKey,
    PartitionKey,
    PlanId,
    RequestId,
    ResourceId,
    ServerId,
)
from services.domain.plan import Agent, ModelPlan, Pipeline, Plan, Stage

MODEL = ModelKey("toy", "1")
AGENTS = tuple(AgentId(f"agent-{i}") for i in range(3))


def busy_dispatcher(now: int) -> PooledDispatcher:
    dispatcher = PooledDispatcher(first_batch=1 << 40)
    for agent in AGENTS:
        dispatcher.handle(AgentJoined(Agent(agent, "cpu", ServerId(agent), 1, 10**9)), now)
    stages = (
        Stage(PartitionKey(MODEL, 0, 2), AGENTS[:1], (4_000_000,), 0),
        Stage(PartitionKey(MODEL, 2, 4), AGENTS[1:], (5_000_000,), 100_000),
    )
    pipelines = (Pipeline("toy/0", 1, stages),)
    plan = Plan(PlanId("p"), (ModelPlan(MODEL, 10**9, pipelines),))
    dispatcher.handle(PlanActivated(plan), now)
    for number in range(6):
        request = RequestId(GatewayId("g"), number)
        dispatcher.handle(RequestArrived(request, MODEL, 1, now + 10**9), now)
    return dispatcher


def identity(reservations: list[Reservation]) -> set[tuple[object, ...]]:
    return {(r.batch, r.position, r.resource, r.start_ns, r.end_ns, r.done) for r in reservations}


async def test_a_successor_has_the_same_book(redis: Redis) -> None:
    keys = Keys("test")
    lease, store, journal = Lease(redis, keys, "a", 60.0), Store(redis, keys), Journal()
    assert await lease.try_acquire()
    dispatcher = busy_dispatcher(now=10**9)
    write_reservations(journal, dispatcher.take_changes())
    await store.apply(lease, journal.take())
    stored = await Store(redis, keys).load()
    successor = PooledDispatcher(first_batch=2 << 40)
    successor.restore(reservations_of(stored.book, shift_ns=0))
    assert len(dispatcher.snapshot()) > 3
    assert identity(successor.snapshot()) == identity(dispatcher.snapshot())


async def test_a_snapshot_says_the_same_as_the_changes(redis: Redis) -> None:
    keys = Keys("test")
    lease, store = Lease(redis, keys, "a", 60.0), Store(redis, keys)
    assert await lease.try_acquire()
    dispatcher = busy_dispatcher(now=10**9)
    await store.apply(lease, Changes(tables_of(dispatcher.snapshot()), replace=True))
    shifted = reservations_of((await store.load()).book, shift_ns=500)
    back = [
        Reservation(r.batch, r.position, r.resource, r.start_ns - 500, r.end_ns - 500,
                    r.expires_ns - 500, r.done)
        for r in shifted
    ]  # fmt: skip
    assert set(back) == set(dispatcher.snapshot())


def test_an_unreadable_reservation_is_left_out() -> None:
    gpu = ResourceId("gpu/a")
    book = {gpu: {"1:0": "1 2 3 0", "nonsense": "1 2 3 0", "2:0": "1 2"}}
    assert reservations_of(book, 0) == [Reservation(BatchId(1), 0, gpu, 1, 2, 3)]
