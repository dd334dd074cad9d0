from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from catenary_scheduler.settings import SchedulerSettings
from catenary_services.domain.ids import ModelKey
from catenary_services.errors import CatenaryError, InvalidInput
from scheduler_harness import MS, AgentScript, Crowd, add_model, scheduler, until

Configured = Callable[..., SchedulerSettings]


def plan(*pools: list[str], batch: int = 2) -> dict[str, Any]:
    width = 4 // len(pools)
    partitions = [
        {"blocks": [i * width, (i + 1) * width], "agents": pool} for i, pool in enumerate(pools)
    ]
    return {"models": [{"name": "toy", "pipelines": [{"batch": batch, "partitions": partitions}]}]}


WAITING_FOR_THREE = plan(["agent-0"], ["agent-1", "agent-2"])


async def test_a_plan_file_waits_for_its_agents(configured: Configured, crowd: Crowd) -> None:
    async with scheduler(configured(plan=WAITING_FOR_THREE)) as process:
        gateway = await crowd.gateway(process.port)
        agents = [await crowd.agent(process.port, f"agent-{i}") for i in range(2)]
        await until(lambda: all(agent.loaded for agent in agents), "loaded")

        def waits() -> bool:
            model = gateway.model()
            return model is not None and model.not_ready_reason == "waiting for agent-2"

        await until(waits, "the table says for whom")
        agents.append(await crowd.agent(process.port, "agent-2"))
        await until(lambda: gateway.ready, "ready")
        assert [list(agent.loaded) for agent in agents] == [[(0, 2)], [(2, 4)], [(2, 4)]]
        assert agents[0].all("load_partition")[0].max_batch == 2


async def test_a_restarted_agent_loads_again_and_joins_its_pool(
    configured: Configured, crowd: Crowd
) -> None:
    async with scheduler(configured(plan=WAITING_FOR_THREE)) as process:
        gateway, agents = await crowd.serving(process.port, agents=3)
        plan_id = process.leader().cluster.plan_id
        await agents[1].close()
        await until(lambda: not process.leader().cluster.registry["agent-1"].complete, "lost")
        assert gateway.ready  # the pool has another one
        await agents[0].close()
        await until(lambda: not gateway.ready, "a pool is empty")
        model = gateway.model()
        assert model is not None
        assert "agent-0" in model.not_ready_reason
        await gateway.submit(1)  # waits
        back = [
            await crowd.agent(process.port, f"agent-{i}", AgentScript(incarnation=2))
            for i in range(2)
        ]
        await gateway.dispatched(1)
        await until(lambda: all(agent.loaded for agent in back), "loaded again")
        await until(lambda: process.leader().cluster.registry["agent-1"].complete, "joined again")
        assert process.leader().cluster.plan_id == plan_id


async def test_replicas_follow_the_agents(configured: Configured, crowd: Crowd) -> None:
    async with scheduler(configured()) as process:
        gateway, (first,) = await crowd.serving(process.port)
        assert list(first.loaded) == [(0, 4)]
        second = await crowd.agent(process.port, "agent-1")
        await until(lambda: list(second.loaded) == [(0, 4)], "the new agent has it whole")
        await until(lambda: process.leader().cluster.is_settled, "two replicas serve")
        await second.close()
        await until(
            lambda: process.leader().cluster.registry["agent-1"].session is None, "one is gone"
        )
        await gateway.submit(1)
        assert {hop.agent_id for hop in (await gateway.dispatched(1)).route} == {"agent-0"}
        # Service was never interrupted, neither by the arrival nor by the loss.
        assert all(m.models[0].ready for m in gateway.all("models") if m.plan_id)
        assert list(first.loaded) == [(0, 4)]


async def test_a_model_too_slow_for_its_deadline_says_so_and_hinders_no_other(
    configured: Configured, crowd: Crowd, tmp_path: Path
) -> None:
    add_model(tmp_path / "models", ModelKey("other", "1"))
    placement = {
        "models": [
            {"name": "toy", "slo_ms": 1, "pipelines": plan(["agent-0"])["models"][0]["pipelines"]},
            {"name": "other", "pipelines": plan(["agent-0"])["models"][0]["pipelines"]},
        ]
    }
    async with scheduler(configured(plan=placement)) as process:
        gateway = await crowd.gateway(process.port)
        await crowd.agent(process.port, "agent-0", AgentScript(compute_ns=5 * MS))

        def judged() -> bool:
            toy, other = gateway.model("toy"), gateway.model("other")
            return bool(toy and other and other.ready and "SLO" in toy.not_ready_reason)

        await until(judged, "one is ready, the other explained")


async def test_a_model_missing_in_the_repository_is_named(
    configured: Configured, crowd: Crowd
) -> None:
    async with scheduler(configured(models=["toy", "ghost"])) as process:
        gateway, _ = await crowd.serving(process.port)
        ghost = gateway.model("ghost")
        assert ghost is not None
        assert not ghost.ready
        assert "not in the repository" in ghost.not_ready_reason


@pytest.mark.parametrize(
    ("document", "field"),
    [
        ("[]", "plan"),
        ("{", "plan"),
        ('{"models": [{"name": "toy"}]}', "models[0].pipelines"),
        (json.dumps(plan(["agent-0"], batch=0)), "models[0].pipelines[0].batch"),
        (json.dumps(plan(["a"])).replace("4]", "3]"), "models[0].pipelines[0].partitions"),
    ],
)
async def test_a_wrong_plan_file_stops_the_start_and_names_the_field(
    configured: Configured, tmp_path: Path, document: str, field: str
) -> None:
    file = tmp_path / "wrong.json"
    file.write_text(document)
    with pytest.raises(InvalidInput) as caught:
        async with scheduler(configured(plan_file=file)):
            pass
    assert caught.value.field == field


async def test_a_missing_plan_file_stops_the_start(configured: Configured, tmp_path: Path) -> None:
    with pytest.raises(CatenaryError, match="plan_file"):
        async with scheduler(configured(plan_file=tmp_path / "absent.json")):
            pass
