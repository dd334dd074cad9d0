"""Sessions while agents, plans and leaders come and go; scripted peers over real gRPC."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from catenary_protos.catenary.v1 import admin_pb2, common_pb2, scheduler_pb2
from catenary_scheduler.settings import SchedulerSettings
from chain_harness import (
    RING,
    chains,
    nothing_is_left,
    plan_is_stored,
    request,
    route,
    serving,
)
from scheduler_harness import MS, AgentScript, Crowd, admin, crash, operated, scheduler, until

Configured = Callable[..., SchedulerSettings]


async def test_a_lost_agent_costs_its_sessions_their_chain_and_not_their_request(
    generating: Configured, crowd: Crowd
) -> None:
    document = chains(
        (2, [("agent-0", 0, 3, 0), ("agent-1", 3, 6, 3)]), (2, [("agent-2", 0, 6, 0)])
    )
    async with scheduler(generating(plan=document)) as process:
        slow = AgentScript(decode_ns=50 * MS)
        gateway, agents = await serving(process, crowd, AgentScript(), AgentScript(), slow)
        for number in (1, 2, 3):
            await gateway.submit_session(number)
        starts = {number: await gateway.started(number) for number in (1, 2, 3)}
        assert [len(starts[number].route) for number in (1, 2, 3)] == [2, 2, 1]
        await agents[1].close()
        # One place is left on the other chain; it goes to the one that came first.
        again = await gateway.started(1, times=2)
        assert route(again) == [("agent-2", 0, 6)]
        assert again.session_id not in {start.session_id for start in starts.values()}
        await until(lambda: agents[0].told_to_close(starts[1].session_id), "what is left is closed")
        assert len(gateway.starts(2)) == 1
        assert gateway.serves("llm")
        await gateway.finished(3)
        assert route(await gateway.started(2, times=2)) == [("agent-2", 0, 6)]
        for number in (1, 2):
            await gateway.finished(number)
        await nothing_is_left(process)


async def test_chains_are_composed_anew_without_an_agent_that_stays_away(
    generating: Configured, crowd: Crowd
) -> None:
    # 6 blocks of 100 and 4 x 6 slots of 64: nobody holds it all; three agents are two too many.
    room = AgentScript(memory_bytes=1_400)
    async with scheduler(generating(expected_agents=3)) as process:
        gateway, agents = await serving(process, crowd, room, room, room)
        await gateway.submit_session(1)
        first = await gateway.started(1)
        used = {agent for agent, _, _ in route(first)}
        gone = next(agent for agent in agents if agent.name in used)
        await gone.close()
        second = await gateway.started(1, times=2)
        assert gone.name not in {agent for agent, _, _ in route(second)}
        assert route(second)[0][1] == 0
        assert route(second)[-1][2] == 6
        await gateway.finished(1)
        await nothing_is_left(process)


async def test_a_session_failed_by_an_agent_or_a_gateway_starts_again(
    generating: Configured, crowd: Crowd
) -> None:
    async with scheduler(generating(plan=RING)) as process:
        gateway, agents = await serving(process, crowd, AgentScript(), AgentScript())
        await gateway.submit_session(1)
        first = await gateway.started(1)
        await agents[0].fails(first.session_id)
        second = await gateway.started(1, times=2)
        failure = common_pb2.Failure(reason="UNAVAILABLE", message="gone", retryable=True)
        lost = scheduler_pb2.SessionFailed(session_id=second.session_id, failure=failure)
        await gateway.send(scheduler_pb2.GatewayMessage(session_failed=lost))
        third = await gateway.started(1, times=3)
        assert len({first.session_id, second.session_id, third.session_id}) == 3
        cancelled = scheduler_pb2.CancelRequest(request_id=1)
        await gateway.send(scheduler_pb2.GatewayMessage(cancel=cancelled))
        await until(lambda: agents[1].told_to_close(third.session_id), "closed")
        await nothing_is_left(process)


async def test_a_partition_with_sessions_stays_until_they_are_gone(
    generating: Configured, crowd: Crowd
) -> None:
    whole = chains((2, [("agent-0", 0, 6, 0)]))
    async with operated(generating(plan=whole)) as (process, stub):
        gateway, agents = await serving(process, crowd, AgentScript(), AgentScript())
        await gateway.submit_session(1)
        first = await gateway.started(1)
        answer = await stub.ApplyPlan(request(RING), timeout=5)
        assert answer.plan_switch.phase == "done"
        await gateway.submit_session(2)
        assert len(route(await gateway.started(2))) == 2
        assert (0, 6) in agents[0].loaded
        assert not agents[0].told_to_close(first.session_id)
        await gateway.finished(1)
        await until(lambda: (0, 6) not in agents[0].loaded, "it goes when it is not needed")
        await gateway.finished(2)
        await nothing_is_left(process)


async def test_more_slots_are_ordered_of_a_partition_that_stays_loaded(
    generating: Configured, crowd: Crowd
) -> None:
    small = chains((1, [("agent-0", 0, 6, 0)]))
    large = chains((3, [("agent-0", 0, 6, 0)]))
    async with operated(generating(plan=small)) as (process, stub):
        gateway, (agent,) = await serving(process, crowd, AgentScript())
        await gateway.submit_session(1)
        await gateway.submit_session(2)
        first = await gateway.started(1)
        await stub.ApplyPlan(request(large), timeout=5)
        await gateway.started(2)
        orders = agent.all("load_partition")
        assert [order.cache.block_slots for order in orders] == [6, 18]
        assert not agent.told_to_close(first.session_id)
        assert not agent.all("unload_partition")
        await stub.ApplyPlan(request(small), timeout=5)
        await until(lambda: len(agent.all("load_partition")) == 3, "what is not needed is freed")
        assert agent.all("load_partition")[2].cache.block_slots == 6
        assert len(gateway.starts(1)) == 1


async def test_sessions_in_the_way_of_a_crowded_change_are_moved(
    generating: Configured, crowd: Crowd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("catenary_scheduler.cluster.controller._MOVE_SESSIONS_NS", 200 * MS)
    async with operated(generating(plan=chains((1, [("agent-0", 0, 6, 0)])))) as (process, stub):
        # Six blocks and six slots fit; three blocks and six slots beside them do not.
        crowded = AgentScript(memory_bytes=1_300, block_bytes=164)
        gateway, agents = await serving(process, crowd, crowded, AgentScript())
        await gateway.submit_session(1)
        first = await gateway.started(1)
        answer = await stub.ApplyPlan(request(RING), timeout=8)
        assert answer.plan_switch.phase == "done"
        assert len(route(await gateway.started(1, times=2))) == 2
        assert agents[0].told_to_close(first.session_id)
        assert list(agents[0].loaded) == [(0, 3)]


async def test_a_new_leader_goes_on_with_the_sessions_it_finds(
    generating: Configured, crowd: Crowd
) -> None:
    async with scheduler(generating(plan=RING)) as old:
        gateway, agents = await serving(old, crowd, AgentScript(), AgentScript())
        await gateway.submit_session(1)
        await gateway.submit_session(2)
        starts = [await gateway.started(number) for number in (1, 2)]
        loaded = [list(agent.loaded.values()) for agent in agents]
        await plan_is_stored(old)
        await crash(old)
    held = [
        scheduler_pb2.SessionInAgent(
            session_id=start.session_id,
            route=start.route,
            gateway_id="gateway-0",
            request_id=start.request_id,
        )
        for start in starts
    ]
    # The grace is what a busy machine may take until gateway and agents are back.
    settings = generating(scheduler_id="scheduler-1", plan=RING, claim_grace_s=3.0, silence_s=20.0)
    async with scheduler(settings) as new:
        await until(lambda: new.leads, "the new scheduler leads")
        back = await crowd.gateway(new.port)
        # The gateway goes on with the first; of the second nobody wants to know any more.
        await back.submit_session(1, session_id=starts[0].session_id, route=starts[0].route)
        again = [
            await crowd.agent(
                new.port, f"agent-{i}", AgentScript(partitions=loaded[i], sessions=held, epoch=1)
            )
            for i in range(2)
        ]
        await until(lambda: back.serves("llm"), "ready")
        await back.submit_session(3)
        await until(lambda: again[0].told_to_close(starts[1].session_id), "nobody claims it")
        fresh = await back.started(3)  # its slots were those of the second
        assert fresh.session_id >> 40 == 2
        assert not back.starts(1)
        assert not again[0].told_to_close(starts[0].session_id)
        await back.finished(1)
        await until(lambda: again[1].told_to_close(starts[0].session_id), "closed at its end")
        await back.finished(3)
        await nothing_is_left(new)


async def test_an_agent_that_comes_back_with_an_old_session_must_close_it(
    generating: Configured, crowd: Crowd
) -> None:
    async with scheduler(generating(plan=RING)) as process:
        gateway, agents = await serving(process, crowd, AgentScript(), AgentScript())
        await gateway.submit_session(1)
        first = await gateway.started(1)
        await agents[1].close()  # its stream breaks; the process lives on
        held = scheduler_pb2.SessionInAgent(
            session_id=first.session_id, route=first.route, gateway_id="gateway-0", request_id=1
        )
        loaded = list(agents[1].loaded.values())
        script = AgentScript(partitions=loaded, sessions=[held], answers_closes=False)
        back = await crowd.agent(process.port, "agent-1", script)
        await until(lambda: back.told_to_close(first.session_id), "told to close")
        again = await gateway.started(1, times=2)
        assert again.session_id != first.session_id
        # Its slots are taken until it says so: there is room for one session, not for two.
        await gateway.submit_session(2)
        await until(lambda: process.leader().dispatcher.statistics()["queued_requests"], "it waits")
        assert not gateway.starts(2)
        await back.closed(first.session_id)
        await gateway.started(2)


async def test_an_agent_is_drained_when_its_last_session_is_over(
    generating: Configured, crowd: Crowd
) -> None:
    async with operated(generating(expected_agents=2)) as (process, stub):
        gateway, agents = await serving(process, crowd, AgentScript(), AgentScript())
        await gateway.submit_session(1)
        start = await gateway.started(1)
        (hop,) = start.route
        draining = stub.DrainAgent(admin_pb2.DrainAgentRequest(agent_id=hop.agent_id), timeout=8)
        await until(lambda: process.leader().cluster.plan_id == "plan-1-2", "planned without it")
        for number in range(2, 6):
            await gateway.submit_session(number)
            assert (await gateway.started(number)).route[0].agent_id != hop.agent_id
        gone = next(agent for agent in agents if agent.name == hop.agent_id)
        assert not gone.all("drain")
        await gateway.finished(1)
        assert (await draining).drained
        assert len(gateway.starts(1)) == 1


async def test_the_last_agent_of_a_chain_is_drained_onto_the_others(
    generating: Configured, crowd: Crowd
) -> None:
    async with scheduler(generating(expected_agents=3, chain_agents=3)) as process:
        gateway, _ = await serving(process, crowd, AgentScript(), AgentScript(), AgentScript())
        async with admin(process.port) as stub:
            request = admin_pb2.DrainAgentRequest(agent_id="agent-1")
            assert (await stub.DrainAgent(request, timeout=8)).drained
        await gateway.submit_session(1)
        assert {hop.agent_id for hop in (await gateway.started(1)).route} == {"agent-0", "agent-2"}
        assert gateway.serves("llm")


async def test_a_new_leader_serves_by_the_chains_that_are_whole(
    generating: Configured, crowd: Crowd
) -> None:
    document = chains((2, [("agent-0", 0, 6, 0)]), (2, [("agent-1", 0, 6, 0)]))
    async with scheduler(generating(plan=document)) as old:
        gateway, agents = await serving(old, crowd, AgentScript(), AgentScript())
        loaded = list(agents[0].loaded.values())
        await plan_is_stored(old)
        await crash(old)
    settings = generating(scheduler_id="scheduler-1", plan=document, recovery_s=30.0)
    async with scheduler(settings) as new:
        await until(lambda: new.leads, "the new scheduler leads")
        gateway = await crowd.gateway(new.port)
        await crowd.agent(new.port, "agent-1", AgentScript(hold_loads=True))  # started anew
        await crowd.agent(new.port, "agent-0", AgentScript(partitions=loaded, epoch=1))
        await until(lambda: gateway.serves("llm"), "ready", 5.0)
        await gateway.submit_session(1)
        assert route(await gateway.started(1)) == [("agent-0", 0, 6)]
