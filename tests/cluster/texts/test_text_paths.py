"""Embeddings and scores over HTTP from a real cluster, equal to those of the models' own library."""

from __future__ import annotations

import base64
import json
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from numpy.typing import NDArray

from catenary import Client
from catenary_agent.encoders.importing import EncoderOptions, import_encoder
from catenary_services.domain.ids import ModelKey
from catenary_services.models.model_repository import ModelRepository
from cluster_harness import RunningCluster, running_cluster
from small_models.jail_here import run_here
from small_models.text_models import minilm_folder

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

TEXTS = ["the cat sat on a mat .", "dog", "a dog on the mat sat", "cat " * 30]
MOST = 24


def tokens_of(folder: Path, *texts: str, most: int = MOST) -> Any:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    tokenizer.backend_tokenizer.no_truncation()
    return tokenizer(
        *texts, truncation=True, max_length=most, return_tensors="pt", return_token_type_ids=True
    )


def embeddings(folder: Path, texts: list[str], most: int = MOST) -> np.ndarray:
    """Embeddings of each text by itself, as `transformers` makes them."""
    from transformers import AutoModel

    network = AutoModel.from_pretrained(folder).eval()
    with torch.no_grad():
        vectors = [
            network(**tokens_of(folder, text, most=most)).last_hidden_state.mean(1)
            for text in texts
        ]
    return torch.nn.functional.normalize(torch.cat(vectors), dim=1).numpy()


def scores(folder: Path, pairs: list[tuple[str, str]]) -> list[float]:
    """Scores of each pair by itself, as `transformers` makes them."""
    from transformers import AutoModelForSequenceClassification

    network = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        return [
            float(torch.sigmoid(network(**tokens_of(folder, *pair)).logits)[0, 0]) for pair in pairs
        ]


def ask(cluster: RunningCluster, path: str, **body: object) -> Any:
    request = urllib.request.Request(f"{cluster.http}{path}", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def client_of(cluster: RunningCluster) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{cluster.http}/v1", api_key="x", max_retries=0, timeout=300)


def row_of(embedding: list[float] | str) -> NDArray[np.float32]:
    if isinstance(embedding, str):  # the client leaves what was asked for in base64 as it is
        return np.frombuffer(base64.b64decode(embedding), "<f4")
    return np.array(embedding, np.float32)


def test_embeddings_of_texts_and_of_their_tokens_are_those_of_the_library(
    cluster: RunningCluster, encoder: Path
) -> None:
    want = embeddings(encoder, TEXTS)
    ids = [tokens_of(encoder, text)["input_ids"][0].tolist() for text in TEXTS]
    with client_of(cluster) as client:
        for given in (TEXTS, ids):
            for form in ("float", "base64"):
                found = client.embeddings.create(
                    model="sentences", input=given, encoding_format=form
                )
                rows = [row_of(each.embedding) for each in found.data]
                np.testing.assert_allclose(np.array(rows), want, atol=1e-5)
                assert found.usage.prompt_tokens == sum(map(len, ids))
        assert {model.id for model in client.models.list()} == {"sentences", "judge"}
        many = client.embeddings.create(model="sentences", input=TEXTS * 250)
        rows = np.array([each.embedding for each in many.data])
        np.testing.assert_allclose(rows, np.tile(want, (250, 1)), atol=1e-5)


def test_scores_of_pairs_are_those_of_the_library(cluster: RunningCluster, judge: Path) -> None:
    pairs = [(TEXTS[0], second) for second in TEXTS] + [(TEXTS[3], TEXTS[3])]
    want = scores(judge, pairs)
    answer = ask(
        cluster,
        "/v1/score",
        model="judge",
        text_1=[first for first, _ in pairs],
        text_2=[second for _, second in pairs],
    )
    assert [each["score"] for each in answer["data"]] == pytest.approx(want, abs=1e-5)
    ranked = ask(cluster, "/v1/rerank", model="judge", query=TEXTS[0], documents=TEXTS)
    best = sorted(range(len(TEXTS)), key=lambda at: -want[at])
    assert [each["index"] for each in ranked["results"]] == best
    with Client(cluster.grpc) as client:
        whole = client.infer("judge", {"text": np.array(pairs, np.object_)})
    logits = whole.outputs["logits"][:, 0].astype(np.float64)
    assert (1 / (1 + np.exp(-logits))).tolist() == pytest.approx(want, abs=1e-5)


def test_scores_of_other_encoders_are_cosines(cluster: RunningCluster, encoder: Path) -> None:
    vectors = embeddings(encoder, TEXTS)
    answer = ask(cluster, "/score", model="sentences", text_1=TEXTS[0], text_2=TEXTS)
    found = [each["score"] for each in answer["data"]]
    assert found == pytest.approx((vectors @ vectors[0]).tolist(), abs=1e-5)


def test_minilm_is_asked_by_the_openai_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = minilm_folder()
    monkeypatch.setattr("catenary_agent.preparing.prepare.run_jailed", run_here)
    monkeypatch.setattr("catenary_agent.encoders.importing.run_jailed", run_here)
    key = ModelKey("minilm", "1")
    options = EncoderOptions(blocks=2, slo_ns=60 * 10**9)
    import_encoder(ModelRepository(tmp_path / "models"), folder, key, options)
    texts = ["A cat sits on the mat.", "Feline, resting.", "GPU prices rose " * 30]
    with running_cluster(tmp_path, models=(key.name,), agents=1) as cluster:
        with client_of(cluster) as client:
            found = client.embeddings.create(model="minilm", input=texts)
        rows = np.array([each.embedding for each in found.data])
        np.testing.assert_allclose(rows, embeddings(folder, texts, 256), atol=1e-5)
        ranked = ask(
            cluster, "/v1/rerank", model="minilm", query=texts[0], documents=texts[1:], top_n=1
        )
        assert [each["index"] for each in ranked["results"]] == [0]
