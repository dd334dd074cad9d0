"""`/v1/embeddings` by the `openai` client, against a gateway whose agent computes by a simple rule."""

from __future__ import annotations

import base64
from pathlib import Path

import aiohttp
import numpy as np
import openai
import pytest

from catenary_gateway.openai_http.encoders.embeddings import shortened
from catenary_services.security.keys import add_key
from generation_harness import TextStage
from shared_helpers.encoder_agent import (
    MOST,
    SENTENCES,
    SHORTENED,
    SIZE,
    all_paths_stage,
    embedding_of,
    word_tokenizer,
)

TEXTS = ["the cat sat on a mat .", "dog", "", "a dog on the mat sat"]


def ids_of(text: str) -> list[int]:
    return word_tokenizer().encode(text).ids


def expected(texts: list[str]) -> np.ndarray:
    return np.stack([embedding_of(ids_of(text)) for text in texts])


async def test_every_form_of_input_has_its_embeddings_in_order(client: openai.AsyncOpenAI) -> None:
    want = expected(TEXTS)
    for given, rows in (
        (TEXTS, want),
        (TEXTS[0], want[:1]),
        (ids_of(TEXTS[0]), want[:1]),
        ([ids_of(text) for text in TEXTS], want),
    ):
        for encoding in ("float", "base64"):
            found = await client.embeddings.create(
                model=SENTENCES, input=given, encoding_format=encoding, user="me"
            )
            assert [each.index for each in found.data] == list(range(len(rows)))
            assert {each.object for each in found.data} == {"embedding"}
            np.testing.assert_allclose(_vectors(found), rows, atol=1e-5)
            assert found.usage.prompt_tokens == found.usage.total_tokens
        # The client itself asks for base64 where its user names no form.
        usual = await client.embeddings.create(model=SENTENCES, input=given)
        np.testing.assert_allclose(_vectors(usual), rows, atol=1e-5)
    assert usual.usage.prompt_tokens == sum(len(ids_of(text)) for text in TEXTS)


def _vectors(answer: openai.types.CreateEmbeddingResponse) -> np.ndarray:
    rows = [each.embedding for each in answer.data]
    return np.array(
        [
            np.frombuffer(base64.b64decode(row), "<f4") if isinstance(row, str) else row
            for row in rows
        ]
    )


async def test_a_thousand_texts_are_one_request(
    client: openai.AsyncOpenAI, running: TextStage
) -> None:
    texts = [" ".join(["cat", "dog", "mat"][: n % 3 + 1]) for n in range(1000)]
    found = await client.embeddings.create(model=f"{SENTENCES}:1", input=texts)
    np.testing.assert_allclose(_vectors(found), expected(texts), atol=1e-4)
    assert running.agent.rows == 1000


async def test_texts_are_cut_and_tokens_are_not(client: openai.AsyncOpenAI) -> None:
    long = "cat " * 40
    found = await client.embeddings.create(model=SENTENCES, input=long)
    assert found.usage.prompt_tokens == MOST
    with pytest.raises(openai.BadRequestError) as raised:
        await client.embeddings.create(model=SENTENCES, input=[5] * (MOST + 1))
    assert (raised.value.param, raised.value.code) == ("input", "context_length_exceeded")


async def test_dimensions_are_for_models_that_were_made_for_them(
    client: openai.AsyncOpenAI,
) -> None:
    found = await client.embeddings.create(model=SHORTENED, input=TEXTS, dimensions=4)
    cut = expected(TEXTS)[:, :4]
    np.testing.assert_allclose(
        _vectors(found), cut / np.linalg.norm(cut, axis=1, keepdims=True), atol=1e-5
    )
    whole = await client.embeddings.create(model=SENTENCES, input=TEXTS, dimensions=SIZE)
    np.testing.assert_allclose(_vectors(whole), expected(TEXTS), atol=1e-5)
    for model, size, said in (
        (SENTENCES, 4, "does not support matryoshka representation"),
        (SHORTENED, 3, "was made for 4, 2 and 8"),
        (SHORTENED, 9, "was made for"),
    ):
        with pytest.raises(openai.BadRequestError, match=said) as raised:
            await client.embeddings.create(model=model, input="cat", dimensions=size)
        assert raised.value.param == "dimensions"


def test_a_cut_vector_of_zeros_stays_one() -> None:
    assert shortened(np.array([[0, 0, 3.0]], np.float32), 2).tolist() == [[0.0, 0.0]]


WRONG = [
    ("input", {"input": []}),
    ("input", {"input": None}),
    ("input", {"input": 5}),
    ("input", {"input": [[]]}),
    ("input", {"input": [5, "a"]}),
    ("input", {"input": ["a", [5]]}),
    ("input[0]", {"input": [None]}),
    ("input", {"input": [-1]}),
    ("input", {"input": [2**40]}),
    ("input", {"input": ["a"] * 2049}),
    ("model", {"model": ""}),
    ("model", {"model": "tiny"}),
    ("model", {"model": "toy"}),
    ("model", {"model": "judge"}),
    ("encoding_format", {"encoding_format": "hex"}),
    ("dimensions", {"dimensions": 0}),
    ("dimensions", {"dimensions": "4"}),
    ("user", {"user": 5}),
    ("priority", {"priority": 2**31}),
    ("truncate_prompt_tokens", {"truncate_prompt_tokens": 5}),
    ("dimensions", {"dimensions": 10**400}),
]


@pytest.mark.parametrize(("param", "asked"), WRONG)
async def test_what_is_wrong_is_named(
    running: TextStage, param: str, asked: dict[str, object]
) -> None:
    body = {"model": SENTENCES, "input": "cat", **asked}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{running.http}/v1/embeddings", json=body) as answer,
    ):
        error = (await answer.json())["error"]
    assert (answer.status, error["param"]) == (400, param), error
    assert running.agent.rows == 0


async def test_keys_scopes_and_quotas_hold(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    few = add_key(keys, "few", [f"infer:{SENTENCES}"], {"requests_per_s": 0.001, "burst": 2})
    async with all_paths_stage(tmp_path, api_keys_file=keys) as stage:

        def client_of(key: str) -> openai.AsyncOpenAI:
            return openai.AsyncOpenAI(base_url=f"{stage.http}/v1", api_key=key, max_retries=0)

        async with client_of("wrong") as client:
            with pytest.raises(openai.AuthenticationError):
                await client.embeddings.create(model=SENTENCES, input="cat")
        async with client_of(few) as client:
            with pytest.raises(openai.PermissionDeniedError):
                await client.embeddings.create(model=SHORTENED, input="cat")
            await client.embeddings.create(model=SENTENCES, input=["cat sat"] * 10)
            with pytest.raises(openai.RateLimitError, match="requests per second"):
                await client.embeddings.create(model=SENTENCES, input="cat")


async def test_tokens_of_texts_count_against_the_quota_of_a_key(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    few = add_key(keys, "few", ["infer"], {"tokens_per_s": 0.001, "token_burst": 40})
    async with all_paths_stage(tmp_path, api_keys_file=keys) as stage:
        made = openai.AsyncOpenAI(base_url=f"{stage.http}/v1", api_key=few, max_retries=0)
        async with made as client:
            with pytest.raises(openai.BadRequestError):
                await client.embeddings.create(model="judge", input="cat")
            await client.embeddings.create(model=SENTENCES, input=["cat sat"] * 8)
            with pytest.raises(openai.RateLimitError, match="may use 20"):
                await client.embeddings.create(model=SENTENCES, input=["cat sat on"] * 4)
