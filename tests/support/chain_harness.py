"""What tests of generation over chains share: plans, a served cluster, a leak check."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from catenary_protos.catenary.v1 import admin_pb2, scheduler_pb2
from catenary_scheduler.dispatch import events
from catenary_scheduler.leadership.leader import LeaderRuntime
from catenary_scheduler.process import SchedulerProcess
from scheduler_harness import AgentScript, Crowd, FakeAgent, FakeGateway, until

Serving = tuple[FakeGateway, list[FakeAgent]]


async def serving(process: SchedulerProcess, crowd: Crowd, *scripts: AgentScript) -> Serving:
    return await crowd.serving(process.port, *scripts, model="llm")


def route(start: scheduler_pb2.StartSession) -> list[tuple[str, int, int]]:
    return [(hop.agent_id, hop.first_block, hop.last_block) for hop in start.route]


def chains(*chains: tuple[int, list[tuple[str, int, int, int]]]) -> dict[str, Any]:
    """Each chain: capacity, and hops as (agent, first, last, entry)."""
    return {
        "models": [
            {
                "name": "llm",
                "chains": [
                    {
                        "capacity": capacity,
                        "hops": [
                            {"agent": agent, "blocks": [first, last], "entry": entry}
                            for agent, first, last, entry in hops
                        ],
                    }
                    for capacity, hops in chains
                ],
            }
        ]
    }


def request(document: dict[str, Any]) -> admin_pb2.ApplyPlanRequest:
    return admin_pb2.ApplyPlanRequest(plan_json=json.dumps(document))


RING = chains((2, [("agent-0", 0, 3, 0), ("agent-1", 3, 6, 3)]))


def file_of(tmp_path: Path, document: dict[str, Any]) -> Path:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(document))
    return file


async def nothing_is_left(process: SchedulerProcess) -> None:
    def free() -> bool:
        figures = process.leader().dispatcher.statistics()
        return not figures["booked_slots"] and not len(process.leader().live)

    await until(free, "all slots are free")


async def plan_is_stored(process: SchedulerProcess) -> None:
    """Waits until a successor would find the plan in force in Redis."""
    leader = process.leader()
    async with asyncio.timeout(30):
        while True:
            await leader.write_behind.flush()
            stored = await leader._store.load()
            if stored.plan.active_id == leader.cluster.plan_id:
                return


class Noting:
    """A dispatcher that keeps the events it is told; a compiled one lets nobody replace a method."""

    def __init__(self, dispatcher: events.Dispatcher, heard: list[events.Event]) -> None:
        self._dispatcher, self._heard = dispatcher, heard

    def handle(self, event: events.Event, now: int) -> list[events.Command]:
        self._heard.append(event)
        return self._dispatcher.handle(event, now)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dispatcher, name)


def listening(leader: LeaderRuntime) -> list[events.Event]:
    """Returns a list that gets every event the dispatcher is told from now on."""
    loop, heard = leader.loop, list[events.Event]()
    loop._dispatcher = Noting(loop._dispatcher, heard)
    return heard
