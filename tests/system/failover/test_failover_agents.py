"""Agents and gateways that are slow, killed, or gone with their machine, under load."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import catenary
import figures
from catenary_services.domain.ids import ModelKey
from catenary_services.models.model_repository import ModelRepository
from fault_cluster import (
    IMAGES,
    FaultCluster,
    fault_cluster,
    nothing_is_booked,
    ready,
    shared_models,
    until,
    until_status,
)
from machine_faults.fault_load import Load, Shape, prepared_load

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

BEFORE_S, AFTER_S = 2.0, 5.0
NOTICED_LIMIT_S = 5.0
GOOD_MS = 1000.0
TIMES_SLOWER = 5.0


@contextmanager
def slower(faults_file: Path) -> Iterator[None]:
    """Makes steps of the agent that looks at this file take five times as long.

    A process that is stopped and goes on in turns would not do: beside other load, its steps are
    slowed by less, as it gets the time back that others would have had.
    """
    fresh = faults_file.with_suffix(".new")
    fresh.write_text(json.dumps({"slow": TIMES_SLOWER}))
    fresh.replace(faults_file)
    try:
        yield
    finally:
        faults_file.unlink()


def whole_on_both(repository: Path) -> dict[str, object]:
    """Images on two agents, the whole model on each, so that each can be done without."""
    blocks = ModelRepository(repository).block_table(ModelKey(IMAGES, "1")).blocks
    agents = ["agent-0", "agent-1"]
    parts = [{"blocks": [0, blocks], "agents": agents}]
    return {
        "models": [
            {"name": IMAGES, "slo_ms": 2000, "pipelines": [{"batch": 1, "partitions": parts}]}
        ]
    }


async def test_a_slow_agent_gets_less_until_it_is_fast_again(tmp_path: Path) -> None:
    test = "straggler"
    shape = Shape(images_per_s=12.0, images_at_once=3, texts_per_s=0.0)
    placement = whole_on_both(shared_models())
    file = tmp_path / "agent-1.faults"
    faulty = {"agent-1": {"faults_file": file, "allow_faults": True}}
    async with (
        fault_cluster(tmp_path, texts=False, placement=placement, overrides=faulty) as cluster,
        cluster.client() as client,
        prepared_load(cluster, shape) as load,
    ):
        async with load.running():
            await load.for_s(5.0)
            usual = await share_of(cluster, load, 3.0)
            with slower(file):
                slow_s = load.now_s
                noticed_s = await until(
                    lambda: stragglers(cluster, 1.0), 20.0, "the straggler being set aside"
                )
                await load.for_s(1.0)
                calm_s = load.now_s
                slow_share = await share_of(cluster, load, 6.0)
                attained = attainment(load, calm_s, load.now_s - GOOD_MS / 1000)
            fast_s = load.now_s
            await until(lambda: works_again(cluster), 70.0, "the agent getting work again")
            back_s = load.now_s - fast_s
            await load.for_s(2.0)
        load.report(test, slow_s)
        figures.report(test, "its share of the batches, as usual", usual, "", ">= 0.1")
        figures.report(test, "set aside after", noticed_s, "s", f"<= {NOTICED_LIMIT_S:g}")
        figures.report(test, "its share of the batches, then", slow_share, "", "<= 0.25")
        figures.report(test, f"answered within {GOOD_MS:g} ms, then", attained, "", ">= 0.95")
        figures.report(test, "works again after it is fast", back_s, "s", "<= 30")
        load.nothing_was_lost()
        assert usual >= 0.1
        assert noticed_s <= NOTICED_LIMIT_S
        assert slow_share <= 0.25
        assert attained >= 0.95
        assert back_s <= 30.0
        await nothing_is_booked(client)


async def test_a_stopped_agent_is_lost_and_comes_back_as_it_was(tmp_path: Path) -> None:
    """SIGSTOP for longer than silence: what it holds is done elsewhere, what it says later is old."""
    test = "agent paused"
    async with (
        fault_cluster(tmp_path) as cluster,
        cluster.client() as client,
        prepared_load(cluster) as load,
    ):
        async with load.running():
            await load.for_s(BEFORE_S)
            fault_s = load.now_s
            for name in ("agent-1", "agent-3"):
                cluster[name].signal(signal.SIGSTOP)
            await states(client, {"agent-1": "lost", "agent-3": "lost"}, 8.0)
            await load.for_s(1.0)
            for name in ("agent-1", "agent-3"):
                cluster[name].signal(signal.SIGCONT)
            await states(client, {"agent-1": "ready", "agent-3": "ready"}, 15.0)
            await load.for_s(AFTER_S)
        load.report(test, fault_s)
        load.nothing_was_lost()
        await nothing_is_booked(client)


@pytest.mark.parametrize("victims", [("agent-1", "agent-2"), ("agent-4",)], ids=["two", "one"])
async def test_killed_agents_lose_nothing_and_come_back(
    tmp_path: Path, victims: tuple[str, ...]
) -> None:
    """As the kernel does it when memory runs out: no last word."""
    test = f"kill -9 {' and '.join(victims)}"
    async with (
        fault_cluster(tmp_path) as cluster,
        cluster.client() as client,
        prepared_load(cluster) as load,
    ):
        async with load.running():
            await load.for_s(BEFORE_S)
            fault_s = load.now_s
            for name in victims:
                cluster[name].kill()
            await states(client, dict.fromkeys(victims, "lost"), 5.0)
            lost_s = load.now_s - fault_s
            for name in victims:
                cluster[name].start()
            await states(client, dict.fromkeys(victims, "ready"), 40.0)
            await load.for_s(AFTER_S)
        load.report(test, fault_s)
        figures.report(test, "taken as lost after", lost_s, "s", "<= 1")
        load.nothing_was_lost()
        assert lost_s <= 1.0
        await nothing_is_booked(client)


async def test_a_machine_with_the_leader_and_an_agent_goes_at_once(tmp_path: Path) -> None:
    test = "machine lost"
    async with (
        fault_cluster(tmp_path) as cluster,
        cluster.client() as client,
        prepared_load(cluster) as load,
    ):
        before = await until_status(client, lambda status: bool(status.scheduler_id), 5.0)
        async with load.running():
            await load.for_s(BEFORE_S)
            fault_s = load.now_s
            for name in (before.scheduler_id, "agent-1", "agent-4"):
                cluster[name].signal(signal.SIGKILL)
            began_s = time.monotonic()
            after = await until_status(
                client, lambda s: s.scheduler_id not in ("", before.scheduler_id), 20.0
            )
            taken_s = time.monotonic() - began_s
            await load.for_s(AFTER_S)
        load.report(test, fault_s)
        figures.report(test, "standby leads after", taken_s, "s", "<= 3")
        load.nothing_was_lost()
        assert taken_s <= 3.0
        assert after.epoch > before.epoch
        await nothing_is_booked(client)


async def test_a_client_of_two_gateways_survives_the_loss_of_one(tmp_path: Path) -> None:
    test = "kill -9 gateway"
    async with fault_cluster(tmp_path, gateways=2) as cluster:
        names = ("gateway-0", "gateway-1")
        client = catenary.AsyncClient(
            [cluster.target(name) for name in names],
            admin_target=[cluster.admin(name) for name in names],
        )
        async with client, cluster.client("gateway-1") as watcher:
            load = Load([client])
            await load.prepare()
            async with load.running():
                await load.for_s(BEFORE_S)
                fault_s = load.now_s
                cluster["gateway-0"].kill()
                await load.for_s(3.0)
                cluster["gateway-0"].start()
                await until(lambda: serves(cluster, "gateway-0"), 30.0, "the gateway")
                cluster["gateway-1"].kill()
                await load.for_s(AFTER_S)
            load.report(test, fault_s)
            load.nothing_was_lost()
            await nothing_is_booked_at(cluster, "gateway-0")
        assert watcher is not None


async def test_a_corrupt_model_on_one_agent_is_named_and_the_others_serve(tmp_path: Path) -> None:
    test = "corrupt model"
    broken = tmp_path / "broken"
    # Without parts that were cut from the whole copy: they would serve, and rightly so.
    shutil.copytree(shared_models(), broken, ignore=shutil.ignore_patterns(".parts"))
    model = broken / IMAGES / "1" / "model.onnx"
    content = bytearray(model.read_bytes())
    content[1000:200_000] = b"\xff" * 199_000
    model.write_bytes(content)
    placement = whole_on_both(shared_models())
    shape = Shape(texts_per_s=0.0)
    overrides = {"agent-1": {"model_repository": broken}}
    async with (
        fault_cluster(
            tmp_path, texts=False, placement=placement, overrides=overrides, wait=("agent-0",)
        ) as running,
        running.client() as client,
        prepared_load(running, shape) as load,
    ):

        async def is_named() -> bool:
            return "partition_failed" in running["agent-1"].log.read_text()

        async with load.running():
            await load.for_s(AFTER_S)
            await until(is_named, 90.0, "the corrupt model being named")
        load.report(test, 0.0)
        load.nothing_was_lost()
        assert running["agent-1"].is_running
        await nothing_is_booked(client)


async def test_an_agent_whose_log_and_cache_disk_is_full_serves_on(tmp_path: Path) -> None:
    test = "agent's disk full"
    async with (
        fault_cluster(tmp_path, overrides={"agent": {"log_level": "debug"}}) as cluster,
        cluster.client() as client,
        prepared_load(cluster) as load,
    ):
        for name in ("agent-1", "agent-2"):
            cluster[name].kill()
            cluster[name].log = Path("/dev/full")
            cluster[name].start()
        await ready(cluster, 40.0)
        async with load.running():
            await load.for_s(AFTER_S)
        load.report(test, 0.0)
        load.nothing_was_lost()
        assert cluster["agent-1"].is_running
        assert cluster["agent-2"].is_running
        await nothing_is_booked(client)


async def states(client: catenary.AsyncClient, wanted: dict[str, str], timeout_s: float) -> None:
    await until_status(
        client,
        lambda status: wanted.items() <= {a.agent_id: a.state for a in status.agents}.items(),
        timeout_s,
    )


async def nothing_is_booked_at(cluster: FaultCluster, gateway: str) -> None:
    async with cluster.client(gateway) as client:
        await nothing_is_booked(client)


async def serves(cluster: FaultCluster, gateway: str) -> bool:
    async with cluster.client(gateway) as client:
        try:
            return await client.ready()
        except catenary.CatenaryError:
            return False


def attainment(load: Load, since_s: float, until_s: float) -> float:
    asked = load.of("image", since_s, until_s)
    assert asked
    return sum(not o.error and o.took_s <= GOOD_MS / 1000 for o in asked) / len(asked)


async def stragglers(cluster: FaultCluster, wanted: float) -> bool:
    found = [await metric(cluster, f"scheduler-{n}", "catenary_stragglers") for n in range(2)]
    return wanted in found


async def works_again(cluster: FaultCluster) -> bool:
    """True if the agent computed a few batches within half a second."""
    before = await batches_of(cluster, "agent-1")
    await asyncio.sleep(0.5)
    return await batches_of(cluster, "agent-1") >= before + 2 and await stragglers(cluster, 0.0)


async def share_of(cluster: FaultCluster, load: Load, seconds: float) -> float:
    """Returns the share of agent-1 in the batches of the next seconds."""
    before = [await batches_of(cluster, f"agent-{n}") for n in range(2)]
    await load.for_s(seconds)
    done = [await batches_of(cluster, f"agent-{n}") - before[n] for n in range(2)]
    return done[1] / max(1.0, sum(done))


async def batches_of(cluster: FaultCluster, agent: str) -> float:
    return await metric(cluster, agent, "catenary_batches_total")


async def metric(cluster: FaultCluster, name: str, metric_name: str) -> float:
    """Returns the sum of a metric over its labels; 0 while the process does not answer."""
    try:
        text = await cluster.metrics(name, timeout_s=2.0)
    except OSError:
        return 0.0
    found = re.findall(rf"^{metric_name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
    return sum(map(float, found))
