"""SmolLM2 served by the real llama-server (`make engines`): chat, streams, kills, moves to blocks."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import openai
import psutil
import pytest

import catenary
from catenary_agent.decoders.importing.engine_models import import_engine_model
from catenary_agent.decoders.importing.import_worker import ImportOptions
from catenary_services.domain.ids import ModelKey
from catenary_services.models.model_repository import ModelRepository
from catenaryd.demo.demo_language_model import weights_file
from cluster_harness import ROOT, RunningCluster, running_cluster, wait_until

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

MODEL = "smollm2-gguf"
PYTHON = ROOT / ".venv-engines" / "llama_server" / "bin" / "python"


def engine_settings() -> dict[str, object]:
    if not PYTHON.exists():
        pytest.skip("needs llama-server: make engines", allow_module_level=True)
    return {"decoder": "llama_server", "engine_python": str(PYTHON)}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    data_dir = tmp_path_factory.mktemp("llama")
    repository = ModelRepository(data_dir / "models")
    options = ImportOptions(session_tokens=512, max_sessions=4)
    key = ModelKey(MODEL, "1")
    import_engine_model(repository, weights_file(), key, "llama_server", options)
    with running_cluster(
        data_dir, models=(MODEL,), agents=2, config={"agent": engine_settings()}
    ) as running:
        yield running


@pytest.fixture
def client(cluster: RunningCluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.http}/v1", api_key="none", timeout=300) as made:
        yield made


def engines_of(cluster: RunningCluster) -> list[int]:
    found = psutil.Process(cluster.process.pid).children(recursive=True)
    alive = [each for each in found if each.is_running() and each.status() != "zombie"]
    return [each.pid for each in alive if "engine_child.py" in " ".join(each.cmdline())]


class EngineConnection(http.client.HTTPConnection):
    """A connection to the Unix socket of an engine."""

    def __init__(self, path: Path) -> None:
        super().__init__("engine", timeout=300)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(str(self._path))


def answer_of_the_engine(cluster: RunningCluster, asked: dict[str, object]) -> str:
    """What llama-server itself answers, by its own tokenizer and template."""
    (path, *_) = (cluster.data_dir / "run").glob("engine-*/engine.sock")
    connection = EngineConnection(path)
    connection.request("POST", "/v1/chat/completions", json.dumps(asked))
    return str(json.loads(connection.getresponse().read())["choices"][0]["message"]["content"])


def test_a_chat_is_answered_as_by_the_engine_itself(
    cluster: RunningCluster, client: openai.OpenAI
) -> None:
    asked = {
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
        "max_tokens": 24,
    }
    answer = client.chat.completions.create(model=MODEL, **asked)
    assert answer.choices[0].message.content == answer_of_the_engine(cluster, asked)


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


def test_streams_go_on_elsewhere_when_an_engine_is_killed(cluster: RunningCluster) -> None:
    tokens = 40

    async def streams() -> list[catenary.GenerationResult]:
        async with catenary.AsyncClient(cluster.grpc, timeout_s=300) as ours:
            asked = [
                asyncio.ensure_future(
                    ours.chat(MODEL, f"Count to a hundred from {each}.", max_tokens=tokens)
                )
                for each in range(6)
            ]
            await asyncio.sleep(4)
            os.kill(engines_of(cluster)[0], signal.SIGKILL)
            return await asyncio.gather(*asked)

    results = asyncio.run(streams())
    assert all(result.finish_reason in ("length", "stop") for result in results)
    assert any(result.chain_changes for result in results)
    wait_until(lambda: len(engines_of(cluster)) == 2, 120, "the engine is started again")


def test_everything_is_free_again(cluster: RunningCluster) -> None:
    cluster.assert_idle_book("test_llama_server")
