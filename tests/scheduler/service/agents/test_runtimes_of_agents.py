"""Agents whose runtime cannot load a model are never asked to, and `status` says why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from catenary_protos.catenary.v1 import admin_pb2
from catenary_scheduler.settings import SchedulerSettings
from catenary_services.domain.decoder import DecoderRuntime
from scheduler_harness import (
    LLM,
    AgentScript,
    Crowd,
    add_decoder,
    operated,
    scheduler,
    until,
)

Configured = Callable[..., SchedulerSettings]
WHY = "it runs decoders with ONNX Runtime, and the model was imported for GPUs"


@pytest.fixture
def for_gpus(tmp_path: Path) -> None:
    add_decoder(tmp_path / "models", target="gpu")


@pytest.mark.usefixtures("for_gpus")
async def test_a_model_for_gpus_is_served_beside_agents_that_cannot_load_it(
    configured: Configured, crowd: Crowd
) -> None:
    values = configured(models=["toy", "llm"], expected_agents=2)
    async with operated(values) as (process, stub):
        gateway = await crowd.gateway(process.port)
        on_cpu = await crowd.agent(
            process.port, "agent-0", AgentScript(runtime=DecoderRuntime.ONNX)
        )
        on_gpu = await crowd.agent(
            process.port, "agent-1", AgentScript(runtime=DecoderRuntime.TORCH_BFLOAT16)
        )
        await until(lambda: gateway.serves("llm") and gateway.serves("toy"), "both are served")
        await until(lambda: on_cpu.loaded, "the other model is for everybody")
        orders = [order.key.model for order in on_cpu.all("load_partition")]
        assert orders
        assert "llm" not in orders
        ordered = on_gpu.all("load_partition")
        assert "llm" in [order.key.model for order in ordered]
        await gateway.submit_session(1)
        start = await gateway.started(1)
        assert {hop.agent_id for hop in start.route} == {"agent-1"}
        status = await stub.GetStatus(admin_pb2.GetStatusRequest())
        said = {each.agent_id: list(each.impairments) for each in status.agents}
        (impairment,) = said["agent-0"]
        assert (impairment.kind, impairment.partition) == ("cannot_load", str(LLM))
        assert impairment.why.startswith(WHY)
        assert impairment.remaining_ns == 0
        assert not said["agent-1"]
        plan = await stub.GetPlan(admin_pb2.GetPlanRequest())
        assert f"llm:1: agent-0 cannot load it: {WHY}" in str(plan)


@pytest.mark.usefixtures("for_gpus")
async def test_where_nobody_can_load_a_model_its_reason_names_them(
    configured: Configured, crowd: Crowd
) -> None:
    async with scheduler(configured(models=["llm"])) as process:
        gateway = await crowd.gateway(process.port)
        alone = await crowd.agent(process.port, "agent-0", AgentScript(runtime=DecoderRuntime.ONNX))

        def reason() -> str:
            model = gateway.model("llm")
            return model.not_ready_reason if model is not None else ""

        await until(lambda: f"agent-0 cannot load it: {WHY}" in reason(), "the reason")
        assert not alone.all("load_partition")
        await crowd.agent(
            process.port, "agent-1", AgentScript(runtime=DecoderRuntime.TORCH_FLOAT32)
        )
        await until(lambda: gateway.serves("llm"), "somebody came who can")
        assert not alone.all("load_partition")
