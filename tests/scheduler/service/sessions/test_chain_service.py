"""Generation over chains: scripted agents and gateways, over real gRPC."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import grpc.aio
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from catenary_protos.catenary.v1 import admin_pb2, scheduler_pb2
from catenary_scheduler.process import SchedulerProcess
from catenary_scheduler.settings import SchedulerSettings
from catenary_services.domain.ids import AgentId
from catenary_services.telemetry.metrics import Metrics
from catenary_services.telemetry.tracing import TraceContext, Tracer
from chain_harness import chains, nothing_is_left, request, route, serving
from scheduler_harness import (
    LLM,
    MS,
    SESSION_TOKENS,
    AgentScript,
    Crowd,
    operated,
    scheduler,
    until,
)

Configured = Callable[..., SchedulerSettings]


async def test_chains_are_composed_loaded_and_given_to_sessions(
    generating: Configured, crowd: Crowd
) -> None:
    async with operated(generating(expected_agents=2)) as (process, stub):
        gateway, agents = await serving(process, crowd, AgentScript(), AgentScript())
        model = gateway.model("llm")
        assert model is not None
        assert model.generates
        assert (model.session_tokens, model.platform) == (SESSION_TOKENS, "decoder")
        # Each has room for the whole model: two chains of one agent, for as many sessions as the
        # manifest says.
        for agent in agents:
            order = agent.all("load_partition")[0]
            assert (order.key.first_block, order.key.last_block) == (0, 6)
            assert order.cache.block_slots == 4 * 6
            assert list(order.cache.entry_blocks) == [0]
            assert order.max_batch == 4
        for number in range(8):
            await gateway.submit_session(number)
        starts = [await gateway.started(number) for number in range(8)]
        assert {start.session_id >> 40 for start in starts} == {1}
        assert {start.plan_id for start in starts} == {"plan-1-1"}
        await gateway.submit_session(8)
        status = await stub.GetStatus(admin_pb2.GetStatusRequest())
        (served,) = status.models
        assert (status.sessions_in_flight, served.sessions, served.queued_requests) == (8, 8, 1)
        assert [(c.capacity, c.sessions) for c in served.chains] == [(4, 4), (4, 4)]
        assert served.chains[0].service_ns > 0
        assert not gateway.starts(8)
        await gateway.finished(0)
        await gateway.started(8)  # who waits gets the slots, and only when they are free
        assert any(agent.told_to_close(starts[0].session_id) for agent in agents)
        for number in range(1, 9):
            await gateway.finished(number)
        await nothing_is_left(process)
        shown = await stub.GetPlan(admin_pb2.GetPlanRequest())
        assert shown.planner == "chains"
        assert "2 chain(s) over 2 agent(s)" in shown.explanation
        assert "blocks 0 to 5 on agent-0" in shown.explanation


async def test_an_operator_can_ask_for_three_agents_per_chain(
    generating: Configured, crowd: Crowd
) -> None:
    async with operated(generating(expected_agents=3)) as (process, stub):
        gateway, _ = await serving(process, crowd, AgentScript(), AgentScript(), AgentScript())
        spec = admin_pb2.DeployModelRequest(model="llm", partitions=3)
        await stub.DeployModel(spec, timeout=10)
        await gateway.submit_session(1)
        start = await gateway.started(1)
        assert [blocks for _, *blocks in route(start)] == [[0, 2], [2, 4], [4, 6]]
        assert len({agent for agent, _, _ in route(start)}) == 3


async def test_a_plan_file_with_chains_is_served_and_shown_again(
    generating: Configured, crowd: Crowd
) -> None:
    entering = chains((1, [("agent-0", 0, 4, 0), ("agent-1", 2, 6, 4)]))
    async with operated(generating(plan=entering)) as (process, stub):
        gateway, agents = await serving(process, crowd, AgentScript(), AgentScript())
        order = agents[1].all("load_partition")[0]
        assert list(order.cache.entry_blocks) == [2, 4]
        assert order.cache.block_slots == 2
        await gateway.submit_session(1)
        assert route(await gateway.started(1)) == [("agent-0", 0, 4), ("agent-1", 4, 6)]
        shown = await stub.GetPlan(admin_pb2.GetPlanRequest())
        again = json.loads(shown.plan_json)
        answer = await stub.ApplyPlan(request(again), timeout=5)
        assert answer.plan_id == "plan-1-1"  # nothing changed


@pytest.mark.parametrize(
    ("document", "said"),
    [
        (chains((1, [("agent-0", 0, 4, 0)])), "models[0].chains[0].hops"),
        (chains((0, [("agent-0", 0, 6, 0)])), "models[0].chains[0].capacity"),
        (chains((1, [("agent-0", 0, 3, 0), ("agent-1", 4, 6, 4)])), "chains[0].hops[1].blocks"),
        (
            {
                "models": [
                    {
                        "name": "llm",
                        "pipelines": [
                            {"batch": 1, "partitions": [{"blocks": [0, 6], "agents": ["agent-0"]}]}
                        ],
                    }
                ]
            },
            "models[0].pipelines",
        ),
    ],
)
async def test_plans_that_do_not_fit_the_model_are_refused(
    generating: Configured, crowd: Crowd, document: dict[str, Any], said: str
) -> None:
    async with operated(generating()) as (_, stub):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stub.ApplyPlan(request(document), timeout=5)
        assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert said in (error.value.details() or "")


async def test_requests_for_text_and_for_tensors_are_not_mixed_up(
    generating: Configured, crowd: Crowd
) -> None:
    async with scheduler(generating(models=["llm", "toy"])) as process:
        gateway, _ = await serving(process, crowd, AgentScript())
        await until(lambda: gateway.ready, "both are ready")
        await gateway.submit_session(1, model="toy")
        assert (await gateway.rejected(1)).failure.reason == "INVALID_INPUT"
        await gateway.submit(2, model="llm", model_version="")
        assert (await gateway.rejected(2)).failure.reason == "INVALID_INPUT"
        await gateway.submit_session(3, max_tokens=1_000)
        assert (await gateway.rejected(3)).failure.reason == "INVALID_INPUT"
        await gateway.submit_session(4, model="nobody")
        assert (await gateway.rejected(4)).failure.reason == "MODEL_NOT_FOUND"
        await gateway.submit(5)
        await gateway.submit_session(6)
        await gateway.dispatched(5)
        await gateway.started(6)


async def test_without_room_the_reason_is_told_and_who_waits_is_refused(
    generating: Configured, crowd: Crowd
) -> None:
    async with scheduler(generating()) as process:
        gateway = await crowd.gateway(process.port)
        await crowd.agent(process.port, "agent-0", AgentScript(memory_bytes=300))

        def told() -> bool:
            model = gateway.model("llm")
            return model is not None and "llm:1: " in model.not_ready_reason

        await until(told, "the reason is in the model table")
        await gateway.submit_session(1, budget_ns=300 * MS)
        refusal = await gateway.rejected(1)
        assert refusal.failure.reason == "UNAVAILABLE"
        assert refusal.retry_after_ns
        # A second agent makes room enough for both together.
        await crowd.agent(process.port, "agent-1", AgentScript(memory_bytes=10_000))
        await until(lambda: gateway.serves("llm"), "ready")


async def test_capacity_and_use_of_chains_are_metrics_and_starts_are_spans(
    generating: Configured, crowd: Crowd
) -> None:
    exporter = InMemorySpanExporter()
    tracer, metrics = Tracer("catenary-scheduler", "s", exporter=exporter), Metrics()
    process = SchedulerProcess(generating(), metrics=metrics, tracer=tracer)
    try:
        await process.start()
        gateway, _ = await serving(process, crowd, AgentScript())
        sampled = TraceContext(0xABC, 0x12, True)
        await gateway.submit_session(1, traceparent=sampled.traceparent)
        start = await gateway.started(1)
        await gateway.submit_session(2)
        await gateway.started(2)

        def shown(name: str) -> float | None:
            labels = {"model": "llm", "chain": "0"}
            return metrics.registry.get_sample_value(f"catenary_{name}", labels)

        await until(lambda: shown("chain_in_flight") == 2, "two are on it")
        assert shown("chain_capacity") == 4
    finally:
        tracer.force_flush()
        await process.stop()
    (span,) = exporter.get_finished_spans()
    assert span.attributes is not None
    assert span.attributes["catenary.session.id"] == start.session_id
    assert span.attributes["catenary.chain.id"] == "llm:1/0"
    assert span.context is not None
    assert span.context.trace_id == 0xABC


async def test_the_demand_that_agents_and_gateways_tell_of_changes_the_expected_times(
    generating: Configured, crowd: Crowd
) -> None:
    async with scheduler(generating()) as process:
        gateway, (agent,) = await serving(process, crowd, AgentScript())
        usual = process.leader().planner.session_shape(LLM)
        for number in range(40):
            await gateway.submit_session(number, prompt_tokens=50)
            await gateway.started(number)
            await gateway.finished(number)
        key = scheduler_pb2.PartitionKey(model="llm", model_version="1", last_block=6)
        report = scheduler_pb2.GenerationReport(key=key, decode_rows=40 * 20, decode_ns=5 * MS)
        await agent.send(scheduler_pb2.AgentMessage(generation_report=report))

        def shorter() -> bool:
            shape = process.leader().planner.session_shape(LLM)
            return shape.output_tokens < 0.6 * usual.output_tokens

        await until(shorter, "answers are known to be short")
        assert process.leader().planner.session_shape(LLM).prompt_tokens < usual.prompt_tokens / 2
        assert process.leader().utilisation.ratio(AgentId("agent-0")) >= 0.0
