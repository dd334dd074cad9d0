"""Running sessions that move: drain, change of plan, operators, fail-over; scripted peers, gRPC."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from catenary_protos.catenary.v1 import admin_pb2, scheduler_pb2
from catenary_scheduler.settings import SchedulerSettings
from catenary_scheduler.storage.keys import RedisTable
from catenary_services.domain.ids import AgentId, GatewayId, RequestId, SessionId
from catenary_services.errors import InvalidInput
from chain_harness import chains, nothing_is_left, plan_is_stored, request, route, serving
from scheduler_harness import (
    MS,
    AgentScript,
    Crowd,
    FakeAgent,
    FakeGateway,
    admin,
    crash,
    operated,
    scheduler,
    until,
)
from scheduling_cases.stored_tables import raw_table

Configured = Callable[..., SchedulerSettings]
TWO = chains((2, [("agent-0", 0, 6, 0)]), (2, [("agent-1", 0, 6, 0)]))
DETAILS = {
    "mode": scheduler_pb2.MOVE_MODE_KV,
    "tokens": 9,
    "rounds": 2,
    "duration_ns": 30 * MS,
    "held_ns": 4 * MS,
}


def moves(gateway: FakeGateway) -> list[scheduler_pb2.StartSession]:
    return [each for each in gateway.all("start_session") if each.moved_session_id]


def carry_out(gateway: FakeGateway, agents: list[FakeAgent]) -> None:
    """Has every move be done as soon as it is ordered."""
    by_name = {agent.name: agent for agent in agents}
    first_of: dict[int, FakeAgent] = {}

    async def on_message(message: Any) -> None:
        if message.WhichOneof("kind") == "start_session":
            start = message.start_session
            first_of[start.session_id] = by_name[start.route[0].agent_id]
            if start.moved_session_id:
                await first_of[start.moved_session_id].moved(
                    start.session_id, start.moved_session_id, **DETAILS
                )

    gateway.on_message = on_message  # type: ignore[method-assign]


def figures(process: Any) -> dict[str, int]:
    found: dict[str, int] = process.leader().dispatcher.statistics()
    return found


# ---- drain ----


async def test_draining_an_agent_moves_its_sessions_and_does_not_wait_for_a_plan(
    generating: Configured, crowd: Crowd
) -> None:
    settings = generating(expected_agents=3, chain_agents=1, silence_s=20.0)
    async with operated(settings) as (process, stub):
        gateway, agents = await serving(process, crowd, *[AgentScript()] * 3)
        carry_out(gateway, agents)
        numbers = range(1, 9)
        for number in numbers:
            await gateway.submit_session(number)
        starts = [await gateway.started(number) for number in numbers]
        await gateway.progressed(*numbers, tokens=2)
        await until(lambda: all(v.runs for v in process.leader().moves.sessions()), "they run")
        name = starts[0].route[0].agent_id
        mine = [start for start in starts if start.route[0].agent_id == name]
        # A plan without the agent would take its time.
        target = process.leader().cluster.target
        process.leader().planner.follow = lambda *_: target
        answer = await stub.DrainAgent(admin_pb2.DrainAgentRequest(agent_id=name), timeout=30)
        assert answer.drained
        assert process.leader().cluster.target == target, "no plan came that it could wait for"
        assert {each.moved_session_id for each in moves(gateway)} == {s.session_id for s in mine}
        assert all(each.route[0].agent_id != name for each in moves(gateway))
        gone = next(agent for agent in agents if agent.name == name)
        await until(lambda: gone.all("drain"), "told")
        assert figures(process)["kv_moves"] == len(mine) >= 2
        assert figures(process)["restarted_sessions"] == 0
        for number in numbers:
            await gateway.finished(number)
        await nothing_is_left(process)


async def test_an_agent_whose_sessions_find_no_room_is_drained_at_their_end(
    generating: Configured, crowd: Crowd
) -> None:
    async with scheduler(generating(plan=TWO)) as process:
        gateway, agents = await serving(process, crowd, AgentScript(), AgentScript())
        carry_out(gateway, agents)
        for number in (1, 2, 3):
            await gateway.submit_session(number)
        starts = [await gateway.started(number) for number in (1, 2, 3)]
        name = max(
            *(s.route[0].agent_id for s in starts),
            key=lambda n: sum(s.route[0].agent_id == n for s in starts),
        )
        await gateway.progressed(1, 2, 3)
        async with admin(process.port) as stub:
            drain = stub.DrainAgent(admin_pb2.DrainAgentRequest(agent_id=name), timeout=8)
            await until(lambda: figures(process)["kv_moves"] == 1, "one finds room")
            await until(lambda: figures(process)["misplaced_sessions"] == 1, "the other does not")
            stayed = [
                s
                for s in starts
                if not any(m.moved_session_id == s.session_id for m in moves(gateway))
            ]
            mine = next(s for s in stayed if s.route[0].agent_id == name)
            other = next(s for s in stayed if s.route[0].agent_id != name)
            await gateway.finished(other.request_id)  # now there is room
            assert (await drain).drained
        assert {m.moved_session_id for m in moves(gateway)} >= {mine.session_id}
        assert figures(process)["restarted_sessions"] == 0


async def test_the_sessions_of_an_agent_that_is_told_to_stop_move_away(
    generating: Configured, crowd: Crowd
) -> None:
    async with scheduler(generating(plan=TWO)) as process:
        gateway, agents = await serving(process, crowd, AgentScript(), AgentScript())
        carry_out(gateway, agents)
        await gateway.submit_session(1)
        first = await gateway.started(1)
        await gateway.progressed(1)
        leaving = next(agent for agent in agents if agent.name == first.route[0].agent_id)
        await leaving.send(scheduler_pb2.AgentMessage(drained=scheduler_pb2.Drained()))
        second = await gateway.started(1, times=2)
        assert second.moved_session_id == first.session_id
        assert second.route[0].agent_id != leaving.name
        await gateway.finished(1)
        await nothing_is_left(process)


# ---- a change of plan ----


async def test_sessions_in_the_way_of_a_crowded_change_move_where_there_is_room(
    generating: Configured, crowd: Crowd
) -> None:
    before = chains((1, [("agent-0", 0, 6, 0)]), (2, [("agent-2", 0, 6, 0)]))
    after = chains((2, [("agent-0", 0, 3, 0), ("agent-1", 3, 6, 3)]), (2, [("agent-2", 0, 6, 0)]))
    async with operated(generating(plan=before)) as (process, stub):
        # Six blocks and six slots fit; three blocks and six slots beside them do not.
        crowded = AgentScript(memory_bytes=1_300, block_bytes=164)
        slow = AgentScript(decode_ns=50 * MS)
        gateway, agents = await serving(process, crowd, crowded, AgentScript(), slow)
        carry_out(gateway, agents)
        await gateway.submit_session(1)
        first = await gateway.started(1)
        assert route(first) == [("agent-0", 0, 6)]
        await gateway.progressed(1)
        answer = await stub.ApplyPlan(request(after), timeout=8)
        assert answer.plan_switch.phase == "done"
        (moved,) = moves(gateway)
        assert (moved.moved_session_id, route(moved)) == (
            first.session_id,
            [("agent-2", 0, 6)],
        )
        assert figures(process)["restarted_sessions"] == 0
        assert list(agents[0].loaded) == [(0, 3)]
        await gateway.finished(1)
        await nothing_is_left(process)


# ---- metrics ----


async def test_metrics_count_moves_and_the_caches_that_were_sent(
    generating: Configured, crowd: Crowd
) -> None:
    async with scheduler(generating(plan=TWO)) as process:
        gateway, agents = await serving(process, crowd, AgentScript(), AgentScript())
        carry_out(gateway, agents)
        await gateway.submit_session(1)
        await gateway.started(1)
        await gateway.progressed(1)
        moving = process.leader().moves
        await until(lambda: moving.sessions()[0].runs, "it runs")
        with pytest.raises(InvalidInput, match="has no session"):
            moving.begin(RequestId(GatewayId("gateway-0"), 2))
        moving.begin(RequestId(GatewayId("gateway-0"), 1))
        link = scheduler_pb2.CachesSent.Link(peer_id="agent-1", bytes=1_000, sending_ns=MS)
        sent = scheduler_pb2.CachesSent(links=[link, link])
        await agents[0].send(scheduler_pb2.AgentMessage(caches_sent=sent))

        def shown() -> dict[str, float]:
            registry = process.leader().metrics.registry
            return {
                f"{sample.name}{sorted(sample.labels.values())}": sample.value
                for family in registry.collect()
                for sample in family.samples
                if "migration" in sample.name
            }

        await until(lambda: shown().get("catenary_migrations_total['kv']") == 1.0, "counted")
        await until(lambda: shown().get("catenary_migration_bytes_total[]") == 2_000.0, "bytes")
        assert shown()["catenary_migration_held_seconds_sum['kv']"] == pytest.approx(0.004)
        assert shown()["catenary_migration_failures_total['deadline']"] == 0.0


# ---- fail-over ----


async def test_a_move_that_is_done_under_a_new_leader_loses_nothing(
    generating: Configured, crowd: Crowd
) -> None:
    async with scheduler(generating(plan=TWO)) as old:
        gateway, agents = await serving(old, crowd, AgentScript(), AgentScript())
        await gateway.submit_session(1)
        first = await gateway.started(1)
        await gateway.progressed(1)
        await until(lambda: old.leader().moves.sessions()[0].runs, "it runs")
        begun = old.leader().moves.begin(SessionId(first.session_id))
        second = await gateway.started(1, times=2)
        loaded = {agent.name: list(agent.loaded.values()) for agent in agents}
        await plan_is_stored(old)
        store = old.leader()._store
        written = await raw_table(store._redis, store._keys, RedisTable.SESSIONS)
        assert set(written) == {str(first.session_id), str(begun.session)}
        assert {json.loads(text)["request"] for text in written.values()} == {"gateway-0/1"}
        await crash(old)
    settings = generating(scheduler_id="scheduler-1", plan=TWO, silence_s=20.0)
    async with scheduler(settings) as new:
        await until(lambda: new.leads, "the new scheduler leads")
        back = await crowd.gateway(new.port)
        await back.submit_session(1, session_id=first.session_id, route=first.route)
        again = {}
        for start in (first, second):
            name = start.route[0].agent_id
            held = scheduler_pb2.SessionInAgent(
                session_id=start.session_id,
                route=start.route,
                gateway_id="gateway-0",
                request_id=1,
            )
            script = AgentScript(partitions=loaded[name], sessions=[held], epoch=1)
            again[name] = await crowd.agent(new.port, name, script)
        source, target = (again[each.route[0].agent_id] for each in (first, second))
        number = RequestId(GatewayId("gateway-0"), 1)
        dispatcher = new.leader().dispatcher.chained
        await until(lambda: dispatcher.session_of(number), "adopted")
        await until(lambda: figures(new)["sessions_in_flight"] == 2, "both are known")
        await source.moved(second.session_id, first.session_id)

        def current() -> int:
            view = dispatcher.session_of(number)
            return view.session if view is not None else 0

        await until(lambda: current() == second.session_id, "it is what it became")
        await until(lambda: len(new.leader().live) == 1, "only that is left")
        assert not back.starts(1)
        assert not target.told_to_close(second.session_id)
        await back.finished(1)
        await until(lambda: target.told_to_close(second.session_id), "closed at its end")
        await nothing_is_left(new)


async def test_an_agent_that_is_taken_back_is_used_again(
    generating: Configured, crowd: Crowd
) -> None:
    async with scheduler(generating(plan=TWO)) as process:
        gateway, _ = await serving(process, crowd, AgentScript(), AgentScript())
        leader = process.leader()
        leader.draining.begin(AgentId("agent-0"))
        assert leader.draining.is_idle(AgentId("agent-0"))
        for number in (1, 2):
            await gateway.submit_session(number)
            assert (await gateway.started(number)).route[0].agent_id == "agent-1"
        leader.draining.take_back(AgentId("agent-0"))
        for number in (3, 4):
            await gateway.submit_session(number)
            assert (await gateway.started(number)).route[0].agent_id == "agent-0"
