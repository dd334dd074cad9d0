"""Calls of tools, reasoning and forms of answers through `/v1/responses` and `/v1/messages`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from chat_texts.tool_templates import QWEN3
from generation_harness import TextStage
from shared_helpers.scripted_answers import model_that_says, prompt_of

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "Says the weather.",
    "parameters": CITY,
    "strict": False,
}
CUSTOM = {"name": "weather", "description": "Says the weather.", "input_schema": CITY}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
BROKEN = '<tool_call>\n{"name": "weather", "arguments": {"city": "Be'


def grammar_of(stage: TextStage) -> str:
    return stage.agent.frames[-1].session_rows[0].opening.sampling.grammar


async def test_a_response_calls_a_function_and_goes_on_with_its_output(tmp_path: Path) -> None:
    asked = {"model": "tiny", "input": "How is it outside?", "tools": [WEATHER]}
    async with model_that_says(tmp_path, f"Let me see.{CALL}") as (stage, client):
        found = await client.responses.create(**asked)
        message, call = found.output
        assert (message.type, message.content[0].text) == ("message", "Let me see.")
        assert (call.type, call.name, call.status) == ("function_call", "weather", "completed")
        assert json.loads(call.arguments) == {"city": "Bern"}
        assert "Says the weather." in prompt_of(stage)
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "12 degrees"}
        await client.responses.create(
            model="tiny", input=[output], previous_response_id=found.id, tools=[WEATHER]
        )
        kept = prompt_of(stage)
        assert CALL in kept
        assert "<tool_response>\n12 degrees\n</tool_response>" in kept
        # Whoever keeps the conversation himself sends the same.
        said = [{"role": "user", "content": asked["input"]}, *found.output, output]
        await client.responses.create(model="tiny", input=said, tools=[WEATHER], store=False)
        assert prompt_of(stage) == kept


async def test_a_streamed_response_has_the_events_of_its_calls(tmp_path: Path) -> None:
    asked = {"model": "tiny", "input": "How is it outside?", "tools": [WEATHER]}
    async with model_that_says(tmp_path, f"So.{CALL}") as (_, client):
        events = [event async for event in await client.responses.create(**asked, stream=True)]
        async with client.responses.stream(**asked) as stream:
            final = await stream.get_final_response()
    kinds = [event.type for event in events]
    assert kinds.count("response.output_item.added") == 2
    assert kinds.count("response.output_item.done") == 2
    first = kinds.index("response.function_call_arguments.delta")
    assert kinds.index("response.output_text.done") < first
    deltas = [e for e in events if e.type == "response.function_call_arguments.delta"]
    assert "".join(each.delta for each in deltas) == '{"city": "Bern"}'
    assert {each.output_index for each in deltas} == {1}
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.completed"
    assert [item.type for item in final.output] == ["message", "function_call"]
    assert final.output[1].arguments == '{"city": "Bern"}'


async def test_a_call_that_is_cut_off_is_no_call(tmp_path: Path) -> None:
    asked = {"model": "tiny", "input": "hi", "tools": [WEATHER]}
    async with model_that_says(tmp_path, BROKEN, finish="length") as (stage, client):
        found = await client.responses.create(**asked)
        assert found.status == "incomplete"
        assert found.output[-1].status == "incomplete"
        said = [{"role": "user", "content": "hi"}]
        message = await answered(stage, messages=said, tools=[CUSTOM])
        assert message["stop_reason"] == "max_tokens"
        assert message["content"][-1] == {"type": "text", "text": BROKEN}


async def test_choices_of_tools_and_forms_become_grammars(tmp_path: Path) -> None:
    async with model_that_says(tmp_path, CALL) as (stage, client):
        asked = {"model": "tiny", "input": "hi", "tools": [WEATHER]}
        for choice in ("required", {"type": "function", "name": "weather"}):
            await client.responses.create(**asked, tool_choice=choice)
            assert "weather" in grammar_of(stage)
        await client.responses.create(**asked, tool_choice="none")
        assert grammar_of(stage) == ""
        assert "Says the weather." not in prompt_of(stage)
        form = {"type": "json_schema", "name": "city", "schema": CITY, "strict": True}
        await client.responses.create(model="tiny", input="hi", text={"format": form})
        assert "city" in grammar_of(stage)


async def test_reasoning_is_an_item_of_its_own(tmp_path: Path) -> None:
    text = "<think>\nhm\n</think>\n\nyes"
    async with model_that_says(tmp_path, text, template=QWEN3) as (stage, client):
        found = await client.responses.create(model="tiny", input="hi")
        assert [item.type for item in found.output] == ["reasoning", "message"]
        assert found.output[0].content[0].text.strip() == "hm"
        assert found.output_text.strip() == "yes"
        stream = await client.responses.create(model="tiny", input="hi", stream=True)
        events = [event async for event in stream]
        thought = [e.delta for e in events if e.type == "response.reasoning_text.delta"]
        assert "".join(thought).strip() == "hm"
        message = await answered(stage, messages=[{"role": "user", "content": "hi"}])
        assert [block["text"].strip() for block in message["content"]] == ["yes"]


async def answered(stage: TextStage, **body: Any) -> Any:
    """The message that answers; of a stream its events."""
    known = {"model": "tiny", "max_tokens": 200}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{stage.http}/v1/messages", json=known | body) as answer,
    ):
        assert answer.status == 200, await answer.text()
        if not body.get("stream"):
            return await answer.json()
        blocks = (await answer.text()).strip().split("\n\n")
        return [json.loads(each.partition("data: ")[2]) for each in blocks]


async def test_a_message_uses_a_tool_and_goes_on_with_its_result(tmp_path: Path) -> None:
    said = [{"role": "user", "content": "How is it outside?"}]
    async with model_that_says(tmp_path, f"Let me see.{CALL}") as (stage, _):
        found = await answered(stage, messages=said, tools=[CUSTOM])
        text, call = found["content"]
        assert text == {"type": "text", "text": "Let me see."}
        assert (call["type"], call["name"]) == ("tool_use", "weather")
        assert call["input"] == {"city": "Bern"}
        assert found["stop_reason"] == "tool_use"
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": "12 degrees"}
        more = [
            *said,
            {"role": "assistant", "content": found["content"]},
            {"role": "user", "content": [result, {"type": "text", "text": "and now?"}]},
        ]
        await answered(stage, messages=more, tools=[CUSTOM])
        prompt = prompt_of(stage)
        assert CALL in prompt
        assert "<tool_response>\n12 degrees\n</tool_response>" in prompt
        assert "and now?" in prompt
        for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
            await answered(stage, messages=said, tools=[CUSTOM], tool_choice=choice)
            assert "weather" in grammar_of(stage)


async def test_a_streamed_message_has_blocks_for_text_and_tools(tmp_path: Path) -> None:
    said = [{"role": "user", "content": "hi"}]
    async with model_that_says(tmp_path, f"So.{CALL}") as (stage, _):
        events = await answered(stage, messages=said, tools=[CUSTOM], stream=True)
    starts = [each for each in events if each["type"] == "content_block_start"]
    assert [each["content_block"]["type"] for each in starts] == ["text", "tool_use"]
    assert [each["index"] for each in starts] == [0, 1]
    assert starts[1]["content_block"]["input"] == {}
    pieces = [
        each["delta"]["partial_json"]
        for each in events
        if each["type"] == "content_block_delta" and each["index"] == 1
    ]
    assert json.loads("".join(pieces)) == {"city": "Bern"}
    assert [each["type"] for each in events].count("content_block_stop") == 2
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    "item",
    [
        {"type": "function_call", "call_id": "c", "name": "", "arguments": "{}"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "["},
        {"type": "function_call", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "output": "x"},
    ],
)
async def test_items_that_are_wrong_are_refused(tmp_path: Path, item: dict[str, Any]) -> None:
    async with model_that_says(tmp_path, "a") as (_, client):
        with pytest.raises(openai.BadRequestError) as raised:
            await client.responses.create(
                model="tiny", input=[{"role": "user", "content": "hi"}, item], tools=[WEATHER]
            )
        assert raised.value.param == "input"
