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
from scheduler_harness import AgentScript, Crowd, FakeAgent, FakeGateway, admin, scheduler, until

Configured = Callable[..., SchedulerSettings]
CODE = grpc.StatusCode
Move = admin_pb2.MoveSessionRequest
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
    async with scheduler(generating(expected_agents=2)) as process, admin(process.port) as stub:
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


async def test_a_move_that_fails_says_why(generating: Configured, crowd: Crowd) -> None:
    async with scheduler(generating(expected_agents=2)) as process, admin(process.port) as stub:
        gateway, agents = await serving(process, crowd, AgentScript(), AgentScript())
        await gateway.submit_session(7)
        first = await gateway.started(7)
        await generates(process, gateway, 7)
        begun = await stub.MoveSession(Move(session_id=first.session_id, mode="kv"))
        assert (begun.outcome, begun.mode) == ("begun", "kv")
        with pytest.raises(grpc.aio.AioRpcError, match="moves already") as raised:
            await stub.MoveSession(Move(session_id=first.session_id))
        assert raised.value.code() == CODE.UNAVAILABLE
        second = await gateway.started(7, times=2)
        await agent_of(agents, second).fails(second.session_id)
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
    async with scheduler(generating()) as process, admin(process.port) as stub:
        await serving(process, crowd, AgentScript())
        with pytest.raises(grpc.aio.AioRpcError, match=said) as raised:
            await stub.MoveSession(Move(**spec))
        assert raised.value.code() == code
        with pytest.raises(grpc.aio.AioRpcError, match="not deployed"):
            await listed(stub, model="gpt")


async def test_unknown_chains_are_named(generating: Configured, crowd: Crowd) -> None:
    async with scheduler(generating(expected_agents=2)) as process, admin(process.port) as stub:
        gateway, _ = await serving(process, crowd, AgentScript(), AgentScript())
        await gateway.submit_session(7)
        first = await gateway.started(7)
        await generates(process, gateway, 7)
        with pytest.raises(grpc.aio.AioRpcError, match="chain"):
            await stub.MoveSession(Move(session_id=first.session_id, chain_id="nowhere"))
        assert len(gateway.starts(7)) == 1
