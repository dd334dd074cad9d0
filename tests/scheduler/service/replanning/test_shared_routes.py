"""A burst of one model on the agents of another, with scripted agents over real gRPC."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from catenary_protos.catenary.v1 import admin_pb2
from catenary_scheduler.settings import SchedulerSettings
from catenary_services.domain.ids import ModelKey
from scheduler_harness import MS, AgentScript, Crowd, add_model, operated, until

Configured = Callable[..., SchedulerSettings]
OTHER = ModelKey("other", "1")
COMPUTE_MS, BUDGET_MS = 500, 900


def pipeline(agent: str, blocks: int, **more: Any) -> dict[str, Any]:
    return {"batch": 1, "partitions": [{"blocks": [0, blocks], "agents": [agent]}], **more}


PLAN = {
    "models": [
        {
            "name": "toy",
            "pipelines": [pipeline("agent-0", 4), pipeline("agent-1", 4, shared=True)],
        },
        {"name": "other", "pipelines": [pipeline("agent-1", 3)]},
    ]
}


async def test_a_burst_of_one_model_is_served_by_agents_of_another(
    configured: Configured, crowd: Crowd, tmp_path: Path
) -> None:
    add_model(tmp_path / "models", OTHER, blocks=3)
    script = AgentScript(compute_ns=COMPUTE_MS * MS)
    values = configured(models=["toy", "other"], protected_share=0.0)
    async with operated(values) as (process, stub):
        gateway, (own, host) = await crowd.serving(process.port, script, script)
        asked = admin_pb2.ApplyPlanRequest(plan_json=json.dumps(PLAN))
        await stub.ApplyPlan(asked, timeout=20)
        await until(lambda: gateway.serves("toy") and gateway.serves("other"), "both serve")
        assert {order.key.model for order in host.all("load_partition")} == {"toy", "other"}
        shown = await stub.GetPlan(admin_pb2.GetPlanRequest())
        assert "Shared route 2, batches of up to 1:" in shown.explanation
        assert json.loads(shown.plan_json)["models"][0]["pipelines"][1]["shared"] is True

        # Guests get the time that an owner leaves: it has to leave some first.
        await asyncio.sleep(1.5 * COMPUTE_MS / 1e3)
        for number in (1, 2):
            await gateway.submit(number, budget_ns=BUDGET_MS * MS)
        routes = [(await gateway.dispatched(number)).route for number in (1, 2)]
        assert [hop.agent_id for (hop,) in routes] == [own.name, host.name]
        assert [hop.model for (hop,) in routes] == ["toy", "toy"]
        await gateway.submit(3, model="other")
        (hop,) = (await gateway.dispatched(3)).route
        assert (hop.agent_id, hop.model) == (host.name, "other")


async def test_a_guest_that_is_loaded_later_is_served_from_then_on(
    configured: Configured, crowd: Crowd, tmp_path: Path
) -> None:
    add_model(tmp_path / "models", OTHER, blocks=3)
    lacking = AgentScript(lacks={"toy"})
    async with operated(configured(models=["toy", "other"])) as (process, stub):
        gateway = await crowd.gateway(process.port)
        await crowd.agent(process.port, "agent-0")
        host = await crowd.agent(process.port, "agent-1", lacking)
        await until(lambda: gateway.serves("toy") and gateway.serves("other"), "both serve")
        asked = admin_pb2.ApplyPlanRequest(plan_json=json.dumps(PLAN))
        await stub.ApplyPlan(asked, timeout=20)
        shown = await stub.GetPlan(admin_pb2.GetPlanRequest())
        assert "Shared route" not in shown.explanation
        lacking.lacks.clear()

        def is_loaded() -> bool:
            active = process.leader().cluster.active
            routes = [len(model.pipelines) for model in active.plan.models] if active else []
            return routes == [2, 1]

        await until(is_loaded, "the guest is part of the plan")
        assert {order.key.model for order in host.all("load_partition")} == {"toy", "other"}
