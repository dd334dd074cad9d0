from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from catenary_protos.catenary.v1 import common_pb2, scheduler_pb2
from catenary_scheduler.settings import SchedulerSettings
from scheduler_harness import CUT_IN_TWO, MS, AgentScript, Crowd, scheduler, until

Configured = Callable[..., SchedulerSettings]


async def test_agents_load_what_the_plan_says_and_requests_are_dispatched(
    configured: Configured, crowd: Crowd, tmp_path: Path
) -> None:
    async with scheduler(configured(plan=CUT_IN_TWO)) as process:
        gateway, agents = await crowd.serving(process.port, agents=2)
        model = gateway.model()
        assert model is not None
        assert (model.inputs[0].name, list(model.inputs[0].shape)) == ("x", [-1, 16])
        assert model.batched
        await gateway.submit(1)
        batch = await gateway.dispatched(1)
        assert batch.epoch == 1
        assert batch.batch_id >> 40 == 1
        assert {hop.agent_id for hop in batch.route} == {"agent-0", "agent-1"}
        assert batch.expected_after_ns > 0
        order = agents[0].all("load_partition")[0]
        assert order.block_table_hash == "0" * 64
        assert order.float16_boundaries
        await gateway.finished(1)
        names = {peer.peer_id for peer in agents[0].all("directory")[-1].peers}
        await until(lambda: {"gateway-0", "agent-0", "agent-1"} <= names, "directory")


async def test_a_batch_of_two_gateways_is_sent_to_both(
    configured: Configured, crowd: Crowd
) -> None:
    async with scheduler(configured()) as process:
        first = await crowd.gateway(process.port, "gateway-0")
        second = await crowd.gateway(process.port, "gateway-1")
        await crowd.agent(process.port, "agent-0", AgentScript(compute_ns=30 * MS))
        await until(lambda: first.ready and second.ready, "ready")
        await first.submit(1)  # occupies the only agent, so that the next ones are batched
        await first.dispatched(1)
        await first.submit(2)
        await second.submit(2)
        ours, theirs = await first.dispatched(2), await second.dispatched(2)
        assert ours.batch_id == theirs.batch_id
        assert ours.batch_rows == 2
        rows = sorted(s.batch_row for batch in (ours, theirs) for s in batch.slices)
        assert rows == [0, 1]
        assert {s.gateway_id for s in ours.slices} == {"gateway-0"}


async def test_what_cannot_meet_its_deadline_is_refused_with_advice(
    configured: Configured, crowd: Crowd
) -> None:
    async with scheduler(configured()) as process:
        gateway, _ = await crowd.serving(process.port, AgentScript(compute_ns=100 * MS))
        await gateway.submit(1, budget_ns=20 * MS)
        refusal = await gateway.rejected(1)
        assert refusal.failure.reason == "SLO_UNATTAINABLE"
        assert 50 * MS < refusal.earliest_finish_after_ns < 500 * MS


async def test_unknown_models_are_refused(configured: Configured, crowd: Crowd) -> None:
    async with scheduler(configured()) as process:
        gateway = await crowd.gateway(process.port)
        await gateway.submit(1, model="nobody-knows")
        assert (await gateway.rejected(1)).failure.reason == "MODEL_NOT_FOUND"


async def test_requests_wait_for_a_model_that_loads(configured: Configured, crowd: Crowd) -> None:
    async with scheduler(configured()) as process:
        gateway = await crowd.gateway(process.port)
        await gateway.submit(1)
        await until(lambda: len(process.leader().waiting.requests) == 1, "the request waits")
        await crowd.agent(process.port, "agent-0")
        await gateway.dispatched(1)


async def test_waiting_ends_with_a_stated_error(configured: Configured, crowd: Crowd) -> None:
    async with scheduler(configured(max_waiting_requests=1)) as process:
        gateway = await crowd.gateway(process.port)
        await gateway.submit(1, budget_ns=100 * MS)
        await gateway.submit(2)
        assert (await gateway.rejected(2)).failure.reason == "OVERLOADED"
        refusal = await gateway.rejected(1)
        assert refusal.failure.reason == "UNAVAILABLE"
        assert "0 of 1 expected agents" in refusal.failure.message
        assert refusal.retry_after_ns > 0


async def test_a_lost_agent_costs_no_request(configured: Configured, crowd: Crowd) -> None:
    async with scheduler(configured(expected_agents=2)) as process:
        gateway = await crowd.gateway(process.port)
        agents = {f"agent-{i}": await crowd.agent(process.port, f"agent-{i}") for i in range(2)}
        # Both agents host the whole model: one partition, one pool.
        placement = (
            '{"models": [{"name": "toy", "pipelines": [{"batch": 1, "partitions":'
            ' [{"blocks": [0, 4], "agents": ["agent-0", "agent-1"]}]}]}]}'
        )
        from catenary_scheduler.admin.operations import apply_plan

        await apply_plan(process.leader(), placement, 10.0)
        await until(lambda: gateway.ready, "ready")
        await gateway.submit(1)
        first = await gateway.dispatched(1)
        await agents[first.route[0].agent_id].close()
        second = await gateway.dispatched(1, times=2)
        assert second.batch_id != first.batch_id
        assert second.route[0].agent_id != first.route[0].agent_id
        assert gateway.ready


async def test_a_failed_batch_is_dispatched_again_and_a_hopeless_one_is_not(
    configured: Configured, crowd: Crowd
) -> None:
    async with scheduler(configured()) as process:
        gateway, (agent,) = await crowd.serving(process.port)
        await gateway.submit(1)
        batch = await gateway.dispatched(1)
        failure = common_pb2.Failure(reason="OVERLOADED", message="full", retryable=True)
        failed = scheduler_pb2.BatchFailed(batch_id=batch.batch_id, failure=failure)
        await agent.send(scheduler_pb2.AgentMessage(batch_failed=failed))
        again = await gateway.dispatched(1, times=2)
        delivery = scheduler_pb2.DeliveryFailed(
            batch_id=again.batch_id,
            failure=common_pb2.Failure(reason="INVALID_INPUT", message="x: wrong shape"),
        )
        await gateway.send(scheduler_pb2.GatewayMessage(delivery_failed=delivery))
        refusal = await gateway.rejected(1)
        assert refusal.failure.message == "x: wrong shape"


async def test_reports_of_the_last_hop_end_a_batch(configured: Configured, crowd: Crowd) -> None:
    async with scheduler(configured()) as process:
        gateway, (agent,) = await crowd.serving(process.port)
        await gateway.submit(1)
        batch = await gateway.dispatched(1)
        assert len(process.leader().in_flight) == 1
        for position in range(len(batch.route)):
            await agent.report(batch.batch_id, position)
        await gateway.finished(1)
        await until(lambda: len(process.leader().in_flight) == 0, "the batch is over")
        await until(lambda: not process.leader().gateways.gateways["gateway-0"].open, "forgotten")


async def test_a_silent_agent_is_lost_and_a_heartbeat_keeps_it(
    configured: Configured, crowd: Crowd
) -> None:
    async with scheduler(configured(silence_s=0.5)) as process:
        _, (agent,) = await crowd.serving(process.port)
        await until(lambda: agent.ended, "its session is ended")
        assert agent.status == "UNAVAILABLE"
        assert agent.all("heartbeat")


async def test_a_newer_session_of_an_agent_replaces_the_old_one(
    configured: Configured, crowd: Crowd
) -> None:
    async with scheduler(configured()) as process:
        gateway, (old,) = await crowd.serving(process.port)
        await gateway.submit(1)
        first = await gateway.dispatched(1)
        new = await crowd.agent(process.port, "agent-0", AgentScript(incarnation=2))
        await until(lambda: old.ended, "the old session is ended")
        second = await gateway.dispatched(1, times=2)
        assert second.batch_id != first.batch_id
        assert new.loaded
        peers = {p.peer_id: p.incarnation for p in gateway.all("directory")[-1].peers}
        assert peers["agent-0"] == 2


async def test_an_agent_of_a_newer_epoch_is_obeyed_after_going_beyond_it(
    configured: Configured, crowd: Crowd
) -> None:
    async with scheduler(configured()) as process:
        early = await crowd.agent(process.port, "agent-0", AgentScript(epoch=7))
        await until(lambda: early.ended, "a stale epoch is not joined")
        assert early.status == "ABORTED"
        await until(lambda: process.leader().epoch == 8, "the epoch is lifted")
        agent = await crowd.agent(process.port, "agent-0", AgentScript(epoch=7))
        await until(lambda: agent.all("load_partition"), "it gets orders")
        orders = [m for m in agent.received if m.WhichOneof("kind") == "load_partition"]
        assert all(order.epoch == 8 for order in orders)


async def test_a_gateway_that_comes_back_resubmits_what_is_open(
    configured: Configured, crowd: Crowd
) -> None:
    async with scheduler(configured()) as process:
        gateway, _ = await crowd.serving(process.port)
        await gateway.submit(1)
        await gateway.submit(2)
        known, unheard = await gateway.dispatched(1), await gateway.dispatched(2)
        await gateway.close()
        back = await crowd.gateway(process.port)
        in_flight = scheduler_pb2.InFlight(
            batch_id=known.batch_id, request_row=0, rows=1, expected_after_ns=500 * MS
        )
        await back.submit(1, in_flight=[in_flight])
        await back.submit(2)
        again = await back.dispatched(2)
        assert again.batch_id != unheard.batch_id
        assert not back.dispatches(1)


async def test_a_restarted_gateway_leaves_nothing_behind(
    configured: Configured, crowd: Crowd
) -> None:
    async with scheduler(configured()) as process:
        gateway, (agent,) = await crowd.serving(process.port)
        await gateway.submit(1)
        batch = await gateway.dispatched(1)
        await crowd.gateway(process.port, incarnation=2)

        def cancelled() -> bool:
            return any(batch.batch_id in c.batch_ids for c in agent.all("cancel_batch"))

        await until(cancelled, "the agent may forget the batch")
        assert process.leader().dispatcher.statistics()["open_requests"] == 0


@pytest.mark.parametrize("messages", [[], [scheduler_pb2.GatewayMessage()]])
async def test_a_stream_without_hello_is_refused(
    configured: Configured, crowd: Crowd, messages: list[scheduler_pb2.GatewayMessage]
) -> None:
    async with scheduler(configured()) as process:
        gateway = await crowd.gateway(process.port)
        gateway_without = type(gateway)(process.port)
        gateway_without._hello = tuple(messages)
        await gateway_without.start()
        await until(lambda: gateway_without.ended, "refused")
        assert gateway_without.status == "INVALID_ARGUMENT"
        await gateway_without.close()
