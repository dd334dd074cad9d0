"""Scaling of a served cluster: scripted agents and gateways, over real gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest

from catenary_protos.catenary.v1 import admin_pb2
from catenary_scheduler.process import SchedulerProcess
from catenary_scheduler.runtime import autoscaler
from catenary_scheduler.settings import SchedulerSettings
from catenary_services.domain.ids import AgentId
from chain_harness import serving
from scheduler_harness import AgentScript, Crowd, admin, operated, scheduler, until

Configured = Callable[..., SchedulerSettings]
QUICK: dict[str, Any] = {
    "max_agents": 3,
    "scale_down_window_s": 0.2,
    "scale_cold_start_s": 0.1,
    "chain_agents": 1,
    "chain_policy": "jffc",  # the first chain is filled first
    "settle_s": 0.0,
    "silence_s": 30.0,
    "expected_prompt_tokens": 1.0,
    "expected_output_tokens": 1.0,
}


@pytest.fixture(autouse=True)
def quick_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autoscaler, "_TICK_NS", 50 * 10**6)


class Watcher:
    """Keeps the latest advice."""

    def __init__(self) -> None:
        self.advice = admin_pb2.ScalingAdvice()
        self.count = 0

    async def follow(self, stub: Any) -> None:
        async for advice in stub.WatchScaling(admin_pb2.WatchScalingRequest()):
            self.advice, self.count = advice, self.count + 1

    def retiring(self) -> dict[str, bool]:
        return {each.agent_id: each.drained for each in self.advice.retiring}


@asynccontextmanager
async def watching(process: SchedulerProcess) -> AsyncIterator[Watcher]:
    watcher = Watcher()
    async with admin(process.port) as stub:
        task = asyncio.create_task(watcher.follow(stub))
        try:
            yield watcher
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def test_whoever_watches_is_told_at_once_how_things_are(
    generating: Configured, crowd: Crowd
) -> None:
    async with scheduler(generating(**QUICK)) as process, watching(process) as watcher:
        await serving(process, crowd, AgentScript())
        await until(lambda: watcher.advice.models, "advice")
        (model,) = watcher.advice.models
        assert (watcher.advice.agents_now, watcher.advice.agents_wanted) == (1, 1)
        assert (model.model, model.version) == ("llm", "1")
        assert (model.workers_now, model.workers_wanted) == (1, 1)
        assert model.attainment_ratio == 1.0
        assert not watcher.advice.retiring


async def test_sessions_that_wait_bring_an_agent_and_an_agent_too_many_is_drained(
    generating: Configured, crowd: Crowd
) -> None:
    async with scheduler(generating(**QUICK)) as process, watching(process) as watcher:
        gateway, (first,) = await serving(process, crowd, AgentScript())
        for number in range(6):  # a chain takes four
            await gateway.submit_session(number)
        before = [await gateway.started(number) for number in range(4)]
        await until(lambda: watcher.advice.agents_wanted == 2, "one more agent is wanted")
        assert "wait" in watcher.advice.models[0].reason
        second = await crowd.agent(process.port, "agent-1", AgentScript())
        late = [await gateway.started(number) for number in (4, 5)]
        assert {start.route[0].agent_id for start in late} == {"agent-1"}
        assert watcher.advice.agents_wanted == 2
        for number in range(3):
            await gateway.finished(number)
        # Both have sessions; the one with fewer is drained, and its session is left alone.
        await until(lambda: watcher.retiring() == {"agent-0": False}, "an agent retires")
        assert not first.told_to_close(before[3].session_id)
        await gateway.submit_session(7)
        assert (await gateway.started(7)).route[0].agent_id == "agent-1"
        assert not first.all("drain")
        await gateway.finished(3)
        await until(lambda: watcher.retiring() == {"agent-0": True}, "it is drained")
        assert first.all("drain")
        assert (watcher.advice.agents_now, watcher.advice.agents_wanted) == (1, 1)
        await first.close()
        await until(lambda: not watcher.advice.retiring, "it is gone")
        assert not second.all("drain")
        for number in (4, 5, 7):
            await gateway.finished(number)


async def test_an_agent_on_its_way_out_is_taken_back_when_load_returns(
    generating: Configured, crowd: Crowd
) -> None:
    # One worker is filled before the other gets anything.
    patient = generating(**{**QUICK, "scale_down_window_s": 1.0})
    async with scheduler(patient) as process, watching(process) as watcher:
        gateway, _ = await serving(process, crowd, AgentScript(), AgentScript())
        for number in range(5):
            await gateway.submit_session(number)
        await gateway.started(4)
        for number in range(3):
            await gateway.finished(number)
        await until(lambda: watcher.retiring() == {"agent-1": False}, "an agent retires")
        for number in range(5, 10):
            await gateway.submit_session(number)
        await until(lambda: watcher.advice.agents_now == 2, "it is taken back")
        assert (await gateway.started(9)).route[0].agent_id == "agent-1"
        await until(lambda: not watcher.retiring(), "nobody retires any more")
        for number in range(10):
            await gateway.finished(number)


async def test_without_a_limit_no_agent_is_drained(generating: Configured, crowd: Crowd) -> None:
    unlimited = generating(**{**QUICK, "max_agents": 0})
    async with scheduler(unlimited) as process, watching(process) as watcher:
        await serving(process, crowd, AgentScript(), AgentScript())
        await until(
            lambda: (watcher.advice.agents_now, watcher.advice.agents_wanted) == (2, 1),
            "fewer are wanted",
        )
        assert not process.leader().availability.impairments(AgentId("agent-1"))


async def test_a_watcher_of_a_leader_that_stops_is_sent_away(
    generating: Configured, crowd: Crowd
) -> None:
    async with operated(generating(**QUICK)) as (process, stub):
        await serving(process, crowd, AgentScript())
        following = asyncio.create_task(Watcher().follow(stub))
        await until(lambda: process.leader().autoscaler.models, "a decision")
        await process.drain(1.0)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await following
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_what_was_learned_of_scaling_outlives_the_leader(
    generating: Configured, crowd: Crowd
) -> None:
    settings = generating(**QUICK)
    async with scheduler(settings) as process:
        await serving(process, crowd, AgentScript())
        leader = process.leader()
        await until(lambda: leader.autoscaler.models, "a decision")
        (scaling,) = leader.autoscaler.models.values()
        scaling.cold_start_ns = 1_234_567
        scaling.line.learn(7.0, 3.0)
        leader.note("scale", {"model": "llm:1"})
        await process.drain(2.0)
    async with scheduler(settings) as process:
        await serving(process, crowd, AgentScript())
        leader = process.leader()
        await until(lambda: leader.autoscaler.models, "a decision")
        (successor,) = leader.autoscaler.models.values()
        assert successor.cold_start_ns == 1_234_567
        assert successor.line.history_weight == pytest.approx(1.0)


async def test_an_agent_that_no_chain_uses_is_drained(generating: Configured, crowd: Crowd) -> None:
    pairs = generating(**{**QUICK, "chain_agents": 2, "expected_agents": 3})
    async with scheduler(pairs) as process, watching(process) as watcher:
        await serving(process, crowd, AgentScript(), AgentScript(), AgentScript())
        await until(lambda: watcher.retiring() == {"agent-2": True}, "the third agent retires")
        assert (watcher.advice.agents_now, watcher.advice.agents_wanted) == (2, 2)


async def test_a_drained_agent_that_nobody_stops_is_used_again(
    generating: Configured, crowd: Crowd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autoscaler, "_STOPPED_NS", 10**8)
    async with scheduler(generating(**QUICK)) as process, watching(process) as watcher:
        gateway, _ = await serving(process, crowd, AgentScript(), AgentScript())
        await until(lambda: watcher.retiring() == {"agent-1": True}, "it is drained")
        for number in range(6):
            await gateway.submit_session(number)
        assert (await gateway.started(5)).route[0].agent_id == "agent-1"
        await until(lambda: not watcher.retiring(), "nobody retires any more")
        for number in range(6):
            await gateway.finished(number)


async def test_figures_are_shown_as_metrics(generating: Configured, crowd: Crowd) -> None:
    async with scheduler(generating(**QUICK)) as process:
        gateway, _ = await serving(process, crowd, AgentScript())
        await gateway.submit_session(1)
        await gateway.started(1)
        leader = process.leader()
        value = process._metrics.registry.get_sample_value
        llm = {"model": "llm"}

        def rate() -> float:
            return value("catenary_session_arrivals_per_second", llm) or 0.0

        await until(lambda: rate() > 0.0, "the rate is shown")
        assert value("catenary_agents_wanted") == value("catenary_agents_present") == 1.0
        assert value("catenary_workers_wanted", llm) == value("catenary_workers", llm) == 1.0
        assert value("catenary_session_attainment_ratio", llm) == 1.0
        await gateway.finished(1)
        await until(lambda: not len(leader.live), "the session is over")
