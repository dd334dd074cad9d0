"""An answer that another gateway began goes on here."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from catenary_protos.catenary.v1 import generation_pb2, generation_pb2_grpc
from catenary_services.errors import Unavailable
from generation_harness import TextStage, text_stage
from small_models.tiny_tokenizer import END, tokens_of

Sampling = generation_pb2.SamplingParameters


def stub_of(channel: grpc.aio.Channel) -> generation_pb2_grpc.GenerationStub:
    return generation_pb2_grpc.GenerationStub(channel)


def asked(before: str | bytes, **sampling: object) -> generation_pb2.GenerateRequest:
    """A request whose client has these tokens of the answer."""
    tokens = [byte + 3 for byte in before] if isinstance(before, bytes) else tokens_of(before)
    return generation_pb2.GenerateRequest(
        model="tiny", prompt="ab", generated_token_ids=tokens, sampling=Sampling(seed=7, **sampling)
    )


async def answer(
    stage: TextStage, request: generation_pb2.GenerateRequest, rest: str | bytes, finish: str = ""
) -> list[generation_pb2.GenerateResponse]:
    """Has the agent generate the rest, and returns all that the client is sent."""
    async with grpc.aio.insecure_channel(stage.grpc) as channel:
        call = stub_of(channel).Generate(request)
        session = await stage.agent.session()
        tokens = [byte + 3 for byte in (rest if isinstance(rest, bytes) else rest.encode())]
        for token in tokens:
            await session.send(token)
        if finish:
            await session.send(END, finish)
        async with asyncio.timeout(30):
            return [response async for response in call]


async def test_only_what_is_missing_is_sent(tmp_path: Path) -> None:
    async with text_stage(tmp_path) as stage:
        responses = await answer(stage, asked("Hel"), "lo!", "stop")
        assert "".join(each.text for each in responses) == "lo!"
        assert [t for each in responses for t in each.token_ids] == [*tokens_of("lo!"), END]
        assert responses[0].generated_before == 3
        assert responses[-1].usage.completion_tokens == 7
        submit = await stage.scheduler.hear("submit_session")
        assert submit.progress.generated_tokens == 3
        opening = stage.agent.frames[0].session_rows[0].opening
        assert list(opening.token_ids) == tokens_of("abHel")
        assert opening.prompt_tokens == 2
        assert opening.sampling.seed == 7
        page = stage.gateway._metrics
        assert page.generation_tokens.labels("tiny:1")._value.get() == 4


async def test_a_character_that_began_at_the_other_gateway_is_sent_whole(tmp_path: Path) -> None:
    whole = "é".encode()
    async with text_stage(tmp_path) as stage:
        responses = await answer(stage, asked(whole[:1]), whole[1:], "stop")
        assert "".join(each.text for each in responses) == "é"


async def test_text_the_other_gateway_held_back_is_not_lost(tmp_path: Path) -> None:
    # "l" may have been the beginning of the stop text, so its client has only "He".
    async with text_stage(tmp_path) as stage:
        responses = await answer(stage, asked("Hel", stop=["lo!"]), "p", "stop")
        assert "".join(each.text for each in responses) == "lp"


async def test_a_stop_text_is_found_across_gateways(tmp_path: Path) -> None:
    async with text_stage(tmp_path) as stage:
        responses = await answer(stage, asked("Hel", stop=["lo!"]), "o!")
        assert "".join(each.text for each in responses) == ""
        assert responses[-1].finish_reason == "stop"


async def test_the_limit_counts_the_whole_answer(tmp_path: Path) -> None:
    async with text_stage(tmp_path) as stage:
        responses = await answer(stage, asked("Hel", max_tokens=5), "lo")
        assert responses[-1].finish_reason == "length"
        assert responses[-1].usage.completion_tokens == 5


@pytest.mark.parametrize(
    "request_",
    [
        asked("Hello", max_tokens=5),
        generation_pb2.GenerateRequest(model="tiny", prompt="ab", generated_token_ids=[259]),
    ],
)
async def test_what_cannot_be_gone_on_with_is_refused(
    tmp_path: Path, request_: generation_pb2.GenerateRequest
) -> None:
    async with text_stage(tmp_path) as stage, grpc.aio.insecure_channel(stage.grpc) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub_of(channel).Generate(request_).read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "generated_token_ids" in (caught.value.details() or "")


async def test_a_gateway_that_stops_says_that_another_may_go_on(tmp_path: Path) -> None:
    async with text_stage(tmp_path) as stage, grpc.aio.insecure_channel(stage.grpc) as channel:
        call = stub_of(channel).Generate(asked(""))
        session = await stage.agent.session()
        await session.say("Hel")
        assert (await call.read()).text
        await stage.gateway.drain(0.05)
        await stage.gateway._sessions.close(Unavailable("the gateway stopped", retry_after_ns=1))
        async with asyncio.timeout(30):
            assert await call.code() is grpc.StatusCode.UNAVAILABLE
