"""Log probabilities in the forms of OpenAI and vLLM, and over gRPC, through a real gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import openai
import pytest
from tokenizers import Tokenizer, decoders, models

from catenary_gateway.generation.text.token_bytes import TokenBytes
from catenary_gateway.openai_http.logprob_forms import token_text
from catenary_protos.catenary.v1 import generation_pb2, generation_pb2_grpc
from generation_harness import Session, TextStage, text_stage
from small_models.text_here import table_of
from small_models.tiny_tokenizer import END, tiny_tokenizer, tokens_of

ASKED = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
SAID = "Hé!"
A, B = tokens_of("ab")


def scored(token: int, place: int, top: int) -> generation_pb2.TokenLogprobs:
    """What an agent says of a token: it is the second likeliest, `a` is the likeliest."""
    made = generation_pb2.TokenLogprobs(token_id=token, logprob=-1 - place / 8, rank=2)
    for rank, named in enumerate((A, token, B)[:top]):
        made.top.add(token_id=named, logprob=-(rank + 1) / 2 - place / 8)
    return made


async def scoring(session: Session) -> None:
    """Says `SAID` and an end, with what was asked for."""
    asked, prompt = session.opening.sampling, session.opening.token_ids
    if asked.HasField("prompt_logprobs"):
        parts = [scored(token, at, asked.prompt_logprobs) for at, token in enumerate(prompt)]
        half = len(prompt) // 2
        await session.score_prompt(parts[1 : half + 1], 1)
        # Some come twice, as they do from a session that was started again.
        await session.score_prompt(parts[half:], half)
    for at, token in enumerate([*tokens_of(SAID), END]):
        facts: dict[str, object] = {}
        if asked.HasField("logprobs"):
            facts = {"logprobs": scored(token, at, asked.logprobs)}
        await session.send(token, "stop" if token == END else "", **facts)


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[TextStage]:
    async with text_stage(tmp_path) as started:
        started.agent.script = scoring
        yield started


def client_of(stage: TextStage) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{stage.http}/v1", api_key="any", max_retries=0, timeout=10.0
    )


async def test_a_chat_names_tokens_with_their_bytes(running: TextStage) -> None:
    async with client_of(running) as client:
        chat = await client.chat.completions.create(**ASKED, logprobs=True, top_logprobs=2)
        found = chat.choices[0].logprobs
        assert found is not None
        assert found.content is not None
        # The end is no part of the text.
        assert [each.token for each in found.content] == ["H", "bytes:\\xc3", "bytes:\\xa9", "!"]
        said = [byte for each in found.content for byte in each.bytes or []]
        assert bytes(said).decode() == chat.choices[0].message.content == SAID
        assert [each.logprob for each in found.content] == [-1, -1.125, -1.25, -1.375]
        tops = [[(one.token, one.logprob) for one in each.top_logprobs] for each in found.content]
        assert tops[0] == [("a", -0.5), ("H", -1)]
        assert [len(each) for each in tops] == [2] * 4


async def test_who_asks_for_none_of_the_likeliest_gets_none(running: TextStage) -> None:
    async with client_of(running) as client:
        chat = await client.chat.completions.create(**ASKED, logprobs=True)
        found = chat.choices[0].logprobs
        assert found is not None
        assert found.content is not None
        assert [each.top_logprobs for each in found.content] == [[]] * 4
        plain = await client.chat.completions.create(**ASKED)
        assert plain.choices[0].logprobs is None
        sampling = running.agent.frames[-1].session_rows[0].opening.sampling
        assert not sampling.HasField("logprobs")
        assert not sampling.HasField("prompt_logprobs")


async def test_chunks_together_have_the_log_probabilities_of_the_whole(running: TextStage) -> None:
    async with client_of(running) as client:
        asked = ASKED | {"logprobs": True, "top_logprobs": 3}
        whole = await client.chat.completions.create(**asked)
        content = []
        async for chunk in await client.chat.completions.create(**asked, stream=True):
            found = chunk.choices[0].logprobs
            content += (found.content or []) if found is not None else []
        assert whole.choices[0].logprobs is not None
        assert content == whole.choices[0].logprobs.content


@pytest.mark.parametrize("stream", [False, True])
async def test_completions_have_the_older_form(running: TextStage, stream: bool) -> None:
    async with client_of(running) as client:
        answer = await client.completions.create(
            model="tiny", prompt="ab", logprobs=1, stream=stream
        )
        found = await collected(answer) if stream else answer.choices[0].logprobs.model_dump()
        assert found["tokens"] == ["H", "bytes:\\xc3", "bytes:\\xa9", "!"]
        assert found["token_logprobs"] == [-1, -1.125, -1.25, -1.375]
        assert found["top_logprobs"][0] == {"a": -0.5, "H": -1}
        assert found["text_offset"] == [0, 1, 1, 2]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_echoed_prompt_has_its_own(running: TextStage, stream: bool) -> None:
    async with client_of(running) as client:
        answer = await client.completions.create(
            model="tiny", prompt="üb", logprobs=2, echo=True, stream=stream
        )
        found = await collected(answer) if stream else answer.choices[0].logprobs.model_dump()
        assert found["tokens"][:4] == ["bytes:\\xc3", "bytes:\\xbc", "b", "H"]
        assert found["token_logprobs"][:4] == [None, -1.125, -1.25, -1]
        assert found["top_logprobs"][0] is None
        assert found["top_logprobs"][2] == {"a": -0.75, "b": -1.25}
        assert found["text_offset"] == [0, 0, 1, 2, 3, 3, 4]
        assert {len(each) for each in found.values()} == {7}


async def collected(stream: openai.AsyncStream) -> dict[str, list[object]]:
    """The `logprobs` of all chunks of a completion, put together."""
    found: dict[str, list[object]] = {}
    async for chunk in stream:
        for name, values in chunk.choices[0].logprobs.model_dump().items():
            found.setdefault(name, []).extend(values)
    return found


async def test_prompts_are_scored_in_the_form_of_vllm(running: TextStage) -> None:
    async with client_of(running) as client:
        extra = {"prompt_logprobs": 1}
        chat = await client.chat.completions.create(**ASKED, extra_body=extra)
        assert chat.model_extra is not None
        first, second, *others = chat.model_extra["prompt_logprobs"]
        assert first is None
        assert second == {
            str(A): {"logprob": -0.625, "rank": 1, "decoded_token": "a"},
            str(tokens_of("u")[0]): {"logprob": -1.125, "rank": 2, "decoded_token": "u"},
        }
        assert chat.usage is not None
        assert len(others) == chat.usage.prompt_tokens - 2
        completion = await client.completions.create(model="tiny", prompt="ab", extra_body=extra)
        (choice,) = completion.choices
        assert choice.logprobs is None
        assert choice.model_extra is not None
        assert len(choice.model_extra["prompt_logprobs"]) == 2


async def test_a_prompt_with_too_many_is_refused(running: TextStage, monkeypatch) -> None:
    from catenary_gateway.generation import intake

    monkeypatch.setattr(intake, "MAX_PROMPT_LOGPROBS", 62)
    async with client_of(running) as client:
        with pytest.raises(openai.BadRequestError) as raised:
            await client.chat.completions.create(**ASKED, extra_body={"prompt_logprobs": 2})
        assert raised.value.param == "prompt_logprobs"
        await client.chat.completions.create(**ASKED, extra_body={"prompt_logprobs": 1})


async def test_a_session_started_again_scores_each_token_once(tmp_path: Path) -> None:
    """The first agent goes away within the prompt, the second within the answer."""
    async with (
        text_stage(tmp_path, agents=3) as stage,
        grpc.aio.insecure_channel(stage.grpc) as channel,
    ):
        stub = generation_pb2_grpc.GenerationStub(channel)
        sampling = generation_pb2.SamplingParameters(logprobs=1, prompt_logprobs=1, seed=1)
        prompt = tokens_of("abcd")
        call = stub.Generate(
            generation_pb2.GenerateRequest(model="tiny", token_ids=prompt, sampling=sampling)
        )
        parts = [scored(token, at, 1) for at, token in enumerate(prompt)]
        first = await stage.agents[0].session()
        await first.score_prompt(parts[1:3])
        await first.fail()
        await stage.scheduler.hear("session_failed")
        stage.scheduler.send(stage.scheduler.start_session(1, "agent-1"))
        second = await stage.agents[1].session()
        assert second.opening.sampling.prompt_logprobs == 1
        await second.score_prompt(parts[1:])
        await second.send(A, logprobs=scored(A, 0, 1))
        response = await call.read()
        assert list(response.logprobs) == [scored(A, 0, 1)]
        assert list(response.prompt_logprobs) == parts[1:]
        stage.scheduler.send(stage.scheduler.start_session(1, "agent-2"))
        third = await stage.agents[2].session()
        assert not third.opening.sampling.HasField("prompt_logprobs")
        await second.send(B, logprobs=scored(B, 1, 1))  # it is dropped: the session goes on there
        await third.send(B, "length", logprobs=scored(B, 1, 1))
        response = await call.read()
        assert (list(response.token_ids), list(response.logprobs)) == ([B], [scored(B, 1, 1)])
        assert not response.prompt_logprobs
        assert await call.read() is grpc.aio.EOF


async def test_a_first_token_without_its_prompt_is_a_loss(tmp_path: Path) -> None:
    async with text_stage(tmp_path) as stage, client_of(stage) as client:

        async def forgetful(session: Session) -> None:
            await session.say("a")

        stage.agent.script = forgetful
        stage.scheduler.session_script = stage.scheduler.one_start
        with pytest.raises(openai.APIError):
            await client.chat.completions.create(
                **ASKED, extra_body={"prompt_logprobs": 0}, extra_headers={"x-deadline-ms": "500"}
            )
        failed = await stage.scheduler.hear("session_failed")
        assert "log probabilities" in failed.failure.message


async def test_tokens_of_an_agent_that_scores_none_have_no_numbers(tmp_path: Path) -> None:
    """An agent of an older release knows nothing of log probabilities."""
    async with text_stage(tmp_path) as stage, client_of(stage) as client:

        async def older(session: Session) -> None:
            await session.say("a", finish="length")

        stage.agent.script = older
        answer = await client.completions.create(model="tiny", prompt="ab", logprobs=1)
        found = answer.choices[0].logprobs
        assert found is not None
        assert (found.tokens, found.token_logprobs, found.top_logprobs) == (["a"], [None], [None])


async def test_the_end_is_shown_to_who_asks_for_it(running: TextStage) -> None:
    async with client_of(running) as client:
        extra = {"include_stop_str_in_output": True, "skip_special_tokens": False}
        chat = await client.chat.completions.create(**ASKED, logprobs=True, extra_body=extra)
        assert chat.choices[0].message.content == SAID + "<|im_end|>"
        found = chat.choices[0].logprobs
        assert found is not None
        assert found.content is not None
        assert found.content[-1].token == "<|im_end|>"
        text = await client.chat.completions.create(
            **ASKED, stop="é", extra_body={"include_stop_str_in_output": True}
        )
        assert text.choices[0].message.content == "Hé"


async def test_bad_words_become_tokens_of_their_own(running: TextStage) -> None:
    async with client_of(running) as client:
        await client.chat.completions.create(
            **ASKED,
            extra_body={
                "bad_words": ["no", " no"],
                "stop_token_ids": [7],
                "allowed_token_ids": [9],
            },
        )
    sampling = running.agent.frames[-1].session_rows[0].opening.sampling
    sequences = [list(each.token_ids) for each in sampling.bad_token_ids]
    assert sequences == [tokens_of("no"), tokens_of(" no")]
    assert not sampling.bad_words, "texts stay at the gateway"
    assert (list(sampling.stop_token_ids), list(sampling.allowed_token_ids)) == ([7], [9])


def test_bytes_of_tokens_are_those_of_their_text() -> None:
    tokenizer = tiny_tokenizer()
    read = TokenBytes(table_of(tokenizer))
    text = "aé🙂 \n<|im_end|>"
    assert b"".join(map(read.of, tokenizer.encode(text).ids)).decode() == text
    assert read.of(10**6) == b""


@pytest.mark.parametrize(
    ("decoder", "expected"),
    [
        (None, [b"\xe2\x96\x81a", b"b", b"<0xC3>"]),
        (decoders.Metaspace(), [b" a", b"b", b"<0xC3>"]),
        (
            decoders.Sequence(
                [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
            ),
            [b" a", b"b", b"\xc3"],
        ),
    ],
)
def test_vocabularies_of_every_kind_are_read(decoder: object, expected: list[bytes]) -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"▁a": 0, "b": 1, "<0xC3>": 2}, merges=[]))
    if decoder is not None:
        tokenizer.decoder = decoder
    read = TokenBytes(table_of(tokenizer))
    assert [read.of(token) for token in range(3)] == expected


def test_a_part_of_a_character_is_named_by_its_bytes() -> None:
    assert token_text(b"\xf0\x9f") == "bytes:\\xf0\\x9f"
    assert token_text("é".encode()) == "é"
