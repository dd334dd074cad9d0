"""Operators list running sessions and move them: a scheduler with scripted agents and gateways."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc.aio
import pytest

from catenary_protos.catenary.v1 import admin_pb2, scheduler_pb2
from catenary_scheduler.process import SchedulerProcess
from catenary_scheduler.settings import SchedulerSettings
from chain_harness import serving
from scheduler_harness import (
    AgentScript,
    Crowd,
    FakeAgent,
    FakeGateway,
    operated,
    until,
)

Configured = Callable[..., SchedulerSettings]
CODE = grpc.StatusCode
Move = admin_pb2.MoveSessionRequest
Story = admin_pb2.GetStoryRequest
SECOND_NS = 10**9


async def generates(process: SchedulerProcess, gateway: FakeGateway, number: int) -> None:
    """Its first three tokens have come, and the scheduler knows."""
    progress = scheduler_pb2.SessionProgress(
        request_id=number, generated_tokens=3, first_token_ns=1000, decode_ns=1000
    )
    report = scheduler_pb2.SessionsProgressed(sessions=[progress])
    await gateway.send(scheduler_pb2.GatewayMessage(sessions_progressed=report))
    await until(lambda: any(view.runs for view in process.leader().moves.sessions()), "it runs")


def agent_of(agents: list[FakeAgent], start: scheduler_pb2.StartSession) -> FakeAgent:
    return next(agent for agent in agents if agent.name == start.route[0].agent_id)


async def listed(stub, **facts: str) -> list[admin_pb2.SessionStatus]:
    return list((await stub.ListSessions(admin_pb2.ListSessionsRequest(**facts))).sessions)


async def test_a_session_is_listed_moved_and_measured(generating: Configured, crowd: Crowd) -> None:
    async with operated(generating(expected_agents=2)) as (process, stub):
        gateway, agents = await serving(process, crowd, AgentScript(), AgentScript())
        await gateway.submit_session(7)
        first = await gateway.started(7)
        await generates(process, gateway, 7)
        (session,) = await listed(stub, model="llm")
        assert (session.session_id, session.request_number) == (first.session_id, 7)
        assert session.gateway_id == "gateway-0"
        assert [hop.agent_id for hop in session.hops] == [first.route[0].agent_id]
        assert not session.moving_to
        spec = Move(session_id=first.session_id, mode="tokens", wait_ns=5 * SECOND_NS)
        asked = asyncio.ensure_future(stub.MoveSession(spec))
        second = await gateway.started(7, times=2)
        assert second.moved_session_id == first.session_id
        assert second.move_mode == scheduler_pb2.MOVE_MODE_TOKENS
        (session,) = await listed(stub)
        assert session.session_id == first.session_id
        assert session.moving_by == "tokens"
        status = await stub.GetStatus(admin_pb2.GetStatusRequest())
        (model,) = status.models
        assert (model.packing, model.sessions, model.sessions_moving) == ("off", 1, 1)
        assert {chain.role for chain in model.chains} == {"mixed"}
        assert sum(chain.cached_tokens for chain in model.chains) == session.tokens > 3
        moved = scheduler_pb2.SessionMoved(
            session_id=second.session_id,
            moved_session_id=first.session_id,
            mode=scheduler_pb2.MOVE_MODE_TOKENS,
            tokens=11,
            rounds=2,
            duration_ns=900,
            held_ns=70,
        )
        old = agent_of(agents, first)
        await old.send(scheduler_pb2.AgentMessage(session_moved=moved))
        answer = await asked
        assert (answer.outcome, answer.session_id) == ("moved", second.session_id)
        assert (answer.mode, answer.tokens, answer.rounds) == ("tokens", 11, 2)
        assert (answer.duration_ns, answer.held_ns) == (900, 70)
        (session,) = await listed(stub)
        assert (session.session_id, session.chain_id) == (second.session_id, answer.chain_id)
        status = await stub.GetStatus(admin_pb2.GetStatusRequest())
        assert (status.moves_done, status.moves_failed) == (1, 0)


async def test_a_story_tells_of_a_session_that_was_moved_lost_and_finished(
    generating: Configured, crowd: Crowd
) -> None:
    async with operated(generating(expected_agents=2)) as (process, stub):
        gateway, agents = await serving(process, crowd, AgentScript(), AgentScript())
        await gateway.submit_session(7)
        first = await gateway.started(7)
        await generates(process, gateway, 7)
        begun = await stub.MoveSession(Move(session_id=first.session_id, mode="kv", wait_ns=1))
        assert (begun.outcome, begun.mode) == ("begun", "kv")
        second = await gateway.started(7, times=2)
        await agent_of(agents, first).moved(second.session_id, first.session_id)
        await until(lambda: agent_of(agents, first).told_to_close(first.session_id), "it moved")
        await agent_of(agents, second).fails(second.session_id)
        third = await gateway.started(7, times=3)
        await gateway.finished(7)
        await until(lambda: agent_of(agents, third).told_to_close(third.session_id), "it ended")
        by_number = Story(gateway_id="gateway-0", request_number=7)
        story = (await stub.GetStory(by_number)).changes
        # Agents release sessions whenever they come to it.
        told = [
            (each.session_id, each.name, each.event_kind)
            for each in story
            if each.name != "released"
        ]
        first_id, second_id, third_id = (each.session_id for each in (first, second, third))
        assert told == [
            (0, "arrived", "SessionRequested"),
            (0, "placed", "SessionRequested"),
            (first_id, "started", "SessionRequested"),
            (first_id, "first token", "SessionsProgressed"),
            (second_id, "reserved for a move", "MoveRequested"),
            (first_id, "move began", "MoveRequested"),
            (second_id, "took over", "SessionMoved"),
            (first_id, "moved away", "SessionMoved"),
            (0, "session lost", "SessionFailed"),
            (second_id, "given up", "SessionFailed"),
            (0, "placed", "SessionFailed"),
            (third_id, "started", "SessionFailed"),
            (0, "completed", "RequestCompleted"),
            (third_id, "request answered", "RequestCompleted"),
        ]
        lost = next(each for each in story if each.name == "session lost")
        assert (lost.before, lost.after) == ("running", "waiting")
        assert lost.why.startswith(agent_of(agents, second).name)
        assert story[0].ago_ns >= story[-1].ago_ns > 0
        assert story[0].event == story[1].event < story[-1].event
        for named in first_id, second_id, third_id:
            assert len((await stub.GetStory(Story(session_id=named))).changes) == len(story)
        for unknown in Story(session_id=5), Story(gateway_id="gateway-0", request_number=9):
            with pytest.raises(grpc.aio.AioRpcError, match="not known") as raised:
                await stub.GetStory(unknown)
            assert raised.value.code() == CODE.INVALID_ARGUMENT
        with pytest.raises(grpc.aio.AioRpcError, match="ask one of them"):
            await stub.GetStory(Story(request_id="mine"))


async def test_a_move_that_fails_says_why(generating: Configured, crowd: Crowd) -> None:
    async with operated(generating(expected_agents=2)) as (process, stub):
        gateway, agents = await serving(process, crowd, AgentScript(), AgentScript())
        await gateway.submit_session(7)
        first = await gateway.started(7)
        with pytest.raises(grpc.aio.AioRpcError, match="its prompt is not done"):
            await stub.MoveSession(Move(session_id=first.session_id))
        await generates(process, gateway, 7)
        with pytest.raises(grpc.aio.AioRpcError, match="has no chain 'nowhere'"):
            await stub.MoveSession(Move(session_id=first.session_id, chain_id="nowhere"))
        spec = Move(session_id=first.session_id, mode="kv", wait_ns=5 * SECOND_NS)
        asked = asyncio.ensure_future(stub.MoveSession(spec))
        second = await gateway.started(7, times=2)
        with pytest.raises(grpc.aio.AioRpcError, match="moves already") as raised:
            await stub.MoveSession(Move(session_id=first.session_id))
        assert raised.value.code() == CODE.UNAVAILABLE
        await agent_of(agents, second).fails(second.session_id)
        failed = await asked
        assert (failed.outcome, failed.mode) == ("failed", "kv")
        assert failed.problem
        await until(lambda: agent_of(agents, second).told_to_close(second.session_id), "it closed")
        status = await stub.GetStatus(admin_pb2.GetStatusRequest())
        assert (status.moves_done, status.moves_failed) == (0, 1)
        (session,) = await listed(stub)
        assert session.session_id == first.session_id
        assert len(gateway.starts(7)) == 2, "it stays where it was"


@pytest.mark.parametrize(
    ("spec", "code", "said"),
    [
        ({"request_id": "x"}, CODE.UNIMPLEMENTED, "gateways"),
        ({"session_id": 77}, CODE.INVALID_ARGUMENT, "77"),
        ({"session_id": 77, "mode": "both"}, CODE.INVALID_ARGUMENT, "none of kv, tokens"),
    ],
)
async def test_wrong_requests_are_refused(
    generating: Configured, crowd: Crowd, spec: dict[str, object], code: CODE, said: str
) -> None:
    async with operated(generating()) as (process, stub):
        await serving(process, crowd, AgentScript())
        with pytest.raises(grpc.aio.AioRpcError, match=said) as raised:
            await stub.MoveSession(Move(**spec))
        assert raised.value.code() == code
        with pytest.raises(grpc.aio.AioRpcError, match="not deployed"):
            await listed(stub, model="gpt")
