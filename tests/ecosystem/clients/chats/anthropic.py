"""Anthropic's own client of Python."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import anthropic
from features import API_KEY, BASE_URL, CHAT_MODEL, error_of, feature, report
from pydantic import BaseModel

client = anthropic.Anthropic(base_url=BASE_URL, api_key=API_KEY, max_retries=0)
ASKED: list[Any] = [{"role": "user", "content": "What will the weather be like in Paris?"}]
SHORT: dict[str, Any] = {
    "model": CHAT_MODEL,
    "messages": ASKED,
    "max_tokens": 8,
    "extra_body": {"temperature": 0},
}
LONG = SHORT | {"max_tokens": 100}
TOOL = {
    "name": "show_weather",
    "description": "Shows the weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Bern", "Paris", "Oslo"]}, "celsius": {"type": "boolean"}},
        "required": ["city", "celsius"],
        "additionalProperties": False,
    },
}


class Weather(BaseModel):
    """What the weather is like."""

    city: Literal["Bern", "Paris", "Oslo"]
    celsius: bool


@feature("messages.create, with system and stop_sequences")
def message() -> None:
    answer = client.messages.create(**SHORT, system="Be kind.", stop_sequences=["zzz"])
    assert answer.content[0].type == "text"
    assert answer.content[0].text
    assert answer.stop_reason == "max_tokens"
    assert answer.usage.output_tokens == 8


@feature("messages.stream, and stream=True")
def stream() -> None:
    whole = client.messages.create(**SHORT).content[0].text
    with client.messages.stream(**SHORT) as events:
        assert "".join(events.text_stream) == whole
        assert events.get_final_message().usage.output_tokens == 8
    kinds = [event.type for event in client.messages.create(**SHORT, stream=True)]
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"


@feature("tools, tool_choice any or named; the result sent back")
def tools() -> None:
    for choice in ({"type": "any"}, {"type": "tool", "name": "show_weather"}):
        answer = client.messages.create(**LONG, tools=[TOOL], tool_choice=choice)
        assert answer.stop_reason == "tool_use"
        (call, *_) = [block for block in answer.content if block.type == "tool_use"]
        Weather.model_validate(call.input)
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "18"}
        for block in answer.content
        if block.type == "tool_use"
    ]
    said = [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]
    again = SHORT | {"messages": [*ASKED, *said]}
    assert client.messages.create(**again, tools=[TOOL], tool_choice={"type": "none"}).content


@feature("tools in a stream")
def streamed_tools() -> None:
    choice: Any = {"type": "tool", "name": "show_weather", "disable_parallel_tool_use": True}
    with client.messages.stream(**LONG, tools=[TOOL], tool_choice=choice) as events:
        pieces = [event.partial_json for event in events if event.type == "input_json"]
        (call,) = events.get_final_message().content
    Weather.model_validate(call.input)
    assert len(pieces) > 1


@feature("messages.parse, output_config")
def parse() -> None:
    answer = client.messages.parse(**LONG, output_format=Weather)
    assert isinstance(answer.parsed_output, Weather)


@feature("messages.count_tokens")
def count_tokens() -> None:
    counted = client.messages.count_tokens(model=CHAT_MODEL, messages=ASKED)
    assert counted.input_tokens == client.messages.create(**SHORT).usage.input_tokens


@feature("models.list, models.retrieve")
def models() -> None:
    listed = list(client.models.list())
    assert CHAT_MODEL in [model.id for model in listed]
    assert all(model.display_name for model in listed)
    assert client.models.retrieve(CHAT_MODEL).type == "model"


@feature("AsyncAnthropic, with a stream")
async def asynchronous() -> None:
    other = anthropic.AsyncAnthropic(base_url=BASE_URL, api_key=API_KEY)
    async with other, other.messages.stream(**SHORT) as events:
        assert [text async for text in events.text_stream]


@feature("typed errors: NotFoundError, AuthenticationError, BadRequestError")
def errors() -> None:
    wrong = client.with_options(api_key="wrong")
    for kind, asked_of, change in (
        (anthropic.NotFoundError, client, {"model": "nobody"}),
        (anthropic.AuthenticationError, wrong, {}),
        (anthropic.BadRequestError, client, {"max_tokens": 0}),
    ):
        error_of(kind, partial(asked_of.messages.create, **SHORT | change))


@feature("images, documents", refused="'image' is not offered here")
def images() -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
    content = [{"type": "image", "source": source}, {"type": "text", "text": "What is this?"}]
    client.messages.create(**SHORT | {"messages": [{"role": "user", "content": content}]})


@feature("thinking", refused="thinking: is not offered")
def thinking() -> None:
    client.messages.create(**SHORT, thinking={"type": "enabled", "budget_tokens": 1024})


@feature("tools that Anthropic runs", refused="no other tools are offered")
def tools_of_the_server() -> None:
    client.messages.create(**SHORT, tools=[{"type": "web_search_20250305", "name": "web_search"}])


@feature(
    "messages.batches",
    refused="404",
    because="there is no such path: requests are answered one by one, and at once",
)
def batches() -> None:
    client.messages.batches.list()


report("anthropic")
