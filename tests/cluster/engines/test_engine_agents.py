"""A cluster whose agents serve a model with engines: chat, streams, and engines that are killed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import openai
import psutil
import pytest

import catenary
from cluster_harness import RunningCluster, running_cluster, wait_until
from engines.engine_models import engine_model
from engines.fake_engine import fake_python, token_at
from small_models.tiny_tokenizer import END, MORE

pytestmark = pytest.mark.timeout(300)

MODEL = "tiny"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    data_dir = tmp_path_factory.mktemp("engines")
    engine_model(data_dir / "models", MODEL, arguments=("fake.token_s=0.02",))
    settings = {"decoder": "llama_server", "engine_python": str(fake_python(data_dir))}
    with running_cluster(
        data_dir, models=(MODEL,), agents=2, config={"agent": settings}
    ) as running:
        yield running


@pytest.fixture
def client(cluster: RunningCluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.http}/v1", api_key="none", timeout=60) as made:
        yield made


def expected(prompt_tokens: int, count: int) -> list[int]:
    """The tokens of an answer, wherever it is generated."""
    return [token_at(prompt_tokens + each, MORE, END) for each in range(count)]


def engines_of(cluster: RunningCluster) -> list[int]:
    """The processes of engines, of all agents."""
    found = psutil.Process(cluster.process.pid).children(recursive=True)
    alive = [each for each in found if each.is_running() and each.status() != "zombie"]
    return [each.pid for each in alive if "engine_child.py" in " ".join(each.cmdline())]


def test_a_chat_is_answered_by_an_engine(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hello"}], max_tokens=12
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    assert answer.choices[0].finish_reason == "length"


def test_a_stream_has_the_tokens_of_the_engine(cluster: RunningCluster) -> None:
    with catenary.Client(cluster.grpc) as ours:
        result = ours.chat(MODEL, "hello", max_tokens=20)
        assert list(result.token_ids) == expected(result.usage.prompt_tokens, 20)


def test_streams_go_on_elsewhere_when_an_engine_is_killed(cluster: RunningCluster) -> None:
    tokens = 120

    async def streams() -> list[catenary.GenerationResult]:
        async with catenary.AsyncClient(cluster.grpc) as ours:
            asked = [
                asyncio.ensure_future(ours.chat(MODEL, f"stream {each}", max_tokens=tokens))
                for each in range(6)
            ]
            await asyncio.sleep(0.8)
            os.kill(engines_of(cluster)[0], signal.SIGKILL)
            return await asyncio.gather(*asked)

    for result in asyncio.run(streams()):
        assert list(result.token_ids) == expected(result.usage.prompt_tokens, tokens)
    wait_until(lambda: len(engines_of(cluster)) == 2, 60, "the engine is started again")


def test_everything_is_free_again(cluster: RunningCluster) -> None:
    cluster.assert_idle_book("test_engine_agents")
