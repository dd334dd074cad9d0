"""Several answers to one request, by the unmodified `openai` client: all of them, or none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest

from catenary_protos.catenary.v1 import common_pb2, frame_pb2, generation_pb2, scheduler_pb2
from catenary_services.security.keys import add_key
from gateway_harness import Down
from generation_harness import Session, TextStage, text_stage
from small_models.tiny_tokenizer import END, tokens_of

ASKED = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


async def by_seed(session: Session) -> None:
    """Says which seed it has, and as many letters as the seed is high."""
    seed = session.opening.sampling.seed
    await session.say(f"{seed}" + "x" * seed, finish="stop")


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[TextStage]:
    async with text_stage(tmp_path) as started:
        started.agent.script = by_seed
        yield started


def client_of(stage: TextStage, **facts: object) -> openai.AsyncOpenAI:
    known: dict[str, object] = {"api_key": "any", "max_retries": 0, "timeout": 10.0}
    return openai.AsyncOpenAI(base_url=f"{stage.http}/v1", **(known | facts))


def openings(stage: TextStage) -> list[frame_pb2.SessionOpening]:
    return [frame.session_rows[0].opening for frame in stage.agent.frames]


async def test_choices_have_seeds_of_their_own_and_one_prompt(running: TextStage) -> None:
    async with client_of(running) as client:
        chat = await client.chat.completions.create(**ASKED, n=3, seed=4)
        assert [choice.index for choice in chat.choices] == [0, 1, 2]
        texts = [choice.message.content for choice in chat.choices]
        assert texts == ["4xxxx", "5xxxxx", "6xxxxxx"]
        assert chat.usage is not None
        assert (chat.usage.prompt_tokens, chat.usage.completion_tokens) == (21, 6 + 7 + 8)
        assert len({tuple(each.token_ids) for each in openings(running)}) == 1


async def test_choices_on_one_ring_share_the_prompt_of_the_first(tmp_path: Path) -> None:
    async with text_stage(tmp_path, agents=2) as stage, client_of(stage) as client:
        starts = iter(["agent-0", "agent-0", "agent-1"])

        def script(submit: scheduler_pb2.SubmitSession) -> list[Down]:
            return [stage.scheduler.start_session(submit.request_id, next(starts))]

        stage.scheduler.session_script = script
        asking = asyncio.create_task(client.chat.completions.create(**ASKED, n=3))
        first, second = await stage.agents[0].session(), await stage.agents[0].session()
        third = await stage.agents[1].session()
        shared = [each.opening.shares_prompt_of for each in (first, second, third)]
        assert shared == [0, first.session_id, 0]
        # Whoever is started again reads all of it.
        await second.fail()
        await stage.scheduler.hear("session_failed")
        stage.scheduler.send(stage.scheduler.start_session(second.opening.request_id, "agent-0"))
        again = await stage.agents[0].session()
        assert again.opening.shares_prompt_of == 0
        for session, text in ((first, "a"), (again, "b"), (third, "c")):
            await session.say(text, finish="stop")
        answer = await asking
        assert [choice.message.content for choice in answer.choices] == ["a", "b", "c"]


async def test_a_scored_prompt_is_not_shared(running: TextStage) -> None:
    async with client_of(running) as client:
        with pytest.raises(openai.APIError):  # this agent scores nothing
            await client.completions.create(
                model="tiny",
                prompt="ab",
                n=2,
                extra_body={"prompt_logprobs": 0},
                extra_headers={"x-deadline-ms": "300"},
            )
    assert {each.shares_prompt_of for each in openings(running)} == {0}


async def test_choices_of_a_stream_take_turns(running: TextStage) -> None:
    async with client_of(running) as client:
        stream = await client.chat.completions.create(
            **ASKED, n=3, seed=1, stream=True, stream_options={"include_usage": True}
        )
        texts, roles, ends = ["", "", ""], [0, 0, 0], [0, 0, 0]
        async for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                roles[choice.index] += choice.delta.role is not None
                ends[choice.index] += choice.finish_reason is not None
            usage = chunk.usage
        assert texts == ["1x", "2xx", "3xxx"]
        assert (roles, ends) == ([1, 1, 1], [1, 1, 1])
        assert usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens) == (21, 3 + 4 + 5)


async def test_a_choice_is_streamed_while_another_has_no_token(tmp_path: Path) -> None:
    async with text_stage(tmp_path) as stage, client_of(stage) as client:
        asking = asyncio.create_task(client.chat.completions.create(**ASKED, n=2, stream=True))
        first, second = await stage.agent.session(), await stage.agent.session()
        await second.say("b")
        stream = await asking
        got = [(await anext(stream)).choices[0] for _ in range(2)]
        assert [(each.index, each.delta.content) for each in got] == [(1, ""), (1, "b")]
        await first.say("a", finish="stop")
        await second.say("c", finish="stop")
        texts = {0: "", 1: "b"}
        async for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        assert texts == {0: "a", 1: "bc"}


@pytest.mark.parametrize("stream", [False, True])
async def test_prompts_follow_each_other_with_all_their_choices(
    running: TextStage, stream: bool
) -> None:
    async with client_of(running) as client:
        answer = await client.completions.create(
            model="tiny",
            prompt=["a", tokens_of("bcd")],
            n=2,
            seed=1,
            echo=True,
            stream=stream,
            extra_headers={"X-Request-Id": "mine"},
        )
        texts = ["", "", "", ""]
        if stream:
            async for chunk in answer:
                texts[chunk.choices[0].index] += chunk.choices[0].text
        else:
            texts = [choice.text for choice in answer.choices]
            assert answer.usage.prompt_tokens == 4
            assert answer.usage.completion_tokens == 3 + 4 + 3 + 4
        assert texts == ["a1x", "a2xx", "bcd1x", "bcd2xx"]
    ids = [each.id for each in running.gateway._plane.request_metrics.recent.latest(9)]
    assert sorted(ids) == ["mine", "mine-1", "mine-2", "mine-3"]


async def test_the_best_of_several_are_those_with_the_largest_sums(tmp_path: Path) -> None:
    async def scored(session: Session) -> None:
        """Two tokens whose log probabilities depend on the seed, and an end."""
        seed = session.opening.sampling.seed
        assert session.opening.sampling.HasField("logprobs")
        for token, logprob in ((tokens_of(str(seed))[0], -0.5), (END, -float(seed % 3))):
            said = generation_pb2.TokenLogprobs(token_id=token, logprob=logprob, rank=1)
            await session.send(token, "stop" if token == END else "", logprobs=said)

    async with text_stage(tmp_path) as stage, client_of(stage) as client:
        stage.agent.script = scored
        answer = await client.completions.create(
            model="tiny", prompt="ab", n=2, best_of=4, seed=1, temperature=1
        )
        # Sums: 1 has -1.5, 2 -2.5, 3 -0.5, 4 -1.5; of equal ones the first.
        assert [(each.index, each.text) for each in answer.choices] == [(0, "3"), (1, "1")]
        assert all(each.logprobs is None for each in answer.choices)
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 8)


async def test_a_client_that_goes_away_ends_all_its_choices(tmp_path: Path) -> None:
    async with text_stage(tmp_path) as stage, client_of(stage) as client:
        asking = asyncio.create_task(client.chat.completions.create(**ASKED, n=3, stream=True))
        sessions = [await stage.agent.session() for _ in range(3)]
        await sessions[1].say("a")
        await (await asking).close()
        cancelled = {(await stage.scheduler.hear("cancel")).request_id for _ in range(3)}
        assert cancelled == {session.opening.request_id for session in sessions}
        await stage.is_empty()


@pytest.mark.parametrize("stream", [False, True])
async def test_one_that_is_refused_ends_all(tmp_path: Path, stream: bool) -> None:
    async with text_stage(tmp_path) as stage, client_of(stage) as client:

        def script(submit: scheduler_pb2.SubmitSession) -> list[Down]:
            if submit.request_id != 2:
                return stage.scheduler.one_start(submit)
            failure = common_pb2.Failure(reason="OVERLOADED", message="full")
            rejected = scheduler_pb2.RejectRequest(request_id=2, failure=failure)
            return [Down(reject=rejected)]

        stage.scheduler.session_script = script
        with pytest.raises(openai.InternalServerError) as raised:
            await client.chat.completions.create(**ASKED, n=3, stream=stream)
        assert raised.value.status_code == 503
        await stage.is_empty()
        cancelled = {(await stage.scheduler.hear("cancel")).request_id for _ in range(2)}
        assert cancelled == {1, 3}


async def test_an_error_of_one_behind_the_first_token_ends_the_stream(tmp_path: Path) -> None:
    async with text_stage(tmp_path) as stage, client_of(stage) as client:
        asking = asyncio.create_task(client.chat.completions.create(**ASKED, n=2, stream=True))
        first, second = await stage.agent.session(), await stage.agent.session()
        await first.say("a")
        stream = await asking
        failure = common_pb2.Failure(reason="PARTITION_LOST", message="says so")
        number = second.opening.request_id
        rejected = scheduler_pb2.RejectRequest(request_id=number, failure=failure)
        stage.scheduler.send(Down(reject=rejected))
        with pytest.raises(openai.APIError, match="says so"):
            async for _ in stream:
                pass
        await stage.is_empty()


async def test_a_key_without_tokens_for_all_begins_none(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    key = add_key(keys, "small", ["infer:tiny"], {"tokens_per_s": 0.001, "token_burst": 100})
    async with text_stage(tmp_path, api_keys_file=keys) as stage:
        stage.agent.script = by_seed
        async with client_of(stage, api_key=key) as client:
            asked = ASKED | {"max_tokens": 30, "seed": 0}
            with pytest.raises(openai.RateLimitError):
                await client.chat.completions.create(**asked, n=4)
            await stage.is_empty()
            # The prompt counts once: 21 + 2 * 30 tokens.
            assert len((await client.chat.completions.create(**asked, n=2)).choices) == 2
