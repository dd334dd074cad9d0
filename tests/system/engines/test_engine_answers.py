"""SmolLM2 served by real engines alone (`make engines`): chats, streams, scores, grammars."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from cluster_harness import RunningCluster, running_cluster
from engines.real_engines import REAL_ENGINES, answer_of_the_engine
from language_model import MODEL

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]


@pytest.fixture(scope="module", params=sorted(REAL_ENGINES))
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningCluster]:
    engine = REAL_ENGINES[request.param]
    settings = engine.settings
    data_dir = tmp_path_factory.mktemp(engine.name)
    engine.install(data_dir / "models", 512, 4)
    config = {"agent": settings, "scheduler": {"load_timeout_s": 600.0}}
    with running_cluster(data_dir, models=(MODEL,), agents=1, config=config) as running:
        yield running


@pytest.fixture
def client(cluster: RunningCluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.http}/v1", api_key="none", timeout=300) as made:
        yield made


def test_a_chat_is_answered_as_by_the_engine_itself(
    cluster: RunningCluster, client: openai.OpenAI
) -> None:
    asked = {
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
        "max_tokens": 24,
    }
    answer = client.chat.completions.create(model=MODEL, **asked)
    assert answer.choices[0].message.content == answer_of_the_engine(cluster.data_dir, asked)


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
    answer = client.completions.create(
        model=MODEL, prompt="😀😀😀😀😀😀😀😀", temperature=0, max_tokens=9, stream=True
    )
    text = "".join(chunk.choices[0].text for chunk in answer)
    assert text.startswith("😀😀")


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


def test_everything_is_free_again(cluster: RunningCluster) -> None:
    cluster.assert_idle_book("test_engine_answers")
