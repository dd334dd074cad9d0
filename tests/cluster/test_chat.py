"""The whole way of a chat: openai's own client, a gateway, a ring of three real agents."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import openai
import pytest

import catenary
from cluster_harness import RunningCluster, running_cluster, wait_until
from language_model import MODEL, answer_to, install, ring_placement
from small_models.prompts import PROMPTS

pytestmark = pytest.mark.timeout(600)  # the first test of all imports the model

TOKENS = 24


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    data_dir = tmp_path_factory.mktemp("chat")
    install(data_dir / "models")
    placement = {"models": [ring_placement(30)]}
    with running_cluster(data_dir, models=(MODEL,), placement=placement) as running:
        yield running


@pytest.fixture
def client(cluster: RunningCluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.http}/v1", api_key="none", timeout=60) as made:
        yield made


def ask(client: openai.OpenAI, question: str, **options: object) -> str:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=TOKENS,
        **options,
    )
    return str(answer.choices[0].message.content)


def test_a_greedy_answer_is_that_of_transformers(
    cluster: RunningCluster, client: openai.OpenAI
) -> None:
    question = "Why does a chain that hangs between two poles form a curve?"
    expected = answer_to(question, 40)
    with catenary.Client(cluster.grpc) as ours:
        result = ours.chat(MODEL, question, max_tokens=len(expected))
    assert list(result.token_ids) == expected
    assert result.text.startswith(ask(client, question))


def test_a_stream_has_the_pieces_of_the_whole_answer(client: openai.OpenAI) -> None:
    whole = ask(client, PROMPTS[0])
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": PROMPTS[0]}],
            temperature=0,
            max_tokens=TOKENS,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == whole
    assert len(pieces) > 2
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens <= TOKENS


def test_answers_do_not_depend_on_their_company(client: openai.OpenAI) -> None:
    alone = [ask(client, prompt) for prompt in PROMPTS[:4]]

    async def together() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=str(client.base_url), api_key="none", timeout=60
        ) as many:
            answers = await asyncio.gather(
                *(
                    many.chat.completions.create(
                        model=MODEL,
                        messages=[{"role": "user", "content": prompt}],
                        temperature=0,
                        max_tokens=TOKENS,
                    )
                    for prompt in PROMPTS[:4]
                )
            )
        return [str(answer.choices[0].message.content) for answer in answers]

    assert asyncio.run(together()) == alone


def test_more_sessions_than_the_chain_takes_wait_their_turn(cluster: RunningCluster) -> None:
    async def many() -> list[catenary.GenerationResult]:
        async with catenary.AsyncClient(cluster.grpc) as ours:
            return await asyncio.gather(
                *(ours.chat(MODEL, prompt, max_tokens=6) for prompt in PROMPTS[:10])
            )

    assert all(len(result.token_ids) <= 6 for result in asyncio.run(many()))


def test_unknown_models_and_wrong_fields_raise_typed_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="nobody", messages=[{"role": "user", "content": "x"}])
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, "x", n=0)
    assert caught.value.param == "n"
    assert [model.id for model in client.models.list()] == [MODEL]


def test_everything_is_free_again(cluster: RunningCluster, client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": PROMPTS[4]}],
        max_tokens=200,
        stream=True,
    )
    next(iter(stream))
    stream.close()  # a client that goes away in the middle
    with catenary.Client(cluster.grpc, admin_target=cluster.admin) as ours:
        wait_until(lambda: ours.status().live_reservations == 0, 5.0, "freeing every slot")
