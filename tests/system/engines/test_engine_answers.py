"""SmolLM2 served by real engines alone (`make engines`): chats, streams, scores, grammars, adapters."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import openai
import pytest

from catenary_lab.live.cluster import REAL, LiveCluster
from catenaryd.local.local_cluster import ClusterOptions
from engines.real_engines import LOUD, REAL_ENGINES, answer_of_the_engine
from language_model import MODEL
from machine_faults.idle_book import idle_book

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]


@pytest.fixture(scope="module", params=sorted(REAL_ENGINES))
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveCluster]:
    engine = REAL_ENGINES[request.param]
    folder = tmp_path_factory.mktemp(engine.name)
    options = ClusterOptions(
        1, models=(MODEL,), each_agent=(engine.settings,), ready_timeout_s=600.0
    )
    engine.install_alone(folder / "models", 512, 4)
    made = LiveCluster(options, folder, REAL, {"load_timeout_s": 600.0})
    with asyncio.Runner() as runner:
        try:
            runner.run(made.start())
            yield made
        finally:
            runner.run(made.stop())


@pytest.fixture
def client(cluster: LiveCluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"http://127.0.0.1:{cluster.http_port}/v1", api_key="none", timeout=300
    ) as made:
        yield made


def test_a_chat_is_answered_as_by_the_engine_itself(
    cluster: LiveCluster, client: openai.OpenAI
) -> None:
    asked = {
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
        "max_tokens": 24,
    }
    answer = client.chat.completions.create(model=MODEL, **asked)
    assert answer.choices[0].message.content == answer_of_the_engine(
        cluster.options.data_dir, asked
    )


def test_a_stream_has_the_pieces_of_the_whole_answer(client: openai.OpenAI) -> None:
    asked = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Name three colours."}],
        "temperature": 0,
        "max_tokens": 16,
    }
    whole = client.chat.completions.create(**asked).choices[0].message.content
    chunks = client.chat.completions.create(**asked, stream=True)
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == whole
    assert len(pieces) > 4


def test_characters_of_several_tokens_come_whole(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Smile three times."}],
        temperature=0,
        max_tokens=16,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"guided_choice": ["😀😀😀"]},
    )
    chunks = list(answer)
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == "😀😀😀"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens > 3


def test_log_probabilities_come_with_tokens(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        temperature=0,
        max_tokens=3,
        logprobs=True,
        top_logprobs=2,
    )
    scored = answer.choices[0].logprobs
    assert scored is not None
    assert scored.content is not None
    assert len(scored.content) == 3
    assert all(each.logprob <= 0 and len(each.top_logprobs) == 2 for each in scored.content)


def test_answers_of_a_schema_are_of_it(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Is water wet? Answer yes or no."}],
        temperature=0,
        max_tokens=8,
        extra_body={"guided_choice": ["yes", "no"]},
    )
    assert answer.choices[0].message.content in ("yes", "no")


def test_answers_of_a_json_schema_are_of_it(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Bern", "Oslo"]}, "days": {"enum": [1, 2, 3]}},
        "required": ["city", "days"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Name a city and a number of days."}],
        temperature=0,
        max_tokens=200,
        response_format={"type": "json_schema", "json_schema": {"name": "trip", "schema": schema}},
    )
    said = json.loads(answer.choices[0].message.content or "")
    assert said.keys() == {"city", "days"}
    assert said["city"] in ("Bern", "Oslo")
    assert said["days"] in (1, 2, 3)


def test_calls_are_forced_by_the_engine(client: openai.OpenAI) -> None:
    parameters = {
        "type": "object",
        "properties": {"city": {"enum": ["Bern", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    function = {"name": "get_weather", "strict": True, "parameters": parameters}
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "What is the weather like in Oslo?"}],
        temperature=0,
        max_tokens=80,
        tools=[{"type": "function", "function": function}],
        tool_choice="required",
        parallel_tool_calls=False,
    )
    (call,) = answer.choices[0].message.tool_calls or ()
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["city"] in ("Bern", "Oslo")


def test_an_adapter_changes_what_is_said_with_it_alone(
    cluster: LiveCluster, client: openai.OpenAI
) -> None:
    asked = {
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
        "max_tokens": 24,
    }
    listed = [model.id for model in client.models.list()]
    if f"{MODEL}:{LOUD}" not in listed:
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model=f"{MODEL}:{LOUD}", **asked)
        return

    def said(model: str) -> str | None:
        return client.chat.completions.create(model=model, **asked).choices[0].message.content

    plain = said(MODEL)
    loud = said(f"{MODEL}:{LOUD}")
    assert loud != plain
    assert said(LOUD) == loud
    assert said(MODEL) == plain
    data_dir = cluster.options.data_dir
    assert answer_of_the_engine(data_dir, {"model": f"model:{LOUD}", **asked}) == loud
    assert answer_of_the_engine(data_dir, asked) == plain


def test_everything_is_free_again(cluster: LiveCluster) -> None:
    idle_book(cluster.target, cluster.admin_target, "test_engine_answers")
