"""`/v1/responses` by the `openai` client, whole and streamed; what is kept, of whom, for how long."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import openai
import pytest

from catenary_gateway.openai_http.responses.response_store import ResponseStore, StoredResponse
from catenary_protos.catenary.v1 import common_pb2, scheduler_pb2
from catenary_services.security.keys import add_key
from gateway_harness import Down
from generation_harness import Session, TextStage
from shared_helpers.encoder_agent import all_paths_stage

ASKED = {"model": "tiny", "input": "hi"}
EVENTS = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
]


def asked_of(stage: TextStage) -> str:
    """The text that the agent was last asked to continue."""
    got = stage.agent.frames[-1].session_rows[0].opening.token_ids
    return "".join(chr(token - 3) if token > 2 else "|" for token in got)


async def test_a_text_is_answered(client: openai.AsyncOpenAI, running: TextStage) -> None:
    found = await client.responses.create(
        **ASKED, instructions="be", max_output_tokens=9, temperature=0, metadata={"a": "b"}
    )
    assert (found.output_text, found.status, found.object) == ("Hello!", "completed", "response")
    assert (found.instructions, found.metadata, found.temperature) == ("be", {"a": "b"}, 0)
    assert found.id.startswith("resp_")
    (item,) = found.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "completed")
    assert found.usage is not None
    assert found.usage.output_tokens == 7
    assert found.usage.total_tokens == found.usage.input_tokens + 7
    assert asked_of(running) == "|system\nbe|\n|user\nhi|\n|assistant\n"
    sampling = running.agent.frames[-1].session_rows[0].opening.sampling
    assert (sampling.max_tokens, sampling.temperature) == (9, 0)


async def test_messages_and_parts_are_read(client: openai.AsyncOpenAI, running: TextStage) -> None:
    await client.responses.create(
        model="tiny",
        input=[
            {"role": "developer", "content": "be"},
            {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "b", "annotations": []}],
            },
            {"role": "user", "content": "c"},
        ],
        store=False,
    )
    assert asked_of(running) == "|system\nbe|\n|user\na|\n|assistant\nb|\n|user\nc|\n|assistant\n"


async def test_a_stream_has_the_events_of_the_api_in_their_order(
    client: openai.AsyncOpenAI,
) -> None:
    events = [event async for event in await client.responses.create(**ASKED, stream=True)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert [kind for kind in kinds if kind != "response.output_text.delta"] == EVENTS
    assert kinds.index("response.output_text.delta") == 4
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == "Hello!"
    first, last = events[0].response, events[-1].response
    assert (first.status, first.output, first.id) == ("in_progress", [], last.id)
    assert (last.status, last.output_text) == ("completed", "Hello!")
    assert last.usage.output_tokens == 7
    assert (await client.responses.retrieve(last.id)).output_text == "Hello!"
    # The client's own helper puts the events together again.
    async with client.responses.stream(**ASKED) as stream:
        assert (await stream.get_final_response()).output_text == "Hello!"


async def test_an_answer_that_is_cut_is_incomplete(
    client: openai.AsyncOpenAI, running: TextStage
) -> None:
    async def cut(session: Session) -> None:
        await session.say("Hel", finish="length")

    running.agent.script = cut
    found = await client.responses.create(**ASKED)
    assert (found.status, found.output_text) == ("incomplete", "Hel")
    assert found.incomplete_details is not None
    assert found.incomplete_details.reason == "max_output_tokens"
    events = [event async for event in await client.responses.create(**ASKED, stream=True)]
    assert events[-1].type == "response.incomplete"


async def test_an_error_behind_the_first_token_is_a_failed_response(
    client: openai.AsyncOpenAI, running: TextStage
) -> None:
    running.agent.script = None
    asking = asyncio.create_task(client.responses.create(**ASKED, stream=True))
    session = await running.agent.session()
    await session.say("a")
    stream = await asking
    failure = common_pb2.Failure(reason="PARTITION_LOST", message="gone")
    asked = session.opening.request_id
    rejected = scheduler_pb2.RejectRequest(request_id=asked, failure=failure)
    running.scheduler.send(Down(reject=rejected))
    events = [event async for event in stream]
    assert events[-1].type == "response.failed"
    assert events[-1].response.error.message == "gone"
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(events[-1].response.id)


async def test_a_response_is_continued_read_and_deleted(
    client: openai.AsyncOpenAI, running: TextStage
) -> None:
    first = await client.responses.create(**ASKED, instructions="only here")
    second = await client.responses.create(
        model="tiny", input="more", previous_response_id=first.id
    )
    said = "|user\nhi|\n|assistant\nHello!|\n|user\nmore|\n|assistant\n"
    assert asked_of(running) == said
    assert second.previous_response_id == first.id
    assert (await client.responses.retrieve(first.id)).output_text == "Hello!"
    await client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError) as raised:
        await client.responses.retrieve(first.id)
    assert raised.value.code == "response_not_found"
    with pytest.raises(openai.BadRequestError) as refused:
        await client.responses.create(**ASKED, previous_response_id=first.id)
    assert refused.value.param == "previous_response_id"
    assert refused.value.code == "previous_response_not_found"
    # What continued it has its conversation.
    await client.responses.create(model="tiny", input="on", previous_response_id=second.id)
    assert asked_of(running).startswith("|user\nhi|\n|assistant\nHello!|\n|user\nmore|\n")
    unkept = await client.responses.create(**ASKED, store=False)
    assert unkept.store is False
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(unkept.id)


async def test_a_key_sees_its_own_responses_only(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    mine, other = (add_key(keys, name, ["infer:tiny"]) for name in ("mine", "other"))
    async with all_paths_stage(tmp_path, api_keys_file=keys) as stage:

        def client_of(key: str) -> openai.AsyncOpenAI:
            return openai.AsyncOpenAI(base_url=f"{stage.http}/v1", api_key=key, max_retries=0)

        async with client_of(mine) as one, client_of(other) as two, client_of("x") as nobody:
            kept = await one.responses.create(**ASKED)
            assert (await one.responses.retrieve(kept.id)).id == kept.id
            for call in (two.responses.retrieve, two.responses.delete):
                with pytest.raises(openai.NotFoundError):
                    await call(kept.id)
            with pytest.raises(openai.BadRequestError):
                await two.responses.create(**ASKED, previous_response_id=kept.id)
            with pytest.raises(openai.AuthenticationError):
                await nobody.responses.retrieve(kept.id)
            with pytest.raises(openai.PermissionDeniedError):
                await one.responses.create(model="sentences", input="hi")


async def test_nothing_is_kept_where_there_is_no_room(tmp_path: Path) -> None:
    async with all_paths_stage(tmp_path, kept_response_bytes=0) as stage:
        made = openai.AsyncOpenAI(base_url=f"{stage.http}/v1", api_key="x", max_retries=0)
        async with made as client:
            found = await client.responses.create(**ASKED)
            assert found.store is False
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(found.id)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def stored(size: int) -> StoredResponse:
    return StoredResponse({}, (), size)


def test_what_is_old_or_too_much_is_dropped_of_the_key_that_holds_most() -> None:
    clock = Clock()
    store = ResponseStore(1000, 60.0, clock)
    assert store.has_room(stored(125))
    assert not store.has_room(stored(126))
    store.keep("small", "s", stored(125))
    for number in range(20):
        store.keep("large", str(number), stored(125))
    assert store.nbytes <= 1000
    assert store.find("small", "s") is not None
    assert store.find("large", "0") is None
    assert store.find("large", "19") is not None
    clock.now_s = 59.0
    store.keep("late", "l", stored(125))
    clock.now_s = 60.0
    assert store.find("small", "s") is None
    assert store.find("late", "l") is not None
    assert store.nbytes == 125
    assert store.drop("late", "l")
    assert not store.drop("late", "l")
    assert store.nbytes == 0


WRONG = [
    ("model", {"model": None}),
    ("model", {"model": "toy"}),
    ("model", {"model": "sentences"}),
    ("input", {"input": None}),
    ("input", {"input": ""}),
    ("input", {"input": []}),
    ("input[0]", {"input": [5]}),
    ("input[0].role", {"input": [{"role": "tool", "content": "x"}]}),
    ("input[0].role", {"input": [{"role": ["user"], "content": "x"}]}),
    ("input[0].content", {"input": [{"role": "user"}]}),
    (
        "input[0].content[0].type",
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
    ),
    (
        "input[0].content[0].text",
        {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
    ),
    ("input[1].type", {"input": [{"role": "user", "content": "x"}, {"type": "file_search_call"}]}),
    ("input", {"input": "x" * 600}),
    ("instructions", {"instructions": 5}),
    ("max_output_tokens", {"max_output_tokens": 0}),
    ("max_output_tokens", {"max_output_tokens": 5000}),
    ("temperature", {"temperature": 3}),
    ("temperature", {"temperature": "warm"}),
    ("top_p", {"top_p": 0}),
    ("seed", {"seed": 1.5}),
    ("stop", {"stop": ["a"] * 17}),
    ("stream", {"stream": "yes"}),
    ("store", {"store": 1}),
    ("metadata", {"metadata": {str(n): "x" for n in range(17)}}),
    ("truncation", {"truncation": "auto"}),
    ("background", {"background": True}),
    ("conversation", {"conversation": "c"}),
    ("include", {"include": ["message.output_text.logprobs"]}),
    ("prompt", {"prompt": {"id": "p"}}),
    ("reasoning", {"reasoning": {"effort": "low"}}),
    ("tools[0].type", {"tools": [{"type": "web_search"}]}),
    ("tools[0].name", {"tools": [{"type": "function", "name": ""}]}),
    ("tool_choice", {"tool_choice": "required"}),
    ("tool_choice.name", {"tool_choice": {"type": "function", "name": "f"}}),
    ("max_tool_calls", {"max_tool_calls": 1}),
    ("top_logprobs", {"top_logprobs": 2}),
    ("text.format.type", {"text": {"format": {"type": "yaml"}}}),
    ("text.format", {"text": {"format": 5}}),
    ("previous_response_id", {"previous_response_id": "resp_1"}),
    ("chat_template_kwargs", {"chat_template_kwargs": {"messages": []}}),
    ("x-deadline-ms", {"header": "-1"}),
]


@pytest.mark.parametrize(("param", "asked"), WRONG)
async def test_what_is_wrong_or_not_offered_is_named(
    running: TextStage, param: str, asked: dict[str, object]
) -> None:
    headers = {"x-deadline-ms": str(asked["header"])} if "header" in asked else {}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(f"{running.http}/v1/responses", json=ASKED | asked) as answer,
    ):
        error = (await answer.json())["error"]
    assert (answer.status, error["param"]) == (400, param), error
    assert not running.agent.frames
