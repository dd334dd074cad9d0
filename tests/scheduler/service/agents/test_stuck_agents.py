"""Agents whose steps do not end: found by their heartbeats, told to end, and not worked with."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from catenary_protos.catenary.v1 import scheduler_pb2
from catenary_scheduler.dispatch.availability import Impairment
from catenary_scheduler.observed.stuck_agents import StuckAgents, StuckRules
from catenary_scheduler.settings import SchedulerSettings
from catenary_services.domain.ids import AgentId
from scheduler_harness import AgentScript, Crowd, FakeAgent, scheduler, until

Configured = Callable[..., SchedulerSettings]
SECOND = 1_000_000_000
RULES = StuckRules(6 * SECOND, 20.0, 1_800 * SECOND)
A = AgentId("agent-0")


def beat(
    age_ns: int, booked_ns: int = 0, kind: int = scheduler_pb2.STEP_KIND_BATCH
) -> scheduler_pb2.Heartbeat:
    step = scheduler_pb2.StepInHand(kind=kind, age_ns=age_ns, booked_ns=booked_ns)
    return scheduler_pb2.Heartbeat(steps=[step])


@pytest.mark.parametrize(
    ("age_s", "booked_s", "kind", "is_stuck"),
    [
        (5.9, 0.1, "BATCH", False),
        (6.1, 0.1, "BATCH", True),
        (19.0, 1.0, "GENERATION", False),
        (21.0, 1.0, "GENERATION", True),
        (100.0, 0.0, "LOADING", False),
        (100.0, 0.0, "MEASURING", False),
        (1_801.0, 0.0, "LOADING", True),
    ],
)
def test_how_old_a_step_may_be(age_s: float, booked_s: float, kind: str, is_stuck: bool) -> None:
    agents = StuckAgents(RULES)
    said = beat(
        round(age_s * SECOND),
        round(booked_s * SECOND),
        scheduler_pb2.StepKind.Value(f"STEP_KIND_{kind}"),
    )
    assert agents.heard(A, said) == ""
    assert bool(agents.heard(A, said)) == is_stuck


def test_one_late_heartbeat_is_not_enough() -> None:
    agents = StuckAgents(RULES)
    for _ in range(5):
        assert agents.heard(A, beat(10 * SECOND)) == ""
        assert agents.heard(A, scheduler_pb2.Heartbeat()) == ""


def test_a_process_that_was_told_to_end_is_known_by_its_incarnation() -> None:
    agents = StuckAgents(RULES)
    agents.told_to_end(A, 7)
    assert agents.must_end(A, 7)
    assert not agents.must_end(A, 8)
    assert agents.came(A)
    assert not agents.came(A)
    assert not agents.must_end(A, 7)


async def hangs(agent: FakeAgent) -> None:
    for _ in range(2):
        await agent.send(scheduler_pb2.AgentMessage(heartbeat=beat(10 * SECOND)))


async def test_a_stuck_agent_is_told_to_end_and_its_work_goes_elsewhere_at_once(
    configured: Configured, crowd: Crowd
) -> None:
    async with scheduler(configured(expected_agents=2, silence_s=30.0)) as process:
        gateway = await crowd.gateway(process.port)
        stuck = await crowd.agent(process.port, "agent-0")
        await crowd.agent(process.port, "agent-1")
        await until(lambda: gateway.ready, "ready")
        await hangs(stuck)
        [order] = await ordered(stuck)
        assert "goes on for 10.0 s" in order.why
        leader = process.leader()
        assert leader.availability.impairment_of(A) is Impairment.BROKEN
        await until(lambda: not leader.availability.is_connected(A), "it counts as lost")
        await until(lambda: stuck.ended, "its stream is ended")
        again = await crowd.agent(process.port, "agent-0")
        await ordered(again)
        await until(lambda: again.ended, "the same process is not taken back")
        assert not leader.availability.is_connected(A)
        await crowd.agent(process.port, "agent-0", AgentScript(incarnation=2))
        await until(lambda: leader.availability.is_connected(A), "its successor is")
        assert leader.availability.impairment_of(A) is None


async def ordered(agent: FakeAgent) -> list[scheduler_pb2.EndProcess]:
    await until(lambda: bool(agent.all("end_process")), "the order to end")
    return agent.all("end_process")


async def test_an_agent_that_ends_by_itself_is_lost_before_its_stream_breaks(
    configured: Configured, crowd: Crowd
) -> None:
    async with scheduler(configured(silence_s=30.0)) as process:
        _, (agent,) = await crowd.serving(process.port)
        ending = scheduler_pb2.Ending(reason="DEVICE_LOST", why="CUDA error: ..")
        await agent.send(scheduler_pb2.AgentMessage(ending=ending))
        view = process.leader().availability
        await until(lambda: not view.is_connected(A), "it counts as lost")
