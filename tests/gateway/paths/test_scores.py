"""Scores and order of documents, of cross encoders by pairs and of others by their embeddings."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

import aiohttp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from catenary import Client
from catenary_gateway.generation.text.encoder_config import EncoderConfig
from catenary_gateway.inference import InferenceOptions, InferenceRequest
from catenary_gateway.tensors import token_tensors
from catenary_gateway.tensors.raw_tensors import object_array
from catenary_gateway.tensors.token_tensors import with_tokens
from catenary_services.errors import InvalidInput
from generation_harness import TextStage
from shared_helpers.encoder_agent import (
    CLASSES,
    JUDGE,
    MOST,
    SENTENCES,
    VOCABULARY,
    cosine,
    embedding_of,
    judge_model,
    logit_of,
    word_tokenizer,
)
from small_models.text_here import codec_of

QUERY = "the cat"
DOCUMENTS = ["a dog .", "cat sat on the mat", "on a mat . " * 9, "dog"]


def pair_of(first: str, second: str) -> tuple[list[int], list[int]]:
    """The tokens of a pair as the library cuts them."""
    tokenizer = word_tokenizer()
    tokenizer.enable_truncation(MOST, strategy="longest_first")
    encoded = tokenizer.encode(first, second)
    return encoded.ids, encoded.type_ids


def sigmoid(logit: float) -> float:
    return 1 / (1 + math.exp(-logit))


def judged(documents: Sequence[str]) -> list[float]:
    return [sigmoid(logit_of(*pair_of(QUERY, document))) for document in documents]


def compared(documents: Sequence[str]) -> list[float]:
    query = embedding_of(word_tokenizer().encode(QUERY).ids)

    def vector(text: str) -> np.ndarray:
        ids = word_tokenizer().encode(text).ids
        return embedding_of(ids if len(ids) <= MOST else [*ids[: MOST - 1], ids[-1]])

    return [cosine(query, vector(document)) for document in documents]


async def ask(stage: TextStage, path: str, **body: object) -> tuple[int, dict]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{stage.http}{path}", json=body) as answer,
    ):
        return answer.status, await answer.json()


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
@pytest.mark.parametrize(("model", "rule"), [(JUDGE, judged), (SENTENCES, compared)])
async def test_one_text_is_scored_with_one_and_with_many(
    running: TextStage, path: str, model: str, rule: object
) -> None:
    want = rule(DOCUMENTS)
    for second, scores in ((DOCUMENTS, want), (DOCUMENTS[0], want[:1])):
        status, answer = await ask(running, path, model=model, text_1=QUERY, text_2=second)
        assert status == 200, answer
        assert [each["score"] for each in answer["data"]] == pytest.approx(scores, abs=1e-5)
        assert [each["index"] for each in answer["data"]] == list(range(len(scores)))
        assert (answer["object"], answer["model"]) == ("list", model)
        assert answer["usage"]["prompt_tokens"] > 0
    many = [QUERY] * len(DOCUMENTS)
    _, answer = await ask(running, path, model=model, text_1=many, text_2=DOCUMENTS)
    assert [each["score"] for each in answer["data"]] == pytest.approx(want, abs=1e-5)


async def test_logits_are_answered_where_no_activation_is_wanted(running: TextStage) -> None:
    _, answer = await ask(
        running, "/v1/score", model=JUDGE, text_1=QUERY, text_2=DOCUMENTS, use_activation=False
    )
    logits = [logit_of(*pair_of(QUERY, document)) for document in DOCUMENTS]
    assert [each["score"] for each in answer["data"]] == pytest.approx(logits, abs=1e-5)


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
async def test_documents_come_in_the_order_of_their_scores(running: TextStage, path: str) -> None:
    scores = judged(DOCUMENTS)
    best = sorted(range(len(scores)), key=lambda at: -scores[at])
    documents = [DOCUMENTS[0], *({"text": text} for text in DOCUMENTS[1:])]
    status, answer = await ask(running, path, model=JUDGE, query=QUERY, documents=documents)
    assert status == 200, answer
    assert [each["index"] for each in answer["results"]] == best
    for each in answer["results"]:
        assert each["relevance_score"] == pytest.approx(scores[each["index"]], abs=1e-5)
        assert each["document"] == {"text": DOCUMENTS[each["index"]]}
    for few in (2, 99, None):
        _, answer = await ask(
            running,
            path,
            model=JUDGE,
            query=QUERY,
            documents=DOCUMENTS,
            top_n=few,
            return_documents=False,
        )
        assert [each["index"] for each in answer["results"]] == best[:few]
        assert all("document" not in each for each in answer["results"])


@pytest.mark.parametrize(
    ("path", "param", "asked"),
    [
        ("/v1/score", "text_1", {"text_1": []}),
        ("/v1/score", "text_2", {"text_2": None}),
        ("/v1/score", "text_2[1]", {"text_2": ["a", 5]}),
        ("/v1/score", "text_2", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}),
        ("/v1/score", "model", {"model": CLASSES}),
        ("/v1/score", "model", {"model": "tiny"}),
        ("/v1/score", "use_activation", {"use_activation": "no"}),
        ("/v1/rerank", "query", {"query": None}),
        ("/v1/rerank", "documents", {"documents": []}),
        ("/v1/rerank", "documents[0].text", {"documents": [{}]}),
        ("/v1/rerank", "documents", {"documents": ["a"] * 2049}),
        ("/v1/rerank", "top_n", {"top_n": -1}),
        ("/v1/rerank", "return_documents", {"return_documents": 1}),
        ("/v1/rerank", "truncate_prompt_tokens", {"truncate_prompt_tokens": 9}),
    ],
)
async def test_what_is_wrong_is_named(
    running: TextStage, path: str, param: str, asked: dict[str, object]
) -> None:
    usual = {"model": JUDGE, "text_1": "a", "text_2": "b", "query": "a", "documents": ["b"]}
    status, answer = await ask(running, path, **(usual | asked))
    assert (status, answer["error"]["param"]) == (400, param), answer
    assert running.agent.rows == 0


async def test_pairs_go_over_the_open_inference_protocol(running: TextStage) -> None:
    pairs = np.array([[QUERY, document] for document in DOCUMENTS], np.object_)

    def infer() -> np.ndarray:
        with Client(running.grpc) as client:
            return client.infer(JUDGE, {"text": pairs}).outputs["logits"]

    found = await asyncio.to_thread(infer)
    logits = [[logit_of(*pair_of(QUERY, document))] for document in DOCUMENTS]
    np.testing.assert_allclose(found, logits, atol=1e-5)
    tensor = {"name": "text", "datatype": "BYTES", "shape": [4, 2], "data": pairs.tolist()}
    status, answer = await ask(running, f"/v2/models/{JUDGE}/infer", inputs=[tensor])
    assert status == 200, answer
    assert answer["outputs"][0]["data"] == pytest.approx([each for (each,) in logits], abs=1e-5)
    for model, shape in ((SENTENCES, [4, 2]), (JUDGE, [4, 3]), (JUDGE, [1, 2, 2])):
        wrong = tensor | {"shape": shape}
        status, answer = await ask(running, f"/v2/models/{model}/infer", inputs=[wrong])
        assert status == 400
        assert "shape" in answer["error"]


LONG_PAIRS = ((17, 16), (16, 17), (MOST + 1, MOST), (MOST, MOST + 1), (17, 17), (40, 3))
WORDS = st.lists(st.sampled_from([*VOCABULARY[4:], "unheard"]), max_size=40).map(" ".join)


@settings(max_examples=60, deadline=None)
@given(pairs=st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=5))
@example(pairs=[("the " * first, "cat " * second) for first, second in LONG_PAIRS])
async def test_pairs_are_cut_as_the_library_cuts_them(pairs: list[tuple[str, str]]) -> None:
    model = judge_model()
    texts = object_array([text.encode() for pair in pairs for text in pair], (len(pairs), 2))
    asked = InferenceRequest(model, "id", {"text": texts}, len(pairs), (0,), InferenceOptions())
    made, order = await with_tokens(asked, codec_of(word_tokenizer()))
    for row, index in enumerate(order):
        ids, type_ids = pair_of(*pairs[index])
        size = made.row_sizes[row]
        assert size == len(ids)
        assert made.inputs["input_ids"][row, :size].tolist() == ids
        assert made.inputs["token_type_ids"][row, :size].tolist() == type_ids
        assert not made.inputs["token_type_ids"][row, size:].any()


async def test_a_text_of_a_pair_that_is_too_long_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(token_tensors, "LONGEST_TEXT_BYTES", 8)
    texts = object_array([b"cat", b"cat", b"cat", b"the  cat "], (2, 2))
    asked = InferenceRequest(judge_model(), "id", {"text": texts}, 2, (0,), InferenceOptions())
    with pytest.raises(InvalidInput, match="row 1 has 9 bytes"):
        await with_tokens(asked, codec_of(word_tokenizer()))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, EncoderConfig()),
        ({"is_matryoshka": True}, EncoderConfig(is_matryoshka=True)),
        (
            {"matryoshka_dimensions": [256, 64]},
            EncoderConfig(is_matryoshka=True, dimensions=(256, 64)),
        ),
        ({"matryoshka_dimensions": "many"}, EncoderConfig()),
        (
            {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
            EncoderConfig(activation="Identity"),
        ),
        (
            {"sbert_ce_default_activation_function": "torch.nn.modules.activation.Tanh"},
            EncoderConfig(activation="Tanh"),
        ),
        (
            {"sentence_transformers": {"activation_fn": "os.system"}},
            EncoderConfig(activation="os.system"),
        ),
    ],
)
def test_the_configuration_says_what_answers_are_for(
    config: dict[str, object], said: EncoderConfig
) -> None:
    assert EncoderConfig.of(config) == said
