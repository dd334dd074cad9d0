"""Agents come and go as the scheduler advises."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from catenary_protos.catenary.v1 import admin_pb2, admin_pb2_grpc
from catenary_services.domain.packing import PACKING_GOALS, PackingGoal
from catenary_services.errors import InvalidInput
from catenaryd.local import agent_scaling
from catenaryd.local.agent_scaling import AgentScaling, ScalingSteps, ended, steps_for
from catenaryd.local.local_cluster import ClusterOptions, LocalCluster
from catenaryd.local.supervisor import ChildProcess
from scheduler_harness import until
from shared_helpers.grpc_servers import listening


def advice(wanted: int, **retiring: bool) -> admin_pb2.ScalingAdvice:
    """Retiring agents by number ("a1"), and whether they are drained."""
    return admin_pb2.ScalingAdvice(
        agents_wanted=wanted,
        retiring=[
            admin_pb2.RetiringAgent(agent_id=f"agent-{name[1:]}", drained=drained)
            for name, drained in retiring.items()
        ],
    )


ONE, THREE = ["agent-0"], ["agent-0", "agent-1", "agent-2"]


def test_what_is_missing_is_started_and_nothing_beyond_the_limit() -> None:
    assert steps_for(advice(3), ONE, 4) == ScalingSteps((), 2)
    assert steps_for(advice(9), ONE, 4) == ScalingSteps((), 3)
    assert steps_for(advice(3), THREE, 4) == ScalingSteps((), 0)


def test_agents_that_are_drained_are_stopped_and_no_others() -> None:
    assert steps_for(advice(1, a1=False, a2=True), THREE, 4) == ScalingSteps(("agent-2",), 0)
    assert steps_for(advice(1), THREE, 4) == ScalingSteps((), 0)  # too many, but none is drained
    assert steps_for(advice(1, a7=True), THREE, 4) == ScalingSteps((), 0)  # not ours


def test_an_agent_on_its_way_out_takes_its_place_until_it_is_gone() -> None:
    assert steps_for(advice(3, a2=False), THREE, 3) == ScalingSteps((), 0)
    assert steps_for(advice(3, a2=False), THREE, 4) == ScalingSteps((), 1)
    assert steps_for(advice(3, a2=True), THREE, 3) == ScalingSteps(("agent-2",), 1)


class FakeAgents:
    def __init__(self) -> None:
        self.ids = ["agent-0"]
        self.stopped: list[str] = []

    def agent_ids(self) -> list[str]:
        return list(self.ids)

    async def start_agent(self) -> str:
        self.ids.append(f"agent-{len(self.ids)}")
        return self.ids[-1]

    async def stop_agent(self, agent_id: str) -> None:
        self.ids.remove(agent_id)
        self.stopped.append(agent_id)


class FakeAdmin(admin_pb2_grpc.AdminServicer):
    def __init__(self, *streams: list[admin_pb2.ScalingAdvice]) -> None:
        self.streams = list(streams)
        self.asked = 0

    async def WatchScaling(  # noqa: N802
        self, request: admin_pb2.WatchScalingRequest, context: object
    ) -> AsyncIterator[admin_pb2.ScalingAdvice]:
        self.asked += 1
        for each in self.streams.pop(0) if self.streams else []:
            yield each


async def test_advice_is_followed_over_the_loss_of_the_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(agent_scaling, "FIRST_PAUSE_S", 0.01)
    admin, agents = FakeAdmin([advice(3)], [advice(1, a2=False), advice(1, a2=True)]), FakeAgents()
    async with listening(admin_pb2_grpc.add_AdminServicer_to_server, admin) as target:
        task = asyncio.create_task(AgentScaling(target, agents, 3).run())
        await until(lambda: agents.stopped == ["agent-2"], "the drained agent is stopped")
        await until(lambda: admin.asked >= 3, "the stream is opened again")
        assert agents.ids == ["agent-0", "agent-1"]
        await ended(task)
    assert task.cancelled()


async def test_nobody_at_the_other_end_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_scaling, "FIRST_PAUSE_S", 0.01)
    task = asyncio.create_task(AgentScaling("127.0.0.1:1", FakeAgents(), 3).run())
    done, _ = await asyncio.wait({task}, timeout=0.2)
    assert not done
    await ended(task)
    await ended(None)


@pytest.mark.parametrize("goal", PACKING_GOALS)
def test_the_scheduler_is_told_what_sessions_are_moved_for(
    tmp_path: Path, goal: PackingGoal
) -> None:
    cluster = LocalCluster(ClusterOptions(agents=1, packing=goal, data_dir=tmp_path))
    assert cluster._settings()["scheduler"][1]["packing"] == goal
    assert "packing" not in cluster._settings()["gateway"][1]


def test_the_scheduler_is_told_the_bounds_and_later_agents_are_like_the_first(
    tmp_path: Path,
) -> None:
    options = ClusterOptions(
        agents=1, max_agents=3, data_dir=tmp_path, extra={"agent": {"threads": 2}}
    )
    cluster = LocalCluster(options)
    children = cluster._settings()
    kind, scheduler = children["scheduler"]
    assert (kind, scheduler["expected_agents"]) == ("scheduler", 1)
    assert (scheduler["min_agents"], scheduler["max_agents"]) == (1, 3)
    assert "packing" not in scheduler
    _, first = children["agent-0"]
    later = cluster._agent_settings(2)
    assert {name for name in first if first[name] != later[name]} == {"agent_id"}
    assert (later["agent_id"], later["threads"], later["host_devices"]) == ("agent-2", 2, 3)


@pytest.mark.parametrize(
    "options",
    [
        ClusterOptions(agents=3, max_agents=2),
        ClusterOptions(agents=2, max_agents=4, virtual_gpus=2),
        ClusterOptions(agents=2, max_agents=4, groups=2),
        ClusterOptions(agents=2, max_agents=4, plan_file=Path("plan.json")),
    ],
)
def test_what_cannot_be_scaled_is_refused(options: ClusterOptions) -> None:
    with pytest.raises(InvalidInput, match="max_agents"):
        LocalCluster(options)


async def test_ids_are_free_again_only_when_the_agent_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end = asyncio.Event()

    async def start(child: ChildProcess) -> None:
        return None

    async def stop(child: ChildProcess, timeout_s: float) -> None:
        await may_end.wait()

    monkeypatch.setattr(ChildProcess, "start", start)
    monkeypatch.setattr(ChildProcess, "stop", stop)
    cluster = LocalCluster(ClusterOptions(agents=1, max_agents=4, data_dir=tmp_path))
    assert cluster.agent_ids() == ["agent-0"]
    assert [await cluster.start_agent() for _ in range(2)] == ["agent-0", "agent-1"]
    await cluster.stop_agent("agent-0")
    assert cluster.agent_ids() == ["agent-1"]
    assert await cluster.start_agent() == "agent-2"
    may_end.set()
    await until(lambda: not cluster._leaving, "the agent has ended")
    assert await cluster.start_agent() == "agent-0"
    assert cluster.agent_ids() == ["agent-0", "agent-1", "agent-2"]
    await cluster.stop()
