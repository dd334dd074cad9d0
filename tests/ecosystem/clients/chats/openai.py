"""OpenAI's own client of Python."""

from __future__ import annotations

import json
from functools import partial
from typing import Any, Literal

import openai
from features import API_KEY, BASE_URL, CHAT_MODEL, EMBEDDING_MODEL, error_of, feature, report
from pydantic import BaseModel, Field

client = openai.OpenAI(base_url=f"{BASE_URL}/v1", api_key=API_KEY, max_retries=0)
ASKED = [{"role": "user", "content": "What will the weather be like in Paris?"}]
SHORT: dict[str, Any] = {"model": CHAT_MODEL, "messages": ASKED, "temperature": 0, "max_tokens": 8}
LONG = SHORT | {"max_tokens": 100}


class Weather(BaseModel):
    """What the weather is like."""

    city: Literal["Bern", "Paris", "Oslo"]
    degrees: int = Field(ge=-50, le=50)


TOOL = openai.pydantic_function_tool(Weather, name="show_weather")
NAMED = {"type": "function", "function": {"name": "show_weather"}}


@feature("models.list, models.retrieve")
def models() -> None:
    listed = [model.id for model in client.models.list()]
    assert CHAT_MODEL in listed
    assert client.models.retrieve(CHAT_MODEL).object == "model"


@feature("chat.completions.create")
def chat() -> None:
    answer = client.chat.completions.create(**SHORT)
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8


@feature("chat: stream=True, with usage")
def stream() -> None:
    whole = client.chat.completions.create(**SHORT).choices[0].message.content
    chunks = list(
        client.chat.completions.create(**SHORT, stream=True, stream_options={"include_usage": True})
    )
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == whole
    assert chunks[-1].usage is not None


@feature("chat.completions.stream, its events")
def stream_events() -> None:
    with client.chat.completions.stream(**SHORT) as events:
        kinds = {event.type for event in events}
        whole = events.current_completion_snapshot
    assert {"chunk", "content.delta"} <= kinds
    assert whole.choices[0].message.content


@feature("chat: tools, tool_choice required or named; the result sent back")
def tools() -> None:
    for choice in ("required", NAMED):
        answer = client.chat.completions.create(**LONG, tools=[TOOL], tool_choice=choice)
        message = answer.choices[0].message
        assert answer.choices[0].finish_reason == "tool_calls"
        assert message.tool_calls
        Weather.model_validate_json(message.tool_calls[0].function.arguments)
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "18"} for call in message.tool_calls
    ]
    again = SHORT | {"messages": [*ASKED, message, *results]}
    assert client.chat.completions.create(**again, tools=[TOOL], tool_choice="none")


@feature("chat: tools in a stream")
def streamed_tools() -> None:
    with client.chat.completions.stream(**LONG, tools=[TOOL], tool_choice=NAMED) as events:
        pieces = [
            e.arguments_delta for e in events if e.type == "tool_calls.function.arguments.delta"
        ]
        final = events.get_final_completion()
    (call,) = final.choices[0].message.tool_calls or ()
    assert isinstance(call.function.parsed_arguments, Weather)
    assert "".join(pieces) == call.function.arguments
    assert len(pieces) > 1


@feature("chat: response_format json_schema")
def json_schema() -> None:
    described = {"name": "weather", "strict": True, "schema": TOOL["function"]["parameters"]}
    answer = client.chat.completions.create(
        **LONG, response_format={"type": "json_schema", "json_schema": described}
    )
    Weather.model_validate_json(answer.choices[0].message.content or "")


@feature("chat.completions.parse with a class, also with tools")
def parse() -> None:
    answer = client.chat.completions.parse(**LONG, response_format=Weather)
    assert isinstance(answer.choices[0].message.parsed, Weather)
    called = client.chat.completions.parse(**LONG, tools=[TOOL], tool_choice="required")
    calls = called.choices[0].message.tool_calls or []
    assert isinstance(calls[0].function.parsed_arguments, Weather)


@feature("chat: response_format json_object")
def json_object() -> None:
    messages = [{"role": "user", "content": 'Answer with {"city": "Paris"} and nothing else.'}]
    asked = LONG | {"messages": messages, "max_tokens": 200}
    answer = client.chat.completions.create(**asked, response_format={"type": "json_object"})
    choice = answer.choices[0]
    text = choice.message.content or ""
    # A small model may write until it is cut off: that is then the beginning of an object.
    assert choice.finish_reason == "length" or isinstance(json.loads(text), dict)
    assert text.lstrip().startswith("{")


@feature("chat: n, logprobs, top_logprobs, seed, stop, logit_bias, penalties")
def sampling() -> None:
    asked = SHORT | {"temperature": 1, "seed": 1, "presence_penalty": 0.5, "frequency_penalty": 0.5}
    answers = [
        client.chat.completions.create(
            **asked, n=2, logprobs=True, top_logprobs=3, stop=["\n"], logit_bias={"0": -100}
        )
        for _ in range(2)
    ]
    assert len(answers[0].choices) == 2
    for choice in answers[0].choices:
        assert choice.logprobs is not None
        for token in choice.logprobs.content or ():
            assert token.logprob <= 0
            assert len(token.top_logprobs) == 3
    texts = [[choice.message.content for choice in answer.choices] for answer in answers]
    assert texts[0] == texts[1]


@feature("completions.create: n, logprobs, echo, several prompts, stream")
def completions() -> None:
    asked = {"model": CHAT_MODEL, "max_tokens": 4, "temperature": 0}
    answer = client.completions.create(
        **asked, prompt=["The sky is", "A dog is"], n=2, logprobs=2, echo=True
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.choices[2].text.startswith("A dog is")
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.token_logprobs
    plain = client.completions.create(**asked, prompt="The sky is")
    chunks = client.completions.create(**asked, prompt="The sky is", stream=True)
    assert "".join(c.choices[0].text for c in chunks if c.choices) == plain.choices[0].text


@feature("embeddings.create, floats and base64")
def embeddings() -> None:
    texts = ["a cat sat on the mat .", "the dog"]
    # By default the client asks for base64.
    packed = client.embeddings.create(model=EMBEDDING_MODEL, input=texts)
    floats = client.embeddings.create(model=EMBEDDING_MODEL, input=texts, encoding_format="float")
    for one, other in zip(packed.data, floats.data, strict=True):
        assert len(one.embedding) == 32
        assert max(abs(a - b) for a, b in zip(one.embedding, other.embedding, strict=True)) < 1e-5


@feature(
    "embeddings: dimensions, of a model that was not trained for it",
    refused="does not support matryoshka representation",
)
def fewer_dimensions() -> None:
    client.embeddings.create(model=EMBEDDING_MODEL, input="a cat", dimensions=8)


@feature("responses.create, retrieve, delete; previous_response_id")
def responses() -> None:
    asked = {"model": CHAT_MODEL, "temperature": 0, "max_output_tokens": 16}
    first = client.responses.create(**asked, input="Who are you?", instructions="Be kind.")
    assert first.output_text
    then = client.responses.create(**asked, input="And me?", previous_response_id=first.id)
    assert then.output_text
    assert client.responses.retrieve(first.id).output_text == first.output_text
    client.responses.delete(first.id)
    error_of(openai.NotFoundError, partial(client.responses.retrieve, first.id))


@feature("responses.stream, parse, tools")
def more_responses() -> None:
    asked: dict[str, Any] = {"model": CHAT_MODEL, "temperature": 0, "max_output_tokens": 100}
    parsed = client.responses.parse(**asked, input="Paris?", text_format=Weather)
    assert isinstance(parsed.output_parsed, Weather)
    tool = openai.pydantic_function_tool(Weather)["function"] | {"type": "function"}
    called = client.responses.create(**asked, input="Paris?", tools=[tool], tool_choice="required")
    calls = [item for item in called.output if item.type == "function_call"]
    Weather.model_validate_json(calls[0].arguments)
    with client.responses.stream(**asked | {"max_output_tokens": 16}, input="Who?") as events:
        seen = list(events)
    pieces = [event.delta for event in seen if event.type == "response.output_text.delta"]
    assert seen[-1].type in ("response.completed", "response.incomplete")
    assert "".join(pieces) == seen[-1].response.output_text != ""


@feature("AsyncOpenAI, with a stream")
async def asynchronous() -> None:
    async with openai.AsyncOpenAI(base_url=f"{BASE_URL}/v1", api_key=API_KEY) as other:
        stream = await other.chat.completions.create(**SHORT, stream=True)
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
    assert "".join(pieces)


@feature("typed errors: NotFoundError, AuthenticationError, BadRequestError with param")
def errors() -> None:
    wrong = client.with_options(api_key="wrong")
    for kind, asked_of, change in (
        (openai.NotFoundError, client, {"model": "nobody"}),
        (openai.AuthenticationError, wrong, {}),
        (openai.BadRequestError, client, {"temperature": 3}),
    ):
        error = error_of(kind, partial(asked_of.chat.completions.create, **SHORT | change))
        assert kind is not openai.BadRequestError or error.param == "temperature"


@feature("chat: images", refused="'image_url' is not offered: this model reads text only")
def images() -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    content = [{"type": "text", "text": "What is this?"}, picture]
    client.chat.completions.create(**SHORT | {"messages": [{"role": "user", "content": content}]})


@feature(
    "audio, images, moderations, files, batches, fine-tuning",
    refused="404",
    because="there are no such paths: only models that generate text and encoders are served here",
)
def others() -> None:
    client.moderations.create(input="Hello")


report("openai")
