from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from catenary_protos.catenary.v1 import admin_pb2, common_pb2
from catenary_scheduler.dispatch.availability import Impairment
from catenary_scheduler.planning.requirements import agents_of
from catenary_scheduler.settings import SchedulerSettings
from catenary_services.domain.ids import AgentId, ModelKey
from scheduler_harness import MS, AgentScript, Crowd, add_model, admin, operated, scheduler, until

Configured = Callable[..., SchedulerSettings]
POOL = {
    "models": [
        {
            "name": "toy",
            "pipelines": [
                {"batch": 2, "partitions": [{"blocks": [0, 4], "agents": ["agent-0", "agent-1"]}]}
            ],
        }
    ]
}


async def test_status_and_plan_of_a_running_cluster(configured: Configured, crowd: Crowd) -> None:
    async with operated(configured()) as (process, stub):
        gateway = await crowd.gateway(process.port)
        await crowd.agent(process.port, "agent-0")
        with pytest.raises(grpc.aio.AioRpcError) as none_yet:
            await stub.GetPlan(admin_pb2.GetPlanRequest())
        assert none_yet.value.code() == grpc.StatusCode.FAILED_PRECONDITION
        await until(lambda: gateway.ready, "ready")
        await gateway.submit(1)
        await gateway.dispatched(1)
        status = await stub.GetStatus(admin_pb2.GetStatusRequest())
        assert (status.scheduler_id, status.epoch, status.plan_id) == (
            "scheduler-0",
            1,
            "plan-1-1",
        )
        assert [(a.agent_id, a.state, list(a.partitions)) for a in status.agents] == [
            ("agent-0", "ready", ["toy:1[0,4)"])
        ]
        assert [(m.name, m.ready, m.pipelines) for m in status.models] == [("toy", True, 1)]
        assert list(status.gateways) == ["gateway-0"]
        assert (status.batches_in_flight, status.live_reservations) == (1, 1)
        assert status.redis_connected
        answer = await stub.GetPlan(admin_pb2.GetPlanRequest())
        assert json.loads(answer.plan_json)["models"][0]["name"] == "toy"
        assert "blocks 0 to 3 on agent-0" in answer.explanation


async def test_status_has_what_agents_tell_of_their_devices(
    configured: Configured, crowd: Crowd
) -> None:
    facts = common_pb2.DeviceFacts(name="NVIDIA L4", total_bytes=24 * 10**9, driver="580.65.06")
    async with scheduler(configured(expected_agents=2)) as process, admin(process.port) as stub:
        await crowd.agent(process.port, "agent-0", AgentScript(device_facts=facts))
        await crowd.agent(process.port, "agent-1")
        told, older = (await stub.GetStatus(admin_pb2.GetStatusRequest())).agents
        assert told.device_facts == facts
        assert not older.HasField("device_facts")


async def test_a_plan_is_applied_and_taken_back(configured: Configured, crowd: Crowd) -> None:
    async with operated(configured(expected_agents=2)) as (process, stub):
        _, agents = await crowd.serving(process.port, agents=2)
        answer = await stub.ApplyPlan(
            admin_pb2.ApplyPlanRequest(plan_json=json.dumps(POOL)), timeout=10
        )
        assert answer.plan_id == "plan-1-2"
        assert all((0, 4) in agent.loaded for agent in agents)
        answer = await stub.ApplyPlan(admin_pb2.ApplyPlanRequest(), timeout=10)
        assert answer.plan_id == "plan-1-3"
        other_type = {"models": [{**POOL["models"][0], "float16_boundaries": False}]}
        with pytest.raises(grpc.aio.AioRpcError, match="float16_boundaries"):
            await stub.ApplyPlan(admin_pb2.ApplyPlanRequest(plan_json=json.dumps(other_type)))
        with pytest.raises(grpc.aio.AioRpcError) as wrong:
            await stub.ApplyPlan(admin_pb2.ApplyPlanRequest(plan_json='{"models": [1]}'))
        assert wrong.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "models[0]" in (wrong.value.details() or "")


async def test_a_plan_given_by_hand_says_who_is_idle_in_it(
    configured: Configured, crowd: Crowd
) -> None:
    async with operated(configured(expected_agents=2)) as (process, stub):
        await crowd.serving(process.port, agents=2)
        pool = {"batch": 2, "partitions": [{"blocks": [0, 4], "agents": ["agent-0"]}]}
        text = json.dumps({"models": [{"name": "toy", "pipelines": [pool]}]})
        await stub.ApplyPlan(admin_pb2.ApplyPlanRequest(plan_json=text), timeout=10)
        answer = await stub.GetPlan(admin_pb2.GetPlanRequest())
        assert "agent-1 is idle: the plan does not name it" in answer.explanation
        assert "agent-0 is idle" not in answer.explanation


async def test_agents_that_the_planner_goes_without_are_told_why(
    configured: Configured, crowd: Crowd
) -> None:
    values = configured(expected_agents=3, replan_after_s=0.1)
    async with operated(values) as (process, stub):
        _, (_, lost, _) = await crowd.serving(process.port, agents=3)
        leader = process.leader()
        drained = await stub.DrainAgent(admin_pb2.DrainAgentRequest(agent_id="agent-2"), timeout=10)
        assert drained.drained
        await lost.close()

        def used() -> set[str]:
            active = leader.cluster.active
            return agents_of(active.placement) if active is not None else set()

        await until(lambda: used() == {"agent-0"}, "a plan without them")
        await leader.planner.close()  # so that no plan is made with who comes now
        for name in ("agent-3", "agent-4"):
            await crowd.agent(process.port, name)
        await until(lambda: len(leader.cluster.registry) == 5, "they are there")
        leader.availability.impair(AgentId("agent-4"), Impairment.BROKEN, why="its device failed")
        told = (await stub.GetPlan(admin_pb2.GetPlanRequest())).explanation.splitlines()
        assert [line for line in told if " is idle: " in line] == [
            "agent-1 is idle: the cluster does not hear it.",
            "agent-2 is idle: it is draining.",
            "agent-3 is idle: it joined after the plan was made.",
            "agent-4 is idle: it is broken: its device failed.",
        ]


async def test_a_plan_that_waits_for_an_agent_says_so(configured: Configured, crowd: Crowd) -> None:
    async with operated(configured()) as (process, stub):
        await crowd.agent(process.port, "agent-0")
        with pytest.raises(grpc.aio.AioRpcError) as late:
            await stub.ApplyPlan(
                admin_pb2.ApplyPlanRequest(plan_json=json.dumps(POOL)), timeout=0.7
            )
        assert late.value.code() == grpc.StatusCode.UNAVAILABLE
        assert "agent-1" in (late.value.details() or "")


async def test_a_model_is_deployed_at_run_time(
    configured: Configured, crowd: Crowd, tmp_path: Path
) -> None:
    async with operated(configured()) as (process, stub):
        gateway = await crowd.gateway(process.port)
        await crowd.agent(process.port, "agent-0")
        add_model(tmp_path / "models", ModelKey("late", "3"))
        request = admin_pb2.DeployModelRequest(model="late", slo_ns=123_000_000, max_batch=2)
        await stub.DeployModel(request, timeout=10)
        # The answer and the gateway's table travel on two streams: either may be first.
        await until(lambda: (late := gateway.model("late")) and late.ready, "it is ready")
        late = gateway.model("late")
        assert late is not None
        assert (late.version, late.default_slo_ns) == ("3", 123_000_000)
        with pytest.raises(grpc.aio.AioRpcError) as absent:
            await stub.DeployModel(admin_pb2.DeployModelRequest(model="ghost"))
        assert absent.value.code() == grpc.StatusCode.NOT_FOUND


async def test_what_sessions_are_moved_for_is_said_when_the_model_is_deployed(
    generating: Configured, crowd: Crowd
) -> None:
    async with operated(generating(max_agents=2)) as (process, stub):
        await crowd.gateway(process.port)
        await crowd.agent(process.port, "agent-0")

        async def goal() -> str:
            plan = await stub.GetPlan(admin_pb2.GetPlanRequest())
            return str(json.loads(plan.plan_json)["models"][0]["packing"])

        def is_served() -> bool:
            return process.leader().cluster.is_ready(ModelKey("llm", "1"))

        await until(is_served, "it is served")
        assert await goal() == "pack"  # agents may be given back
        for wanted in ("balance", "off"):
            request = admin_pb2.DeployModelRequest(model="llm", packing=wanted)
            await stub.DeployModel(request, timeout=10)
            assert await goal() == wanted
        explained = (await stub.GetPlan(admin_pb2.GetPlanRequest())).explanation
        assert "moved onto few chains" not in explained
        with pytest.raises(grpc.aio.AioRpcError) as wrong:
            await stub.DeployModel(admin_pb2.DeployModelRequest(model="llm", packing="tight"))
        assert wrong.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "packing" in wrong.value.details()


async def test_a_draining_agent_finishes_and_gets_nothing_new(
    configured: Configured, crowd: Crowd, tmp_path: Path
) -> None:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(POOL))
    async with operated(configured(plan_file=file)) as (process, stub):
        gateway = await crowd.gateway(process.port)
        slow_ones = AgentScript(compute_ns=300 * MS)
        agents = {
            name: await crowd.agent(process.port, name, slow_ones)
            for name in ("agent-0", "agent-1")
        }
        await until(lambda: gateway.ready, "ready")
        await gateway.submit(1)
        batch = await gateway.dispatched(1)
        busy = batch.route[0].agent_id
        slow = await stub.DrainAgent(admin_pb2.DrainAgentRequest(agent_id=busy), timeout=0.3)
        assert not slow.drained
        assert not agents[busy].all("drain")
        for number in range(2, 4):
            await gateway.submit(number)
            assert (await gateway.dispatched(number)).route[0].agent_id != busy
        await agents[busy].report(batch.batch_id, 0)
        done = await stub.DrainAgent(admin_pb2.DrainAgentRequest(agent_id=busy), timeout=5)
        assert done.drained
        await until(lambda: agents[busy].all("drain"), "it is told")
        assert gateway.ready
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await stub.DrainAgent(admin_pb2.DrainAgentRequest(agent_id="nobody"))
        assert unknown.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_traces_are_elsewhere_and_health_says_who_leads(configured: Configured) -> None:
    async with (
        scheduler(configured()) as leader,
        scheduler(configured(scheduler_id="standby")) as standby,
        admin(leader.port) as stub,
        grpc.aio.insecure_channel(f"127.0.0.1:{standby.port}") as channel,
        grpc.aio.insecure_channel(f"127.0.0.1:{leader.port}") as leading,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as trace:
            await stub.GetTrace(admin_pb2.GetTraceRequest())
        assert trace.value.code() == grpc.StatusCode.UNIMPLEMENTED
        request = health_pb2.HealthCheckRequest(service="catenary.v1.Scheduler")
        health = await health_pb2_grpc.HealthStub(channel).Check(request)
        assert health.status == health_pb2.HealthCheckResponse.NOT_SERVING
        health = await health_pb2_grpc.HealthStub(leading).Check(request)
        assert health.status == health_pb2.HealthCheckResponse.SERVING
