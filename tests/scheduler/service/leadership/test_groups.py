"""Two scheduler groups, two scheduler processes, one real Redis."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from catenary_protos.catenary.v1 import admin_pb2, scheduler_pb2
from catenary_scheduler.process import SchedulerProcess
from catenary_scheduler.settings import SchedulerSettings
from catenary_services.domain.groups import GROUP_METADATA, group_of_epoch, group_of_id
from catenary_services.errors import CatenaryError, InvalidInput, Unavailable
from scheduler_harness import COMPUTE_NS, MS, AgentScript, Crowd, admin, crash, scheduler, until

Configured = Callable[..., SchedulerSettings]
Pair = tuple[SchedulerProcess, SchedulerProcess]


@pytest.fixture
def grouped(configured: Configured) -> Configured:
    def make(number: int, **changes: object) -> SchedulerSettings:
        values = {"scheduler_groups": 2, "takeover_grace_s": 0.1, **changes}
        return configured(scheduler_id=f"scheduler-{number}", **values)

    return make


@asynccontextmanager
async def both(grouped: Configured) -> AsyncIterator[Pair]:
    """Each leads its own group."""
    async with scheduler(grouped(0)) as first, scheduler(grouped(1)) as second:
        await until(lambda: (first.groups, second.groups) == ((0,), (1,)), "one group each")
        yield first, second


def in_group(group: int, **changes: object) -> AgentScript:
    return AgentScript(group=group, **changes)  # type: ignore[arg-type]


def still_hosting(group: int, epoch: int) -> AgentScript:
    key = scheduler_pb2.PartitionKey(model="toy", model_version="1", last_block=4)
    loaded = scheduler_pb2.PartitionLoaded(key=key, memory_bytes=1, compute_ns=[COMPUTE_NS] * 4)
    return in_group(group, partitions=[loaded], epoch=epoch, incarnation=7)


async def refusal(crowd: Crowd, port: int, group: int) -> CatenaryError:
    refused = await crowd.gateway(port, group=group)
    await until(lambda: refused.ended, "refused")
    assert refused.error is not None
    return refused.error


async def test_each_process_leads_its_group_and_refuses_the_other(
    grouped: Configured, crowd: Crowd
) -> None:
    async with both(grouped) as pair:
        for group, process in enumerate(pair):
            refused = await refusal(crowd, process.port, 1 - group)
            assert isinstance(refused, Unavailable)
            assert f"does not lead group {1 - group}" in refused.message
        nobody = await refusal(crowd, pair[0].port, 2)
        assert isinstance(nobody, InvalidInput)


async def test_groups_plan_for_their_own_agents_and_their_ids_never_meet(
    grouped: Configured, crowd: Crowd
) -> None:
    async with both(grouped) as pair:
        batches = []
        for group, process in enumerate(pair):
            gateway = await crowd.gateway(process.port, group=group)
            agent = await crowd.agent(process.port, f"agent-{group}", in_group(group))
            await until(lambda gateway=gateway: gateway.ready, "ready")
            await gateway.submit(1)
            batch = await gateway.dispatched(1)
            batches.append(batch)
            assert [hop.agent_id for hop in batch.route] == [f"agent-{group}"]
            assert group_of_id(batch.batch_id, 2) == group_of_epoch(batch.epoch, 2) == group
            table = gateway.all("models")[-1]
            assert [model.workers for model in table.models] == [1]
            told = {peer.peer_id for peer in agent.all("directory")[-1].peers}
            assert told == {"gateway-0", f"agent-{group}"}
        assert batches[0].batch_id != batches[1].batch_id
        assert batches[0].plan_id != batches[1].plan_id


async def test_a_group_of_a_killed_process_goes_on_at_the_other_and_nothing_is_lost(
    grouped: Configured, crowd: Crowd, capsys: pytest.CaptureFixture[str]
) -> None:
    async with scheduler(grouped(0)) as left:
        async with scheduler(grouped(1)) as lost:
            await until(lambda: lost.groups == (1,) and left.groups == (0,), "one group each")
            gateway = await crowd.gateway(lost.port, group=1)
            kept = await crowd.gateway(left.port, group=0)
            await crowd.agent(lost.port, "agent-1", in_group(1))
            await crowd.agent(left.port, "agent-0", in_group(0))
            await until(lambda: gateway.ready and kept.ready, "ready")
            await gateway.submit(1)
            batch = await gateway.dispatched(1)
            await lost.leader(1).write_behind.flush()
            await asyncio.sleep(0.05)  # a batch of changes that was on its way already
            killed_s = time.monotonic()
            await crash(lost)
        await until(lambda: left.groups == (0, 1), "the other one leads both")
        taken_s = time.monotonic() - killed_s
        back = await crowd.gateway(left.port, group=1)
        await crowd.agent(left.port, "agent-1", still_hosting(1, batch.epoch))
        in_flight = scheduler_pb2.InFlight(
            batch_id=batch.batch_id, rows=1, expected_after_ns=5_000 * MS
        )
        await back.submit(1, in_flight=[in_flight], budget_ns=9_000 * MS)
        await back.submit(2)
        fresh = await back.dispatched(2)
        assert not back.dispatches(1), "the batch that is under way was adopted"
        assert group_of_epoch(fresh.epoch, 2) == 1
        assert fresh.epoch > batch.epoch
        assert fresh.plan_id == batch.plan_id
        await kept.submit(3)
        await kept.dispatched(3)
        assert not kept.ended, "the group it led all along noticed nothing"
        # The lease of the harness is 0.4 s, the grace 0.1 s; the rest is taking over.
        assert taken_s < 5.0
        with capsys.disabled():
            print(f"\ngroup taken over {taken_s:.2f} s after its leader ended (lease 0.4 s)")


async def test_a_process_that_leads_two_groups_hands_one_to_a_standby(
    grouped: Configured, crowd: Crowd
) -> None:
    patient = {"overdue_grace_ms": 60_000.0}  # scripted agents never say that they are done
    async with scheduler(grouped(0, **patient)) as first:
        await until(lambda: first.groups == (0, 1), "alone it leads both")
        gateway = await crowd.gateway(first.port, group=1)
        await crowd.agent(first.port, "agent-1", in_group(1))
        await until(lambda: gateway.ready, "ready")
        await gateway.submit(1)
        batch = await gateway.dispatched(1)
        kept = first.leader(0)
        async with scheduler(grouped(1, **patient)) as second:
            await until(lambda: second.groups == (1,), "the second leads one of them")
            await until(lambda: gateway.ended, "its gateways are told")
            assert first.groups == (0,)
            assert first.leader(0) is kept
            # Handed over in good order: not a moment of the book is missing.
            restored = {r.batch for r in second.leader(1).dispatcher.snapshot()}
            assert batch.batch_id in restored
            await asyncio.sleep(1.0)  # longer than any lease or grace here
            assert (first.groups, second.groups) == ((0,), (1,))


async def test_a_drained_process_leaves_its_group_to_the_other_without_a_wait_for_the_lease(
    grouped: Configured,
) -> None:
    async with scheduler(grouped(0)) as first, scheduler(grouped(1, lease_s=30.0)) as second:
        await until(lambda: (first.groups, second.groups) == ((0,), (1,)), "one group each")
        await second.drain(5.0)
        await until(lambda: first.groups == (0, 1), "taken over")


async def test_metrics_of_two_groups_in_one_process_are_told_apart(grouped: Configured) -> None:
    async with scheduler(grouped(0, metrics_port=0)) as process:
        await until(lambda: process.groups == (0, 1), "alone it leads both")
        registry = process._registry
        epochs = {
            g: registry.get_sample_value("catenary_scheduler_epoch", {"group": g}) for g in "01"
        }
        assert epochs == {g: process.leader(int(g)).epoch for g in "01"}
        families = [family.name for family in registry.collect()]
        assert len(families) == len(set(families))


async def test_operators_may_ask_for_one_group(grouped: Configured, crowd: Crowd) -> None:
    async with scheduler(grouped(0)) as process:
        await until(lambda: process.groups == (0, 1), "alone it leads both")
        await crowd.agent(process.port, "agent-1", in_group(1))
        await until(lambda: "agent-1" in process.leader(1).cluster.registry, "joined")
        async with admin(process.port) as stub:
            for group, agents in ((0, []), (1, ["agent-1"])):
                status = await stub.GetStatus(
                    admin_pb2.GetStatusRequest(), metadata=((GROUP_METADATA, str(group)),)
                )
                assert [agent.agent_id for agent in status.agents] == agents
                assert [agent.group for agent in status.agents] == [group] * len(agents)
