"""A scheduler among damaged state and agents that lie: it leads, and says what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from redis.asyncio import Redis

from catenary_protos.catenary.v1 import admin_pb2
from catenary_scheduler.dispatch.availability import Impairment
from catenary_scheduler.leadership.recovery import take_over
from catenary_scheduler.process import SchedulerProcess
from catenary_scheduler.settings import SchedulerSettings
from catenary_scheduler.storage.keys import RedisKeys, RedisTable
from catenary_services.domain.groups import HIGHEST_GRANTED
from catenary_services.domain.ids import AgentId
from catenary_services.redis.embedded_redis import EmbeddedRedis
from catenary_services.redis.redis_client import connect
from scheduler_harness import AgentScript, Crowd, admin, crash, scheduler, until
from scheduling_cases.stored_tables import GOOD

Configured = Callable[..., SchedulerSettings]
KEYS = RedisKeys("main")


async def status(process: SchedulerProcess) -> admin_pb2.GetStatusResponse:
    async with admin(process.port) as stub:
        answer: admin_pb2.GetStatusResponse = await stub.GetStatus(
            admin_pb2.GetStatusRequest(), timeout=5
        )
        return answer


async def fill(redis: Redis, tables: dict[str, dict[Any, Any]]) -> None:
    for table, fields in tables.items():
        await redis.hset(KEYS.table(table), mapping=fields)  # type: ignore[misc]
    seconds, _ = await redis.time()
    moment = {"scheduler_ns": 0, "redis_us": int(seconds) * 10**6, "epoch": 3}
    await redis.hset(KEYS.clock, mapping=moment)  # type: ignore[misc]


@pytest.fixture
async def redis(server: EmbeddedRedis) -> Any:
    client = connect(server.url, timeout_s=1.0, retries=0)
    yield client
    await client.aclose()


async def served(process: SchedulerProcess, crowd: Crowd) -> None:
    gateway, _ = await crowd.serving(process.port)
    await gateway.submit(1)
    await gateway.dispatched(1)


async def test_a_leader_begins_with_what_is_whole_and_says_what_is_not(
    configured: Configured, crowd: Crowd, redis: Redis
) -> None:
    tables: dict[str, dict[Any, Any]] = {
        table: {**fields, b"\xff": b"\xfe"} for table, fields in GOOD.items()
    }
    tables[RedisTable.PLAN] = {"active": "{", "notes": "[]", "fixed": b"\xff", "file": "ab"}
    await fill(redis, tables)
    await redis.set(KEYS.epoch, "abc")
    async with scheduler(configured()) as process:
        assert process.leader().epoch == 4
        assert (await status(process)).quarantined_records == len(tables) - 1 + 3
        assert "llm:x:1" in process.leader().deployments.problems  # wanted, and not here
        found = {fields[b"table"] for _, fields in await redis.xrange(KEYS.quarantine)}
        assert found == {b"epoch", *(table.encode() for table in tables)}
        metric = process.leader().metrics.registry.get_sample_value
        assert metric("catenary_quarantined_records_total", {"table": "plan"}) == 3
        assert metric("catenary_repaired_epochs_total") == 1
        await served(process, crowd)


@pytest.mark.parametrize("kind", ["active", "fixed"])
async def test_a_plan_that_does_not_fit_its_model_is_left_out(
    configured: Configured, crowd: Crowd, redis: Redis, kind: str
) -> None:
    stage = {"blocks": [0, 9_999], "agents": ["agent-0"]}
    plan = {"models": [{"name": "toy", "pipelines": [{"batch": 1, "partitions": [stage]}]}]}
    spec = '{"slo_ns": 0, "max_batch": 0, "partitions": null}'
    await fill(
        redis,
        {
            RedisTable.PLAN: {kind: json.dumps(plan), "active_id": "x"},
            RedisTable.DEPLOYMENTS: {"toy:1": spec, "../../etc/passwd": spec, "\x7f": spec},
        },
    )
    async with scheduler(configured()) as process:
        (said,) = (await status(process)).takeover_problems
        assert said.startswith(f"plan {kind}: ")
        await served(process, crowd)


async def test_whatever_fails_while_taking_over_is_tried_again_and_said(
    configured: Configured, crowd: Crowd, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scheduler(configured()) as process:
        await served(process, crowd)
        await process.leader().write_behind.flush()
        await crash(process)
    real: Any = take_over
    tries: list[bool] = []

    async def fails(leader: Any, stored: Any) -> Any:
        tries.append(bool(stored.plan.active))
        if len(tries) < 5:
            raise RuntimeError("nobody thought of this")
        return await real(leader, stored)

    monkeypatch.setattr("catenary_scheduler.leadership.leader.take_over", fails)
    async with scheduler(configured(scheduler_id="scheduler-1")) as process:
        await until(lambda: len(tries) >= 2, "it tries again")
        said = await status(process)
        if not process.leads:
            assert "nobody thought of this" in said.takeover_problems[0]
            refused = await crowd.gateway(process.port, "gateway-9")
            await until(lambda: refused.ended, "refused")
            assert refused.status == "UNAVAILABLE"
        await until(lambda: process.leads, "it leads in the end")
        assert tries == [True, True, True, False, False]  # in the end without what was stored
        (said_now,) = (await status(process)).takeover_problems
        assert said_now.startswith("leading failed 4 times in a row: RuntimeError")
        found = {fields[b"table"] for _, fields in await redis.xrange(KEYS.quarantine)}
        assert b"plan" in found
        await served(process, crowd)


async def test_a_term_that_breaks_is_followed_by_another(
    configured: Configured, crowd: Crowd, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scheduler(configured()) as process:
        await until(lambda: process.leads, "leads")
        leader, before = process.leader(), process.leader().epoch

        def collect() -> None:
            raise ZeroDivisionError("a nonsense figure")

        # A failure of one periodic task stops no other; what brings state to Redis is not.
        broken = replace(leader.write_behind._sources, collect=collect)
        monkeypatch.setattr(leader.write_behind, "_sources", broken)
        leader.write_behind.touch()
        await until(lambda: process.leads and process.leader() is not leader, "another term")
        assert process.leader().epoch > before
        await served(process, crowd)


LIES = [2**64 - 1, 2**53 + 1, HIGHEST_GRANTED + 1, 2**33]


@pytest.mark.parametrize("epoch", LIES)
async def test_an_agent_that_lies_is_refused_and_the_cluster_goes_on(
    configured: Configured, crowd: Crowd, redis: Redis, epoch: int
) -> None:
    async with scheduler(configured(lease_s=30.0)) as process:
        await served(process, crowd)
        before = process.leader().epoch
        for _ in range(3):
            liar = await crowd.agent(process.port, "agent-9", AgentScript(epoch=epoch))
            await until(lambda liar=liar: liar.ended, "refused")  # type: ignore[misc]
            assert liar.status == "INVALID_ARGUMENT"
        leader = process.leader()
        assert leader.epoch == before
        assert leader.availability.impairment_of(AgentId("agent-9")) is Impairment.QUARANTINED
        await leader.write_behind.flush()
        events = [fields for _, fields in await redis.xrange(KEYS.events)]
        named = [each for each in events if each[b"kind"] == b"peer_quarantined"]
        assert [each[b"peer"] for each in named] == [b"agent-9"]  # once, not at each attempt
        # One that drops what it cannot know is led like any other.
        await crowd.agent(process.port, "agent-9")
        await until(lambda: AgentId("agent-9") in leader.cluster.registry, "joined")


async def test_an_old_epoch_far_away_is_followed_if_nobody_contradicts(
    configured: Configured, crowd: Crowd
) -> None:
    async with scheduler(configured()) as process:
        await until(lambda: process.leads, "leads")
        far = 10**7

        async def comes() -> bool:
            agent = await crowd.agent(process.port, "agent-0", AgentScript(epoch=far))
            await until(lambda: agent.ended or agent.all("welcome"), "an answer")
            return bool(agent.all("welcome"))

        assert not await comes()
        while not await comes():
            pass
        assert process.leader().epoch > far
