"""The leader is killed, told to stop, or paused, under load: the standby leads, nothing is lost."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

import catenary
import figures
from fault_cluster import (
    LEASE_S,
    FaultCluster,
    fault_cluster,
    nothing_is_booked,
    ready,
    until,
    until_status,
)
from machine_faults.fault_load import Load, prepared_load

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
]

BEFORE_S, AFTER_S = 3.0, 8.0
TAKEOVER_LIMIT_S = 3.0
HANDOVER_LIMIT_S = 1.5
PAUSED_S = 6.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FaultCluster]:
    async with fault_cluster(tmp_path_factory.mktemp("schedulers")) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def cluster(shared: FaultCluster) -> FaultCluster:
    """The cluster of all tests here, with both schedulers, whatever the last one did to them."""
    for name in ("scheduler-0", "scheduler-1"):
        if not shared[name].is_running:
            shared[name].start()
        shared[name].signal(signal.SIGCONT)
        await until(lambda at=name: answers(shared, at), 30.0, f"{name} being there")
    await ready(shared)
    return shared


async def leader_of(client: catenary.AsyncClient) -> catenary.ClusterStatus:
    return await until_status(client, lambda status: bool(status.scheduler_id), 10.0)


def other(name: str) -> str:
    return {"scheduler-0": "scheduler-1", "scheduler-1": "scheduler-0"}[name]


async def taken_over(client: catenary.AsyncClient, old: catenary.ClusterStatus) -> float:
    """Returns how long it takes until the standby leads, as the gateway sees it."""
    began_s = time.monotonic()
    status = await until_status(
        client, lambda now: now.scheduler_id == other(old.scheduler_id), 20.0
    )
    assert status.epoch > old.epoch
    return time.monotonic() - began_s


@pytest.mark.parametrize(
    ("number", "limit_s"),
    [(signal.SIGKILL, TAKEOVER_LIMIT_S), (signal.SIGTERM, HANDOVER_LIMIT_S)],
    ids=["kill -9", "SIGTERM"],
)
async def test_the_standby_takes_over_and_nothing_is_lost(
    cluster: FaultCluster, number: signal.Signals, limit_s: float
) -> None:
    test = f"scheduler {number.name}"
    async with cluster.client() as client, prepared_load(cluster) as load:
        before = await leader_of(client)
        async with load.running():
            await load.for_s(BEFORE_S)
            fault_s = load.now_s
            cluster[before.scheduler_id].signal(number)
            taken_s = await taken_over(client, before)
            await load.for_s(AFTER_S)
        load.report(test, fault_s)
        figures.report(test, "standby leads after", taken_s, "s", f"<= {limit_s:g}")
        load.nothing_was_lost()
        assert taken_s <= limit_s
        streams_went_on(load, test, fault_s)
        await nothing_is_booked(client)
    cluster[before.scheduler_id].kill()


def streams_went_on(load: Load, test: str, fault_s: float) -> None:
    """Texts that ran when the leader went need it for nothing: their next tokens come in time."""
    running = [o for o in load.of("text") if o.sent_s < fault_s - 0.5 and o.ended_s > fault_s + 0.5]
    assert running, "no stream ran at the time of the fault"
    pause_s = max(
        b - a
        for o in running
        for a, b in zip(o.moments_s, o.moments_s[1:], strict=False)
        if b > fault_s
    )
    figures.report(test, "longest pause of streams that ran", pause_s, "s", "<= 1")
    assert pause_s <= 1.0


async def test_a_leader_that_was_paused_past_its_lease_changes_nothing(
    cluster: FaultCluster,
) -> None:
    test = "scheduler paused"
    async with cluster.client() as client, prepared_load(cluster) as load:
        before = await leader_of(client)
        old = cluster[before.scheduler_id]
        async with load.running():
            await load.for_s(BEFORE_S)
            fault_s = load.now_s
            old.signal(signal.SIGSTOP)
            taken_s = await taken_over(client, before)
            await ready(cluster, 20.0)
            await load.for_s(max(0.0, PAUSED_S - taken_s))
            old.signal(signal.SIGCONT)
            gone_s = await until(
                lambda: says(cluster, old.name, "scheduler_leader", 0.0), 5.0, "stepping down"
            )
            await load.for_s(AFTER_S)
            after = await leader_of(client)
        load.report(test, fault_s)
        figures.report(test, "standby leads after", taken_s, "s", f"<= {TAKEOVER_LIMIT_S + 3:g}")
        figures.report(test, "the old leader steps down after", gone_s, "s", "<= 1.5")
        load.nothing_was_lost()
        assert gone_s <= 1.5
        # Streams of a process that stands still do not break: they are given up as silent.
        assert taken_s <= TAKEOVER_LIMIT_S + 3
        assert after.scheduler_id == other(old.name)
        assert after.epoch == before.epoch + 1, "the old leader wrote or led once more"
        await nothing_is_booked(client)
        await agents_obey(cluster, after.epoch)


async def test_a_leader_paused_for_less_than_agents_notice_is_refused_by_all(
    cluster: FaultCluster,
) -> None:
    """Its streams still stand when it goes on, its lease does not: only fencing is left."""
    test = "scheduler paused briefly"
    async with cluster.client() as client, prepared_load(cluster) as load:
        before = await leader_of(client)
        old = cluster[before.scheduler_id]
        async with load.running():
            await load.for_s(BEFORE_S)
            fault_s = load.now_s
            old.signal(signal.SIGSTOP)
            await until(
                lambda: says(cluster, other(old.name), "scheduler_leader", 1.0), 5.0, "a new leader"
            )
            old.signal(signal.SIGCONT)
            gone_s = await until(
                lambda: says(cluster, old.name, "scheduler_leader", 0.0), 5.0, "stepping down"
            )
            await load.for_s(AFTER_S)
            after = await leader_of(client)
        load.report(test, fault_s)
        figures.report(test, "the old leader steps down after", gone_s, "s", "<= 1.5")
        load.nothing_was_lost()
        assert gone_s <= 1.5
        assert (after.scheduler_id, after.epoch) == (other(old.name), before.epoch + 1)
        await nothing_is_booked(client)
        await agents_obey(cluster, after.epoch)


async def test_both_schedulers_may_go_one_after_the_other(cluster: FaultCluster) -> None:
    """The lease goes to and fro; what each leaves behind is enough for the next."""
    test = "scheduler to and fro"
    async with cluster.client() as client, prepared_load(cluster) as load:
        taken = []
        async with load.running():
            await load.for_s(BEFORE_S)
            fault_s = load.now_s
            for _ in range(2):
                before = await leader_of(client)
                old = cluster[before.scheduler_id]
                old.kill()
                taken.append(await taken_over(client, before))
                old.start()
                await until(lambda at=old.name: answers(cluster, at), 30.0, "a standby")
                await load.for_s(2 * LEASE_S)
        load.report(test, fault_s)
        figures.report(test, "slowest take-over", max(taken), "s", f"<= {TAKEOVER_LIMIT_S:g}")
        load.nothing_was_lost()
        assert max(taken) <= TAKEOVER_LIMIT_S
        await nothing_is_booked(client)


async def agents_obey(cluster: FaultCluster, epoch: int) -> None:
    """Every agent obeys the new leader's epoch and none below it."""
    for name, member in cluster.members.items():
        if member.kind == "agent":
            await until(lambda at=name: says(cluster, at, "scheduler_epoch", epoch), 5.0, name)


async def says(cluster: FaultCluster, name: str, metric: str, value: float) -> bool:
    return (await metrics_of(cluster, name)).get(f"catenary_{metric}") == value


async def answers(cluster: FaultCluster, name: str) -> bool:
    return bool(await metrics_of(cluster, name))


async def metrics_of(cluster: FaultCluster, name: str) -> dict[str, float]:
    """Returns the metrics without labels of a process; none while it does not answer."""
    try:
        text = await cluster.metrics(name, timeout_s=2.0)
    except OSError:
        return {}
    return {n: float(v) for n, v in re.findall(r"^(\w+) (\S+)$", text, re.MULTILINE)}
