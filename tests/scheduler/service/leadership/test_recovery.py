from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from catenary_protos.catenary.v1 import admin_pb2, scheduler_pb2
from catenary_scheduler.process import SchedulerProcess
from catenary_scheduler.settings import SchedulerSettings
from catenary_scheduler.storage.clock import now_ns
from catenary_scheduler.storage.store import Store
from catenary_services.redis.embedded_redis import EmbeddedRedis
from scheduler_harness import (
    COMPUTE_NS,
    CUT_IN_TWO,
    MS,
    AgentScript,
    Crowd,
    admin,
    crash,
    scheduler,
    until,
)

Configured = Callable[..., SchedulerSettings]
_WHOLE = [{"blocks": [0, 4], "agents": ["agent-0", "agent-1"]}]
POOL = {"models": [{"name": "toy", "pipelines": [{"batch": 2, "partitions": _WHOLE}]}]}


def hosting(first: int, last: int, epoch: int, **changes: object) -> AgentScript:
    key = scheduler_pb2.PartitionKey(
        model="toy", model_version="1", first_block=first, last_block=last
    )
    loaded = scheduler_pb2.PartitionLoaded(key=key, memory_bytes=1, compute_ns=[COMPUTE_NS] * 4)
    return AgentScript(partitions=[loaded], epoch=epoch, **changes)  # type: ignore[arg-type]


class StoreTimes:
    """How long the last write and the last read of a store took, in nanoseconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.taken_ns: dict[str, int] = {}
        for name in ("apply", "load"):
            monkeypatch.setattr(Store, name, self._timed(name, getattr(Store, name)))

    def _timed(self, name: str, call: Callable[..., Awaitable[Any]]) -> Callable[..., Any]:
        async def timed(*arguments: Any) -> Any:
            before = now_ns()
            answer = await call(*arguments)
            self.taken_ns[name] = now_ns() - before
            return answer

        return timed


async def leads(process: SchedulerProcess) -> None:
    await until(lambda: process.leads, "the new scheduler leads")


async def test_a_new_scheduler_adopts_rows_in_flight_and_sends_the_others(
    configured: Configured, crowd: Crowd, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = StoreTimes(monkeypatch)
    async with scheduler(configured(plan=CUT_IN_TWO)) as old:
        gateway, agents = await crowd.serving(old.port, agents=2)
        await gateway.submit(1)
        batch = await gateway.dispatched(1)
        book = old.leader().dispatcher.snapshot()
        # An empty journal does not say so yet: the dispatcher's changes may not be collected.
        await old.leader().write_behind.flush()
        await asyncio.sleep(0.1)  # a batch that was on its way already
        await crash(old)
        await until(lambda: gateway.ended and agents[0].ended, "sessions end")
        written_ns = store.taken_ns["apply"]
    async with scheduler(configured(scheduler_id="scheduler-1")) as new:
        await leads(new)
        leader = new.leader()
        restored = leader.dispatcher.snapshot()
        assert {(r.batch, r.position, r.resource) for r in restored} == {
            (r.batch, r.position, r.resource) for r in book
        }
        # The same machine, hence the same clock: the translation moves nothing farther than two
        # clocks can differ that are read one after the other, when written and when read.
        starts = {(r.batch, r.position): r.start_ns for r in book}
        most_ns = written_ns + store.taken_ns["load"] + 10 * MS
        assert all(abs(starts[r.batch, r.position] - r.start_ns) <= most_ns for r in restored)
        back = await crowd.gateway(new.port)
        await crowd.agent(new.port, "agent-0", hosting(0, 2, epoch=1))
        in_flight = scheduler_pb2.InFlight(
            batch_id=batch.batch_id, request_row=0, rows=1, expected_after_ns=5_000 * MS
        )
        await back.submit(1, in_flight=[in_flight], budget_ns=9_000 * MS)
        await back.submit(2)
        assert not leader.cluster.is_ready(leader.deployments.resolve("toy", "1"))  # type: ignore[arg-type]
        second = await crowd.agent(new.port, "agent-1", hosting(2, 4, epoch=1))
        fresh = await back.dispatched(2)
        assert (fresh.epoch, fresh.batch_id >> 40) == (2, 2)
        assert fresh.plan_id == "plan-1-1"  # the same plan goes on
        assert not back.dispatches(1)
        assert not second.all("load_partition")  # nothing is loaded twice
        assert back.model() is not None


async def test_recovery_does_not_wait_for_ever_for_a_dead_agent(
    configured: Configured, crowd: Crowd
) -> None:
    async with scheduler(configured(plan=POOL)) as old:
        await crowd.serving(old.port, agents=2)
        # An empty journal does not say so yet: the dispatcher's changes may not be collected.
        await old.leader().write_behind.flush()
        await asyncio.sleep(0.1)  # a batch that was on its way already
    async with scheduler(configured(plan=POOL)) as new:
        await leads(new)
        back = await crowd.gateway(new.port)
        await crowd.agent(new.port, "agent-1", hosting(0, 4, epoch=1))
        await until(lambda: back.ready, "served by the one that is left")


async def test_a_batch_nobody_remembers_is_booked_from_the_agents_word(
    configured: Configured, crowd: Crowd
) -> None:
    batches = [
        scheduler_pb2.BatchInAgent(batch_id=77, position=0, remaining_ns=40 * MS),
        scheduler_pb2.BatchInAgent(batch_id=78, position=0, running=True, remaining_ns=30 * MS),
    ]
    async with scheduler(configured()) as process:
        await crowd.agent(process.port, "agent-0", AgentScript(batches=batches))
        await until(lambda: "agent-0" in process.leader().cluster.registry, "joined")
        book = {r.batch: r for r in process.leader().dispatcher.snapshot()}
        assert set(book) == {77, 78}
        assert book[78].end_ns == book[77].start_ns
        assert book[77].end_ns - book[78].start_ns == 70 * MS


async def test_a_standby_takes_over_and_the_old_leader_gives_the_lease_back(
    configured: Configured, crowd: Crowd
) -> None:
    async with (
        scheduler(configured(lease_s=30.0)) as first,
        scheduler(configured(scheduler_id="standby", lease_s=0.4)) as second,
    ):
        refused = await crowd.gateway(second.port)
        await until(lambda: refused.ended, "a standby refuses")
        assert refused.status == "UNAVAILABLE"
        assert not second.leads
        gateway = await crowd.gateway(first.port)
        await until(lambda: gateway.all("welcome"), "welcomed")
        epoch = first.leader().epoch
        await first.drain(5.0)
        await until(lambda: gateway.ended, "the session ends")
        await leads(second)
        assert second.leader().epoch > epoch  # by more than one where its short lease has run out


async def is_booked(leader: Any) -> bool:
    stored = await leader._store.load()
    return bool(stored.book)


async def test_killed_redis_stops_nobody(
    configured: Configured, crowd: Crowd, server: EmbeddedRedis
) -> None:
    async with scheduler(configured()) as process:
        gateway, _ = await crowd.serving(process.port)
        assert server.pid is not None
        os.kill(server.pid, signal.SIGKILL)
        await server.wait()
        leader = process.leader()
        await until(lambda: not leader.write_behind.connected, "the loss is noticed")
        await gateway.submit(1)
        await gateway.dispatched(1)
        await server.start()
        await until(lambda: leader.write_behind.connected, "connected again")
        assert process.leader() is leader
        await gateway.submit(2)
        await gateway.dispatched(2)
        async with asyncio.timeout(30):
            # Nothing was booked before Redis died, so whatever is there was written afterwards.
            while not await is_booked(leader):
                await asyncio.sleep(0.01)


async def test_a_paused_leader_that_was_replaced_steps_down(
    configured: Configured, crowd: Crowd, server: EmbeddedRedis
) -> None:
    async with scheduler(configured()) as old:
        gateway = await crowd.gateway(old.port)
        await until(lambda: gateway.all("welcome"), "welcomed")
        # As if it had been stopped for longer than its lease: another one led since.
        redis = old._redis
        keys = old.leader()._store._keys
        await redis.set(keys.epoch, 5)
        await redis.set(keys.lease, "another", px=60_000)
        await until(lambda: gateway.ended, "its sessions end")
        assert gateway.status == "UNAVAILABLE"
        assert not old.leads
        await redis.delete(keys.lease)
        await leads(old)
        assert old.leader().epoch == 6


async def test_an_agent_of_another_leader_of_the_same_epoch_lifts_ours(
    configured: Configured, crowd: Crowd
) -> None:
    async with scheduler(configured(expected_agents=2)) as process:
        await leads(process)
        before = process.leader().epoch
        await crowd.agent(process.port, "agent-0", hosting(0, 2, epoch=before))
        own = process.leader()._lease.token
        await crowd.agent(process.port, "agent-1", hosting(2, 4, epoch=before, leader=own))
        await asyncio.sleep(0)
        assert process.leader().epoch == before
        refused = await crowd.agent(
            process.port, "agent-2", hosting(0, 2, epoch=before, leader="scheduler-9/other")
        )
        await until(lambda: refused.ended, "it is refused")
        await until(lambda: process.leader().epoch > before, "the epoch is lifted")


async def test_a_draining_agent_goes_on_draining_under_a_new_leader(
    configured: Configured, crowd: Crowd
) -> None:
    async with scheduler(configured(plan=POOL)) as old:
        await crowd.serving(old.port, agents=2)
        async with admin(old.port) as stub:
            await stub.DrainAgent(admin_pb2.DrainAgentRequest(agent_id="agent-1"), timeout=5)
        await old.leader().write_behind.flush()
        await crash(old)
    async with scheduler(configured(plan=POOL, scheduler_id="scheduler-1")) as new:
        await leads(new)
        registry = new.leader().cluster.registry
        back = await crowd.gateway(new.port)
        other = await crowd.agent(new.port, "agent-0", hosting(0, 4, epoch=1))
        going = await crowd.agent(new.port, "agent-1", hosting(0, 4, epoch=1))

        def states() -> dict[str, str]:
            return {
                str(agent): record.state(new.leader().availability)
                for agent, record in registry.items()
            }

        await until(lambda: states() == {"agent-0": "ready", "agent-1": "draining"}, "draining")
        await until(lambda: going.all("drain"), "it is told that it may go")
        assert not other.all("drain")
        await until(lambda: back.ready, "ready")
        for number in range(1, 4):
            await back.submit(number)
            assert (await back.dispatched(number)).route[0].agent_id == "agent-0"
        await going.close()
        # Whoever is started anew under its name is not meant.
        await crowd.agent(new.port, "agent-1", hosting(0, 4, epoch=2, incarnation=2))
        await until(lambda: states() == {"agent-0": "ready", "agent-1": "ready"}, "both serve")
