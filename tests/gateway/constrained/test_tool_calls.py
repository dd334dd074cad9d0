"""Calls and reasoning as the unmodified `openai` client sees them, against a real gateway."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest

from catenary_protos.catenary.v1 import generation_pb2
from chat_texts.tool_templates import DEEPSEEK, HERMES, LLAMA3, MISTRAL, QWEN3, THINKING
from generation_harness import Session, TextStage, generating, text_stage
from shared_helpers.scripted_answers import SESSION_TOKENS, model_that_says, prompt_of
from small_models.tiny_tokenizer import END, MORE

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "Says the weather.", "parameters": CITY},
}
NOW = {"type": "function", "function": {"name": "now"}}
STRICT = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
SAID = [{"role": "user", "content": "How is it outside?"}]
ASKED: dict[str, Any] = {"model": "tiny", "messages": SAID, "tools": [WEATHER, NOW]}
ONE = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
TWO = f'{ONE}\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>'


def sampling_of(stage: TextStage) -> generation_pb2.SamplingParameters:
    return stage.agent.frames[-1].session_rows[0].opening.sampling


async def test_calls_are_answered_whole(tmp_path: Path) -> None:
    async with model_that_says(tmp_path, f"Let me see.\n{TWO}") as (stage, client):
        answer = await client.chat.completions.create(**ASKED)
        (choice,) = answer.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Let me see.\n"
        first, second = choice.message.tool_calls or ()
        assert (first.type, first.function.name) == ("function", "weather")
        assert json.loads(first.function.arguments) == {"city": "Bern"}
        assert (second.function.name, second.function.arguments) == ("now", "{}")
        assert first.id.startswith("call_")
        assert first.id != second.id
        assert "Says the weather." in prompt_of(stage), "the tiny template shows no tools itself"
        assert sampling_of(stage).grammar == ""
        # The client's own objects are taken back as history.
        result = {"role": "tool", "tool_call_id": first.id, "content": "12 degrees"}
        said = [*SAID, choice.message, result]
        await client.chat.completions.create(**ASKED | {"messages": said})
        prompt = prompt_of(stage)
        assert ONE in prompt
        assert "<tool_response>\n12 degrees\n</tool_response>" in prompt


async def test_an_answer_that_is_all_calls_has_no_content(tmp_path: Path) -> None:
    async with model_that_says(tmp_path, ONE, template=HERMES) as (stage, client):
        raw = await client.chat.completions.with_raw_response.create(**ASKED)
        message = json.loads(raw.text)["choices"][0]["message"]
        assert message["content"] is None
        assert set(message) == {"role", "content", "refusal", "tool_calls"}
        assert '<tools>\n{"type": "function"' in prompt_of(stage)


async def test_calls_are_streamed_as_openai_does(tmp_path: Path) -> None:
    async with model_that_says(tmp_path, f"So. {TWO}") as (_, client):
        chunks = [
            chunk.choices[0]
            async for chunk in await client.chat.completions.create(**ASKED, stream=True)
        ]
    first, last = chunks[0].delta, chunks[-1]
    assert (first.role, first.content) == ("assistant", None)
    assert last.finish_reason == "tool_calls"
    assert all(chunk.finish_reason is None for chunk in chunks[:-1])
    assert "".join(chunk.delta.content or "" for chunk in chunks) == "So. "
    pieces = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
    for index, (name, arguments) in enumerate([("weather", '{"city": "Bern"}'), ("now", "{}")]):
        head, *rest = [piece for piece in pieces if piece.index == index]
        assert (head.type, head.function.name, head.function.arguments) == ("function", name, "")
        assert head.id.startswith("call_")
        assert all(piece.id is piece.type is piece.function.name is None for piece in rest)
        assert "".join(piece.function.arguments for piece in rest) == arguments


async def test_arguments_come_before_the_call_is_complete(tmp_path: Path) -> None:
    models = [generating(session_tokens=SESSION_TOKENS)]
    async with text_stage(tmp_path, models=models) as stage:
        url = f"{stage.http}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0) as client:
            asking = asyncio.create_task(client.chat.completions.create(**ASKED, stream=True))
            session = await stage.agent.session()
            await session.say('<tool_call>\n{"name": "weather", "arguments": {"city": "Be')
            got = ""
            async for chunk in await asking:
                for call in chunk.choices[0].delta.tool_calls or ():
                    got += call.function.arguments
                if got == '{"city": "Be':
                    await session.say('rn"}}\n</tool_call>', finish="stop")
            assert got == '{"city": "Bern"}'


@pytest.mark.parametrize("template", [HERMES, QWEN3])
async def test_the_clients_own_accumulator_puts_calls_together(
    tmp_path: Path, template: str
) -> None:
    async with model_that_says(tmp_path, f"So. {TWO}", template=template) as (stage, client):
        now = {**NOW, "function": {**NOW["function"], "strict": True}}
        async with client.chat.completions.stream(**ASKED | {"tools": [STRICT, now]}) as stream:
            done = [
                event.arguments
                async for event in stream
                if event.type == "tool_calls.function.arguments.done"
            ]
            answer = await stream.get_final_completion()
        assert done == ['{"city": "Bern"}', "{}"]
        (choice,) = answer.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "So. "
        first, second = choice.message.tool_calls or ()
        assert first.function.parsed_arguments == {"city": "Bern"}
        assert second.function.name == "now"
        assert "<tool_call>" in sampling_of(stage).grammar, "strict tools are held to a grammar"


FORMS = [
    (
        {"template": LLAMA3, "special": ("<|python_tag|>",)},
        ['{"name": "weather", "parameters": {"city": "Bern"}}'],
    ),
    (
        {"template": LLAMA3, "special": ("<|python_tag|>",)},
        [MORE, '{"name": "weather", "parameters": {"city": "Bern"}}'],
    ),
    (
        {"template": MISTRAL, "special": ("[TOOL_CALLS]",)},
        [MORE, ' [{"name": "weather", "arguments": {"city": "Bern"}}]'],
    ),
    (
        {"template": MISTRAL, "special": ("[ARGS]", "[TOOL_CALLS]")},
        [MORE + 1, "weather", MORE, '{"city": "Bern"}'],
    ),
    (
        {"template": HERMES, "special": ("<tool_call>", "</tool_call>")},
        [MORE, '{"name": "weather", "arguments": {"city": "Bern"}}', MORE + 1],
    ),
    (
        {"settings": "tool_parser: json"},
        ['```json\n{"name": "weather", "arguments": {"city": "Bern"}}\n```'],
    ),
]


@pytest.mark.parametrize(("files", "parts"), FORMS)
async def test_every_form_is_read_where_its_marks_are_special_tokens(
    tmp_path: Path, files: dict[str, Any], parts: list[str | int]
) -> None:
    async def script(session: Session) -> None:
        for part in parts:
            await (session.say(part) if isinstance(part, str) else session.send(part))
        await session.send(END, "stop")

    async with model_that_says(tmp_path, "", **files) as (stage, client):
        stage.agent.script = script
        (choice,) = (await client.chat.completions.create(**ASKED)).choices
        assert choice.message.content is None
        (call,) = choice.message.tool_calls or ()
        assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Bern"}')
        assert len(call.id) == (9 if files.get("template") == MISTRAL else 29)
        # Without tools the marks stay what they are: no text.
        (plain,) = (await client.chat.completions.create(model="tiny", messages=SAID)).choices
        assert plain.message.tool_calls is None
        assert plain.message.content == "".join(part for part in parts if isinstance(part, str))


async def test_calls_that_break_off_are_content(tmp_path: Path) -> None:
    broken = ONE[:-20]
    async with model_that_says(tmp_path, broken, finish="length") as (_, client):
        (choice,) = (await client.chat.completions.create(**ASKED)).choices
        assert (choice.finish_reason, choice.message.tool_calls) == ("length", None)
        assert choice.message.content == broken


@pytest.mark.parametrize(
    ("choice", "schemas"),
    [("required", 2), ({"type": "function", "function": {"name": "now"}}, 1)],
)
async def test_calls_that_must_be_are_forced(tmp_path: Path, choice: Any, schemas: int) -> None:
    async with model_that_says(tmp_path, TWO) as (stage, client):
        await client.chat.completions.create(**ASKED, tool_choice=choice)
        (only,) = json.loads(sampling_of(stage).grammar)["grammars"]
        grammar = only["lark_grammar"]
        assert grammar.startswith('start: "<tool_call>"')
        assert grammar.count("%json") == schemas


async def test_tools_that_may_not_be_called_are_not_shown(tmp_path: Path) -> None:
    async with model_that_says(tmp_path, ONE) as (stage, client):
        (choice,) = (await client.chat.completions.create(**ASKED, tool_choice="none")).choices
        assert (choice.message.content, choice.finish_reason) == (ONE, "stop")
        assert "weather" not in prompt_of(stage)


async def test_a_model_without_calls_refuses_tools(tmp_path: Path) -> None:
    files = {"settings": "tool_parser: none"}
    async with model_that_says(tmp_path, "Hello.", **files) as (_, client):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(**ASKED)
        assert caught.value.param == "tools"
        assert (await client.chat.completions.create(**ASKED, tool_choice="none")).choices


THOUGHT = "<think>\nIt may rain.\n</think>\n\nTake a coat."


@pytest.mark.parametrize(
    ("files", "text"),
    [
        ({"template": QWEN3}, THOUGHT),
        ({"template": THINKING}, THOUGHT.removeprefix("<think>\n")),
        ({"template": DEEPSEEK}, THOUGHT.removeprefix("<think>\n")),
        ({"settings": "reasoning_parser: qwen3"}, THOUGHT),
    ],
)
async def test_reasoning_is_told_apart(tmp_path: Path, files: dict[str, str], text: str) -> None:
    async with model_that_says(tmp_path, text, **files) as (_, client):
        asked = {"model": "tiny", "messages": SAID}
        (choice,) = (await client.chat.completions.create(**asked)).choices
        extra = choice.message.model_extra or {}
        assert extra["reasoning_content"] == "It may rain."
        assert (choice.message.content, choice.finish_reason) == ("Take a coat.", "stop")
        deltas = [
            chunk.choices[0].delta
            async for chunk in await client.chat.completions.create(**asked, stream=True)
        ]
        thought = [(delta.model_extra or {}).get("reasoning_content") or "" for delta in deltas]
        assert "".join(thought) == "It may rain."
        assert "".join(delta.content or "" for delta in deltas) == "Take a coat."
        silent = await client.chat.completions.create(
            **asked, extra_body={"include_reasoning": False}
        )
        assert silent.choices[0].message.model_extra == {}
        assert silent.choices[0].message.content == "Take a coat."


async def test_reasoning_may_be_switched_off_by_the_template(tmp_path: Path) -> None:
    async with model_that_says(tmp_path, "\nTake a coat.", template=QWEN3) as (stage, client):
        answer = await client.chat.completions.create(
            model="tiny",
            messages=SAID,
            extra_body={"chat_template_kwargs": {"enable_thinking": False}},
        )
        assert answer.choices[0].message.content == "Take a coat."
        assert prompt_of(stage).endswith("<think>\n\n</think>\n\n")


async def test_a_thinking_model_calls_after_its_thoughts(tmp_path: Path) -> None:
    text = f"<think>I could <tool_call>.</think>\n\n{ONE}"
    async with model_that_says(tmp_path, text, template=QWEN3) as (stage, client):
        asked = ASKED | {"tool_choice": "required"}
        (choice,) = (await client.chat.completions.create(**asked)).choices
        extra = choice.message.model_extra or {}
        assert extra["reasoning_content"] == "I could <tool_call>."
        assert choice.message.content is None
        (call,) = choice.message.tool_calls or ()
        assert call.function.name == "weather"
        # The grammar begins behind the thoughts.
        first, second = json.loads(sampling_of(stage).grammar)["grammars"]
        assert "think" in first["lark_grammar"]
        assert second["lark_grammar"].startswith('start: "<tool_call>"')


async def test_completions_are_text_as_it_is(tmp_path: Path) -> None:
    text = THOUGHT + ONE
    async with model_that_says(tmp_path, text, template=QWEN3) as (_, client):
        answer = await client.completions.create(model="tiny", prompt="x", max_tokens=400)
        assert answer.choices[0].text == text
