from __future__ import annotations

import json
from collections.abc import Callable

from catenary_protos.catenary.v1 import admin_pb2, scheduler_pb2
from catenary_scheduler.settings import SchedulerSettings
from chain_harness import RING, serving
from scheduler_harness import MS, AgentScript, Crowd, operated

Configured = Callable[..., SchedulerSettings]
TWO_STAGES = {
    "models": [
        {
            "name": "toy",
            "pipelines": [
                {
                    "batch": 2,
                    "partitions": [
                        {"blocks": [0, 2], "agents": ["agent-0"]},
                        {"blocks": [2, 4], "agents": ["agent-1"]},
                    ],
                }
            ],
        }
    ]
}


def lines_of(
    answer: admin_pb2.GetTimelinesResponse,
) -> dict[tuple[str, str], list[admin_pb2.Booking]]:
    return {(line.kind, line.owner): list(line.bookings) for line in answer.resources}


async def test_timelines_show_what_was_booked_and_what_really_was(
    configured: Configured, crowd: Crowd
) -> None:
    async with operated(configured(expected_agents=2)) as (process, stub):
        gateway, agents = await crowd.serving(process.port, agents=2)
        await stub.ApplyPlan(
            admin_pb2.ApplyPlanRequest(plan_json=json.dumps(TWO_STAGES)), timeout=10
        )
        idle = lines_of(await stub.GetTimelines(admin_pb2.GetTimelinesRequest()))
        assert set(idle) == {
            (kind, f"agent-{i}") for kind in ("gpu", "uplink", "downlink") for i in range(2)
        }
        assert not any(idle.values())

        await gateway.submit(1, budget_ns=1_500 * MS)
        order = await gateway.dispatched(1)
        booked = lines_of(await stub.GetTimelines(admin_pb2.GetTimelinesRequest()))
        first, second = booked["gpu", "agent-0"][0], booked["gpu", "agent-1"][0]
        sent, got = booked["uplink", "agent-0"][0], booked["downlink", "agent-1"][0]
        assert sent == got
        assert not booked["downlink", "agent-0"]
        assert (first.batch_id, first.model, first.rows) == (order.batch_id, "toy:1", 1)
        assert first.booked_start_ns < first.booked_end_ns <= sent.booked_start_ns
        assert sent.booked_end_ns <= second.booked_start_ns
        assert (first.real_start_ns, first.real_end_ns) == (0, 0)

        report = scheduler_pb2.StageReport(
            batch_id=order.batch_id,
            position=1,
            compute_ended_ago_ns=MS,
            compute_ns=3 * MS,
            transfer_ended_ago_ns=5 * MS,
            transfer_ns=2 * MS,
            rows=1,
        )
        await agents[1].send(scheduler_pb2.AgentMessage(stage_report=report))

        async def reported() -> dict[tuple[str, str], list[admin_pb2.Booking]]:
            while True:
                found = lines_of(await stub.GetTimelines(admin_pb2.GetTimelinesRequest()))
                if found["gpu", "agent-1"][0].real_end_ns:
                    return found

        real = await reported()
        done, moved = real["gpu", "agent-1"][0], real["uplink", "agent-0"][0]
        assert done.real_end_ns - done.real_start_ns == 3 * MS
        assert moved.real_end_ns - moved.real_start_ns == 2 * MS
        assert done.real_start_ns - moved.real_end_ns == MS
        assert done.booked_end_ns - done.booked_start_ns == (
            second.booked_end_ns - second.booked_start_ns
        )


async def test_generating_is_shown_as_it_was_reported(configured: Configured, crowd: Crowd) -> None:
    async with operated(configured()) as (process, stub):
        _, (agent,) = await crowd.serving(process.port)
        report = scheduler_pb2.GenerationReport(
            key=scheduler_pb2.PartitionKey(
                model="llm", model_version="1", first_block=0, last_block=6
            ),
            decode_steps=4,
            decode_rows=4,
            decode_ns=30 * MS,
            prefill_ns=10 * MS,
            cached_block_tokens=7,
        )
        await agent.send(scheduler_pb2.AgentMessage(generation_report=report))

        async def shown() -> admin_pb2.Booking:
            while True:
                found = lines_of(await stub.GetTimelines(admin_pb2.GetTimelinesRequest()))
                if found["gpu", "agent-0"]:
                    return found["gpu", "agent-0"][0]

        busy = await shown()
        assert (busy.batch_id, busy.model) == (0, "llm:1")
        assert busy.real_end_ns - busy.real_start_ns == 40 * MS
        assert (busy.booked_start_ns, busy.booked_end_ns) == (0, 0)


async def test_status_says_how_agents_keep_up_with_what_is_booked(
    configured: Configured, crowd: Crowd
) -> None:
    async with operated(configured()) as (process, stub):
        gateway, (agent,) = await crowd.serving(process.port)
        for number in range(1, 5):
            await gateway.submit(number)
            order = await gateway.dispatched(number)
            status = (await stub.GetStatus(admin_pb2.GetStatusRequest())).agents[0]
            assert status.batches == 1
            booked_ns = order.route[0].reserved_duration_ns
            report = scheduler_pb2.StageReport(
                batch_id=order.batch_id, position=0, compute_ns=3 * booked_ns, rows=1
            )
            await agent.send(scheduler_pb2.AgentMessage(stage_report=report))
            finished = scheduler_pb2.RequestFinished(request_id=number)
            await gateway.send(scheduler_pb2.GatewayMessage(finished=finished))

        async def slow() -> admin_pb2.AgentStatus:
            while True:
                found = (await stub.GetStatus(admin_pb2.GetStatusRequest())).agents[0]
                if found.slowdown_ratio and not found.batches:
                    return found

        found = await slow()
        assert 2.9 < found.slowdown_ratio < 3.1
        assert found.server_id == "agent-0"
        assert found.used_memory_bytes == 8
        model = (await stub.GetStatus(admin_pb2.GetStatusRequest())).models[0]
        assert [
            (line.batch, [(s.first_block, s.last_block, list(s.agent_ids)) for s in line.stages])
            for line in model.pipelines_served
        ] == [(4, [(0, 4, ["agent-0"])])]
        promise = (await stub.GetPlan(admin_pb2.GetPlanRequest())).promises[0]
        assert (promise.model, promise.slo_ns) == ("toy", 2_000 * MS)
        assert promise.throughput_per_s == 4 / 0.002
        assert promise.latency_ns == 2 * MS
        assert promise.binds == "computing blocks 0 to 3 on agent-0"


async def test_a_plan_of_chains_promises_sessions_and_bounds(
    generating: Configured, crowd: Crowd
) -> None:
    settings = generating(plan=RING)
    async with operated(settings) as (process, stub):
        await serving(process, crowd, AgentScript(), AgentScript())
        promise = (await stub.GetPlan(admin_pb2.GetPlanRequest())).promises[0]
        chain = (await stub.GetStatus(admin_pb2.GetStatusRequest())).models[0].chains[0]
        assert (promise.model, promise.sessions) == ("llm", chain.capacity)
        assert promise.throughput_per_s == chain.capacity * 1e9 / chain.service_ns
        # A session takes at least as long as alone; at most as long as the bounds of the paper say.
        assert chain.service_ns <= promise.response_lower_ns <= promise.response_upper_ns
        status = (await stub.GetStatus(admin_pb2.GetStatusRequest())).models[0]
        assert status.attainment_ratio == -1
