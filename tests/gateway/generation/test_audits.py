"""What a gateway answers to audits: all it waits for, behind all that it said."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc.aio

from catenary_protos.catenary.v1 import generation_pb2, generation_pb2_grpc, scheduler_pb2
from generation_harness import TextStage, text_stage

Down = scheduler_pb2.SchedulerToGatewayMessage


async def waits_for(stage: TextStage, number: int) -> dict[int, list[tuple[int, bool]]]:
    """Returns the sessions of each request, and whether their openings were sent."""
    stage.scheduler.send(Down(report_unanswered=scheduler_pb2.ReportUnanswered(number=number)))
    answer = await said(stage)
    assert answer.number == number
    return {
        request.request_id: [(each.session_id, each.sent_ago_ns > 0) for each in request.sessions]
        for request in answer.requests
    }


async def test_a_gateway_says_which_requests_and_starts_it_waits_for(tmp_path: Path) -> None:
    async with text_stage(tmp_path) as stage, grpc.aio.insecure_channel(stage.grpc) as channel:
        assert await waits_for(stage, 1) == {}
        stub = generation_pb2_grpc.GenerationStub(channel)
        request = generation_pb2.GenerateRequest(
            model="tiny", messages=[generation_pb2.ChatMessage(role="user", content="Hi")]
        )
        call = stub.Generate(request, timeout=20)
        reading = asyncio.create_task(_read(call))
        session = await stage.agent.session()
        number = session.opening.request_id
        assert await waits_for(stage, 2) == {number: [(session.session_id, True)]}
        stage.scheduler.send(stage.scheduler.start_session(number))  # again, elsewhere
        again = await stage.agent.session()
        assert await waits_for(stage, 3) == {number: [(again.session_id, True)]}
        await again.say("Hello!", finish="stop")
        await reading
        assert await waits_for(stage, 4) == {}


async def said(stage: TextStage) -> scheduler_pb2.Unanswered:
    answer = await stage.scheduler.hear("unanswered")
    assert isinstance(answer, scheduler_pb2.Unanswered)
    return answer


async def test_a_gateway_that_comes_back_says_what_is_not_over(tmp_path: Path) -> None:
    async with text_stage(tmp_path) as stage, grpc.aio.insecure_channel(stage.grpc) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        request = generation_pb2.GenerateRequest(
            model="tiny", messages=[generation_pb2.ChatMessage(role="user", content="Hi")]
        )
        reading = asyncio.create_task(_read(stub.Generate(request, timeout=20)))
        session = await stage.agent.session()
        stage.scheduler.send(None)  # its stream ends
        again = await stage.scheduler.hear("submit_session")
        answer = await said(stage)
        assert (answer.number, [each.request_id for each in answer.requests]) == (
            0,
            [again.request_id],
        )
        await session.say("Hello!", finish="stop")
        await reading


async def _read(call: object) -> None:
    async for _ in call:  # type: ignore[attr-defined]
        pass
