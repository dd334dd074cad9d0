"""A gateway beside processes of a newer version: it does what it knows, and ignores the rest."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc.aio

from catenary_protos.catenary.v1 import generation_pb2, generation_pb2_grpc
from gateway_harness import Down
from generation_harness import answering, text_stage

NEWER_KIND = b"\xf2\x06\x00"
NEWER_FIELD = b"\x9a\x3f\x03new"


async def test_orders_of_a_kind_to_come_are_ignored(tmp_path: Path) -> None:
    async with text_stage(tmp_path) as stage, grpc.aio.insecure_channel(stage.grpc) as channel:
        stage.agent.script = answering
        stage.scheduler.send(Down.FromString(NEWER_KIND))
        usual = stage.scheduler.start_session

        def newer_start(request_id: int, agent: str = "") -> Down:
            order = usual(request_id, agent).SerializeToString()
            return Down.FromString(order + NEWER_FIELD)

        stage.scheduler.start_session = newer_start  # type: ignore[method-assign]
        request = generation_pb2.GenerateRequest.FromString(
            generation_pb2.GenerateRequest(model="tiny", prompt="ab").SerializeToString()
            + NEWER_FIELD
        )
        call = generation_pb2_grpc.GenerationStub(channel).Generate(request)
        async with asyncio.timeout(30):
            text = "".join([response.text async for response in call])
        assert text == "Hello!"


async def test_a_scheduler_hears_which_version_a_gateway_runs(tmp_path: Path) -> None:
    async with text_stage(tmp_path) as stage:
        await stage.scheduler.stop()
        await stage.scheduler.start(stage.scheduler.port)
        again = await stage.scheduler.hear("hello", 10.0)
        assert again.software_version
