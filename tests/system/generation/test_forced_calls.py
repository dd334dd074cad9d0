"""SmolLM2 calls tools because it must: openai's own client, a gateway, a ring of two real agents.

A model of this size calls nothing of its own accord, and its template knows no tools.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from cluster_harness import RunningCluster, running_cluster
from language_model import MODEL, install, ring_placement

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Says what the weather is like in a city.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Bern", "Paris", "Oslo"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 7},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
TIME = {
    "type": "function",
    "function": {
        "name": "get_time",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"utc": {"type": "boolean"}},
            "required": ["utc"],
            "additionalProperties": False,
        },
    },
}
SAID = [{"role": "user", "content": "What will the weather be like in Paris for three days?"}]
ASKED: dict[str, Any] = {
    "model": MODEL,
    "messages": SAID,
    "tools": [WEATHER, TIME],
    "temperature": 0,
    "max_tokens": 120,
    "parallel_tool_calls": False,
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    data_dir = tmp_path_factory.mktemp("calls")
    install(data_dir / "models")
    placement = {"models": [ring_placement(30, agents=2)]}
    with running_cluster(data_dir, models=(MODEL,), placement=placement, agents=2) as running:
        yield running


@pytest.fixture
def client(cluster: RunningCluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.http}/v1", api_key="none", timeout=300) as made:
        yield made


def check(call: Any) -> dict[str, Any]:
    """Returns the arguments of a call, after they were compared with the schema of its tool."""
    arguments = json.loads(call.function.arguments)
    if call.function.name == "get_time":
        assert isinstance(arguments.pop("utc"), bool)
        assert arguments == {}
        return {}
    assert call.function.name == "get_weather"
    assert arguments.keys() == {"city", "days"}
    assert arguments["city"] in ("Bern", "Paris", "Oslo")
    assert 1 <= arguments["days"] <= 7
    return dict(arguments)


def test_a_required_call_comes_with_arguments_of_its_schema(client: openai.OpenAI) -> None:
    answers = [
        client.chat.completions.create(**ASKED | asked, tool_choice="required")
        for asked in ({}, {"temperature": 1.5, "seed": 1}, {"temperature": 1.5, "seed": 2})
    ]
    for answer in answers:
        (choice,) = answer.choices
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        (call,) = choice.message.tool_calls or ()
        check(call)
    # The client sends the call back with its result, and asks on.
    message = answers[0].choices[0].message
    (call,) = message.tool_calls or ()
    result = {"role": "tool", "tool_call_id": call.id, "content": "Rain."}
    last = client.chat.completions.create(
        **ASKED | {"messages": [*SAID, message, result], "max_tokens": 8}, tool_choice="none"
    )
    assert last.choices[0].message.content


def test_a_named_tool_is_called_and_streamed(client: openai.OpenAI) -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    whole = client.chat.completions.create(**ASKED, tool_choice=named)
    (expected,) = whole.choices[0].message.tool_calls or ()
    assert expected.function.name == "get_weather"
    with client.chat.completions.stream(**ASKED, tool_choice=named) as stream:
        pieces = [
            event.arguments_delta
            for event in stream
            if event.type == "tool_calls.function.arguments.delta"
        ]
        answer = stream.get_final_completion()
    (call,) = answer.choices[0].message.tool_calls or ()
    assert answer.choices[0].finish_reason == "tool_calls"
    assert call.function.arguments == expected.function.arguments == "".join(pieces)
    assert call.function.parsed_arguments == check(call)
    assert len(pieces) > 3


def test_several_calls_are_forced_and_bounded(client: openai.OpenAI) -> None:
    asked = ASKED | {"parallel_tool_calls": True, "temperature": 1, "seed": 3}
    answer = client.chat.completions.create(**asked, tool_choice="required")
    calls = answer.choices[0].message.tool_calls or []
    assert calls
    for call in calls:
        check(call)
    assert len({call.id for call in calls}) == len(calls)


def test_an_answer_may_be_a_call_or_match_its_own_schema(client: openai.OpenAI) -> None:
    described = {
        "type": "json_schema",
        "json_schema": {
            "name": "answer",
            "schema": {
                "type": "object",
                "properties": {"known": {"type": "boolean"}},
                "required": ["known"],
                "additionalProperties": False,
            },
        },
    }
    answer = client.chat.completions.create(**ASKED, response_format=described)
    message = answer.choices[0].message
    if message.tool_calls:
        check(message.tool_calls[0])
    else:
        assert json.loads(message.content or "").keys() == {"known"}


def test_a_free_answer_is_text_or_a_call_that_fits(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**ASKED | {"max_tokens": 40})
    message = answer.choices[0].message
    for call in message.tool_calls or ():
        check(call)
    assert message.content or message.tool_calls
