from __future__ import annotations

import asyncio
import time
import urllib.request

import grpc
import numpy as np
import onnxruntime
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from catenary_protos.catenary.v1 import common_pb2, scheduler_pb2
from catenary_services.domain.ids import ModelKey
from shared_helpers.waiting import until
from tests.support.agent_harness import SECOND_NS, header, peer_of

TINY = ModelKey("tiny", "1")


def tiny_header(*agents: str, blocks, **options):
    made = header(agents=agents, blocks=blocks, **options)
    for hop in made.route:
        hop.model = "tiny"
    return made


def reference(repository, rows: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(str(repository.model_file(TINY)))
    return session.run(None, {"x": rows})[0]


def rows_of(count: int) -> np.ndarray:
    return np.random.default_rng(1).normal(size=(count, 64)).astype(np.float32)


def directory(*peers: common_pb2.Peer) -> scheduler_pb2.Directory:
    return scheduler_pb2.Directory(peers=peers)


async def test_hello_tells_who_the_agent_is_and_how_to_reach_it(bench):
    scheduler = await bench.scheduler()
    agent = await bench.agent(scheduler.port, device="emulated:p4", server_id="s-1")
    [hello] = await scheduler.wait_for("hello")
    assert (hello.agent_id, hello.device, hello.device_class) == ("a-0", "emulated:p4", "p4")
    assert hello.server_id == "s-1"
    assert hello.memory_bytes > 0
    assert hello.incarnation == hello.peer.incarnation == agent.incarnation
    assert {a.transport for a in hello.peer.addresses} == {"shm", "tcp"}
    assert list(hello.partitions) == []


@pytest.mark.parametrize(
    ("settings", "group"),
    [
        ({}, 0),
        ({"scheduler_groups": 3}, 2),
        ({"scheduler_groups": 3, "scheduler_group": "1"}, 1),
    ],
)
async def test_an_agent_names_its_scheduler_group(bench, settings, group):
    scheduler = await bench.scheduler()
    await bench.agent(scheduler.port, agent_id="a-5", **settings)
    await scheduler.wait_for("hello")
    assert scheduler.groups == [group]


async def test_a_chain_of_real_onnx_partitions_equals_the_whole_model(bench):
    scheduler = await bench.scheduler()
    gateway = await bench.net.gateway()
    table = bench.repository.block_table(TINY)
    cut = table.blocks // 2
    spans = [(0, cut), (cut, table.blocks)]
    agents = []
    for i, span in enumerate(spans):
        agents.append(await bench.agent(scheduler.port, agent_id=f"a-{i}"))
        await scheduler.wait_for("hello", i + 1)
        await scheduler.order(load_partition=bench.load(*span, float16_boundaries=False))
        [*_, loaded] = await scheduler.wait_for("partition_loaded", i + 1)
        assert len(loaded.compute_ns) == 4
        assert list(loaded.compute_ns) == sorted(loaded.compute_ns)
        assert min(loaded.compute_ns) > 0
    peers = [peer_of(a.name, a.hub, a.incarnation) for a in agents]
    peers.append(peer_of("gw-0", gateway.hub))
    for process in agents:
        process.hub.update_directory(peers)
    gateway.hub.update_directory(peers)
    for batch_id in (1, 2):
        data = rows_of(3)
        made = tiny_header("a-0", "a-1", blocks=spans, batch_id=batch_id, rows=3)
        await gateway.send("a-0", made, x=data)
        result = await gateway.next()
        np.testing.assert_allclose(
            result.tensors["y"], reference(bench.repository, data), rtol=1e-5, atol=1e-6
        )
    reports = await scheduler.wait_for("stage_report", 4)
    assert {(r.batch_id, r.position) for r in reports} == {(1, 0), (1, 1), (2, 0), (2, 1)}
    assert all(0 < r.compute_ns < SECOND_NS for r in reports)


async def test_the_directory_of_the_scheduler_opens_the_way_to_peers(bench):
    scheduler = await bench.scheduler()
    gateway = await bench.net.gateway()
    agent = await bench.agent(scheduler.port, device="emulated:p4", emulated_slowdown=0.01)
    [hello] = await scheduler.wait_for("hello")
    blocks = bench.repository.block_table(TINY).blocks
    await scheduler.order(directory=directory(hello.peer, peer_of("gw-0", gateway.hub)))
    await scheduler.order(load_partition=bench.load(0, blocks))
    await scheduler.wait_for("partition_loaded")
    gateway.hub.update_directory([hello.peer])
    await gateway.send("a-0", tiny_header("a-0", blocks=[(0, blocks)], rows=2), x=rows_of(2))
    result = await gateway.next()
    assert result.tensors["y"].shape == (2, 64)
    assert result.tensors["y"].dtype == np.float32
    assert agent.engine.held_batches == 0


async def test_a_partition_that_is_here_is_answered_at_once_and_unloaded_when_told(bench):
    scheduler = await bench.scheduler()
    agent = await bench.agent(scheduler.port)
    await scheduler.wait_for("hello")
    await scheduler.order(load_partition=bench.load(0, 1))
    first = await scheduler.wait_for("partition_loaded")
    loaded = agent.engine.partitions.get(next(iter(agent.engine.partitions)).key)
    await scheduler.order(load_partition=bench.load(0, 1, max_batch=2))
    again = await scheduler.wait_for("partition_loaded", 2)
    assert again[1].compute_ns == first[0].compute_ns
    await scheduler.order(load_partition=bench.load(0, 1, max_batch=6))
    larger = await scheduler.wait_for("partition_loaded", 3)
    assert len(larger[2].compute_ns) == 6
    assert agent.engine.partitions.get(loaded.key) is loaded
    await scheduler.order(load_partition=bench.load(0, 1, float16_boundaries=False))
    await scheduler.wait_for("partition_loaded", 4)
    assert agent.engine.partitions.get(loaded.key) is not loaded
    await scheduler.order(unload_partition=scheduler_pb2.UnloadPartition(key=bench.key(0, 1)))
    await until(lambda: not list(agent.engine.partitions))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            {"key": scheduler_pb2.PartitionKey(model="none", model_version="1", last_block=1)},
            "MODEL_NOT_FOUND",
        ),
        (
            {"key": scheduler_pb2.PartitionKey(model="tiny", model_version="1", last_block=99)},
            "INVALID_INPUT",
        ),
        ({"max_batch": 0}, "INVALID_INPUT"),
        ({"block_table_hash": "f" * 64}, "PLAN_INFEASIBLE"),
    ],
)
async def test_an_order_to_load_nonsense_is_answered_with_the_reason(bench, options, reason):
    scheduler = await bench.scheduler()
    await bench.agent(scheduler.port)
    await scheduler.wait_for("hello")
    order = bench.load(0, 1)
    if "key" in options:
        order.key.CopyFrom(options.pop("key"))
    for name, value in options.items():
        setattr(order, name, value)
    await scheduler.order(load_partition=order)
    [failed] = await scheduler.wait_for("partition_failed")
    assert failed.failure.reason == reason
    assert failed.key == order.key


async def test_a_partition_that_does_not_fit_is_refused(bench):
    scheduler = await bench.scheduler()
    agent = await bench.agent(scheduler.port, memory_bytes=10)
    await scheduler.wait_for("hello")
    await scheduler.order(load_partition=bench.load(0, 1))
    [failed] = await scheduler.wait_for("partition_failed")
    assert failed.failure.reason == "PLAN_INFEASIBLE"
    assert "does not fit" in failed.failure.message
    assert failed.out_of_memory
    assert list(agent.engine.partitions) == []


async def test_a_new_leader_is_found_told_everything_and_obeyed(bench):
    old = await bench.scheduler(epoch=3)
    standby = await bench.scheduler(standby=True)
    agent = await bench.agent(standby.port, old.port)
    await old.wait_for("hello")
    await old.order(load_partition=bench.load(0, 1))
    await old.wait_for("partition_loaded")
    assert agent.epoch == 3
    await old.stop()
    new = await bench.scheduler(epoch=4, port=old.port)
    [hello] = await new.wait_for("hello")
    assert hello.epoch == 3
    assert [(p.key.first_block, p.key.last_block) for p in hello.partitions] == [(0, 1)]
    assert len(hello.partitions[0].compute_ns) == 4
    await until(lambda: agent.epoch == 4)


async def test_orders_of_a_former_leader_are_refused(bench):
    scheduler = await bench.scheduler(epoch=5)
    agent = await bench.agent(scheduler.port)
    await scheduler.wait_for("hello")
    await scheduler.order(epoch=4, load_partition=bench.load(0, 1))
    [refused] = await scheduler.wait_for("order_refused")
    assert (refused.order_epoch, refused.agent_epoch) == (4, 5)
    assert list(agent.engine.partitions) == []
    assert agent.metrics.orders_refused._value.get() == 1


async def test_a_former_leader_that_comes_back_is_left_alone(bench):
    new = await bench.scheduler(epoch=9)
    agent = await bench.agent(new.port)
    await new.wait_for("hello")
    await until(lambda: agent.epoch == 9)
    await new.stop()
    old = await bench.scheduler(epoch=8, port=new.port)
    [refused, *_] = await old.wait_for("order_refused")
    assert (refused.order_epoch, refused.agent_epoch) == (8, 9)
    assert not agent.control.connected.is_set()


async def test_the_data_plane_goes_on_while_the_scheduler_is_away(bench):
    scheduler = await bench.scheduler()
    gateway = await bench.net.gateway()
    agent = await bench.agent(scheduler.port, device="emulated:p4", emulated_slowdown=0.01)
    [hello] = await scheduler.wait_for("hello")
    blocks = bench.repository.block_table(TINY).blocks
    await scheduler.order(directory=directory(hello.peer, peer_of("gw-0", gateway.hub)))
    await scheduler.order(load_partition=bench.load(0, blocks))
    await scheduler.wait_for("partition_loaded")
    gateway.hub.update_directory([hello.peer])
    await scheduler.stop()
    await until(lambda: not agent.control.connected.is_set())
    made = tiny_header("a-0", blocks=[(0, blocks)], rows=1)
    await gateway.send("a-0", made, x=rows_of(1))
    await gateway.next()
    away_ns = time.monotonic_ns()
    await asyncio.sleep(0.1)  # the report grows old, and has to say so
    again = await bench.scheduler(epoch=2, port=scheduler.port)
    [report] = await again.wait_for("stage_report")
    assert report.batch_id == 1
    assert 100_000_000 <= report.compute_ended_ago_ns < time.monotonic_ns() - away_ns + SECOND_NS


async def test_a_silent_scheduler_is_left_and_heartbeats_come_each_interval(bench):
    scheduler = await bench.scheduler()
    await bench.agent(scheduler.port, heartbeat_s=0.05, silence_s=0.3)
    await scheduler.wait_for("heartbeat", 3, timeout_s=2)
    await scheduler.wait_for("hello", 2, timeout_s=5)  # it said welcome and then nothing
    assert scheduler.sessions >= 2


async def test_a_drain_order_is_answered_when_the_last_batch_is_gone(bench):
    scheduler = await bench.scheduler()
    gateway = await bench.net.gateway()
    table = bench.repository.block_table(TINY)
    slowdown = 20_000_000 / sum(table.compute_ns)  # 20 ms a row
    agent = await bench.agent(scheduler.port, device="emulated:p4", emulated_slowdown=slowdown)
    [hello] = await scheduler.wait_for("hello")
    await scheduler.order(directory=directory(hello.peer, peer_of("gw-0", gateway.hub)))
    await scheduler.order(load_partition=bench.load(0, table.blocks))
    await scheduler.wait_for("partition_loaded")
    gateway.hub.update_directory([hello.peer])
    for batch_id in range(1, 6):
        made = tiny_header("a-0", blocks=[(0, table.blocks)], batch_id=batch_id)
        await gateway.send("a-0", made, x=rows_of(1))
    await until(lambda: agent.engine.held_batches >= 3)
    await scheduler.order(drain=scheduler_pb2.Drain())
    await scheduler.wait_for("drained")
    kinds = [m.WhichOneof("kind") for m in scheduler.heard if m.WhichOneof("kind") != "heartbeat"]
    assert kinds[-6:] == ["stage_report"] * 5 + ["drained"]


async def test_drain_of_the_process_says_so_and_finishes_what_arrives_late(bench):
    scheduler = await bench.scheduler()
    gateway = await bench.net.gateway()
    agent = await bench.agent(scheduler.port, device="emulated:p4", emulated_slowdown=0.01)
    [hello] = await scheduler.wait_for("hello")
    blocks = bench.repository.block_table(TINY).blocks
    await scheduler.order(directory=directory(hello.peer, peer_of("gw-0", gateway.hub)))
    await scheduler.order(load_partition=bench.load(0, blocks))
    await scheduler.wait_for("partition_loaded")
    gateway.hub.update_directory([hello.peer])
    draining = asyncio.ensure_future(agent.drain(5))
    await scheduler.wait_for("drained")
    await gateway.send("a-0", tiny_header("a-0", blocks=[(0, blocks)]), x=rows_of(1))
    await draining
    assert not gateway.frames.empty()
    assert agent.engine.held_batches == 0


async def test_health_and_metrics_are_served_when_asked_for(bench):
    scheduler = await bench.scheduler()
    agent = await bench.agent(scheduler.port, health_port=0, metrics_port=0)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{agent.health_port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service="live"))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        async for answer in stub.Watch(health_pb2.HealthCheckRequest(service="ready")):
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                break
    url = f"http://127.0.0.1:{agent.metrics_port}/metrics"
    page = await asyncio.to_thread(lambda: urllib.request.urlopen(url).read().decode())
    assert "catenary_partitions_loaded 0.0" in page


async def test_an_audit_is_answered_with_everything_that_is_held(bench):
    scheduler = await bench.scheduler()
    await bench.agent(scheduler.port)
    await scheduler.order_when_there(load_partition=bench.load(0, 2))
    await scheduler.wait_for("partition_loaded")
    asked = scheduler_pb2.ReportHoldings(number=41)
    await scheduler.order(report_holdings=asked)
    [answer] = await scheduler.wait_for("holdings")
    assert answer.number == 41
    assert [each.key for each in answer.partitions] == [bench.key(0, 2)]
    assert answer.partitions[0].memory_bytes > 0
    assert not answer.batches
    assert not answer.sessions
